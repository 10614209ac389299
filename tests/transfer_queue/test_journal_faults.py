"""A journal that fails, hangs, or answers in any order; one entry a verb, in the order of the acts."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import torch

from asyncrl.errors import DeadlineError, JournalWriteError, StaleLeaseError, StoreError
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.transfer_queue import TransferQueue

Look = Callable[..., dict[str, Any]]
MakeJournal = Callable[..., Any]
Furnish = Callable[[TransferQueue], Awaitable[None]]
Verb = Callable[[TransferQueue], Coroutine[Any, Any, None]]


@pytest.fixture
async def journal(hand_journal: MakeJournal) -> Any:
    return hand_journal()


@pytest.fixture
async def journaled(journal: Any, furnish_queue: Furnish) -> TransferQueue:
    """A furnished store over `journal`."""
    await furnish_queue(queue := TransferQueue(journal))
    return queue


async def turns_of_the_loop(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


# --- one verb, one transaction


async def test_a_verb_is_one_entry_which_means_what_it_did(verb: Verb, journal: Any, journaled: TransferQueue, look: Look) -> None:
    """A process that ends between two entries leaves a verb done, or not begun."""
    before, count = look(journaled, is_durable=True), len(journal.entries)
    assert look(journal.next_queue(), is_durable=True) == before
    await verb(journaled)
    assert len(journal.entries) == count + 1
    assert look(journaled, is_durable=True) != before
    assert look(journal.next_queue(), is_durable=True) == look(journaled, is_durable=True)


async def test_only_records_evaluations_and_what_asks_for_it_are_synced(journal: Any, journaled: TransferQueue) -> None:
    count = len(journal.synced)
    assert count == 2
    await journaled.record(3, ["d_0_0", "d_0_1"], partition_id="train")
    await journaled.sync()
    await journaled.note_evaluation(1)
    await journaled.open_lease(GroupLease(uid="e"))
    last = len(journal.entries)
    assert journal.synced[count:] == [last - 3, last - 2, last - 1]


async def test_what_is_refused_or_read_leaves_no_entry(journal: Any, journaled: TransferQueue) -> None:
    count = len(journal.entries)
    stale = SessionLease(uid="a", session_id=0)
    for refused in (
        journaled.kv_put("a_0_0", partition_id="train", lease=stale, tag={"n": 1}),
        journaled.open_lease(stale),
        journaled.purge(2),
        journaled.kv_clear(["b"], partition_id="train"),
        journaled.record(9, ["d_0_0", "d_0_1"], partition_id="train"),
        journaled.put_turn(SessionLease(uid="c", session_id=0), 7, {}),
    ):
        with pytest.raises(StoreError):
            await refused
    await journaled.kv_batch_get(["b_0_0"], partition_id="train", fields=["advantages"])
    await journaled.kv_clear(["nobody"], partition_id="train")
    await journaled.close_lease(stale)
    assert len(journal.entries) == count


async def test_what_stages_write_is_no_entry(journal: Any, journaled: TransferQueue) -> None:
    """It can be computed again; the largest columns of all would double what is written."""
    fields = {name for entry in journal.entries for op in entry if hasattr(op, "field") for name in [op.field]}
    assert fields == {"raw_prompt", "responses"}


# --- a journal that fails


async def test_after_a_failure_no_verb_changes_anything(any_verb: Verb, journal: Any, journaled: TransferQueue, look: Look) -> None:
    before, count = look(journaled), len(journal.entries)
    journal.fail()
    for _ in range(2):
        with pytest.raises(JournalWriteError, match="database or disk is full") as raised:
            await any_verb(journaled)
        assert raised.value is journal.failure
    assert look(journaled) == before
    assert len(journal.entries) == count


async def test_the_verb_that_fails_raises_and_what_was_kept_is_the_state_before_it(
    verb: Verb, journal: Any, journaled: TransferQueue, look: Look
) -> None:
    before = look(journaled, is_durable=True)
    journal._fails_at = len(journal.entries)
    with pytest.raises(JournalWriteError, match="disk is full"):
        await verb(journaled)
    assert look(journal.next_queue(), is_durable=True) == before
    after = look(journaled)
    with pytest.raises(JournalWriteError, match="disk is full"):
        await journaled.open_lease(GroupLease(uid="z"))
    assert look(journaled) == after


async def test_a_store_can_be_read_after_its_journal_failed(journal: Any, journaled: TransferQueue) -> None:
    journal.fail()
    watch = journaled.kv_watch("train")
    assert await anext(watch) == (await journaled.kv_list("train"))["train"]
    assert len(await journaled.kv_batch_get(["d_0_0"], partition_id="train", fields=["responses"])) == 1
    assert len(await journaled.kv_turns("c", 0)) == 1
    assert journaled.stats()["keys"] == 9
    assert await journaled.describe(["d_0_0"], partition_id="train")


async def test_wherever_the_journal_ends_it_is_the_store_of_that_moment(journal: Any, furnish_queue: Furnish, look: Look) -> None:
    queue = TransferQueue(journal)
    moments = [look(queue, is_durable=True)]
    append = journal.append

    def noting(entry: Any, *, synced: bool = False) -> Any:
        moments.append(look(queue, is_durable=True))
        return append(entry, synced=synced)

    journal.append = noting
    await furnish_queue(queue)
    assert len(moments) == len(journal.entries) + 1 == 18
    for count, moment in enumerate(moments):
        assert look(journal.next_queue(count), is_durable=True) == moment


async def test_everybody_who_waits_is_told_of_a_failure(hand_journal: MakeJournal) -> None:
    journal = hand_journal(is_by_hand=True)
    queue = TransferQueue(journal)
    waiting = [asyncio.create_task(queue.open_lease(GroupLease(uid=f"g{number}"))) for number in range(5)]
    await turns_of_the_loop()
    assert [task.done() for task in waiting] == [False] * 5
    journal.fail()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [JournalWriteError] * 5


# --- a journal that hangs


async def test_a_journal_that_never_answers_is_named_by_its_deadline(
    verb: Verb, journal: Any, journaled: TransferQueue, hand_journal: MakeJournal, look: Look
) -> None:
    silent = hand_journal(saved=journal.first(len(journal.entries)), is_by_hand=True)
    queue = TransferQueue(silent, silent.load(1), commit_timeout_s=0.005, weights_step=1)
    await queue.open_lease(StepLease(step=2))
    before = look(queue, is_durable=True)
    with pytest.raises(DeadlineError, match=r"the journal did not acknowledge within store.commit_timeout_s = 0.005 s"):
        await verb(queue)
    assert look(queue, is_durable=True) != before, "who gives up waiting takes nothing back"
    assert look(silent.next_queue(), is_durable=True) == look(queue, is_durable=True)
    silent.acknowledge()


async def test_after_a_deadline_no_verb_waits_for_another_one(
    any_verb: Verb, hand_journal: MakeJournal, furnish_queue: Furnish
) -> None:
    """A disk that hangs would otherwise cost the deadline once more for each lease that the run closes on its way out."""
    journal = hand_journal()
    await furnish_queue(queue := TransferQueue(journal, commit_timeout_s=0.005))
    journal._is_by_hand = True
    first, second = (asyncio.create_task(queue.open_lease(GroupLease(uid=uid))) for uid in ("y", "z"))
    for waiting in (first, second):
        with pytest.raises(DeadlineError, match="the journal did not acknowledge within"):
            await waiting
    journal.acknowledge()
    count = len(journal.entries)
    with pytest.raises(DeadlineError, match="the journal did not acknowledge within"):
        await any_verb(queue)
    assert len(journal.entries) == count


async def test_a_verb_returns_when_it_is_acknowledged_and_not_before(
    verb: Verb, hand_journal: MakeJournal, furnish_queue: Furnish
) -> None:
    journal = hand_journal()
    await furnish_queue(queue := TransferQueue(journal))
    journal._is_by_hand = True
    waiting = asyncio.create_task(verb(queue))
    await turns_of_the_loop(5)
    assert not waiting.done()
    journal.acknowledge()
    await waiting


# --- order


async def test_entries_have_the_order_of_the_acts(hand_journal: MakeJournal, look: Look) -> None:
    """Many tasks, one key: whoever was first in memory is first in the journal, whatever the order of the acknowledgements."""
    journal = hand_journal(is_by_hand=True)
    queue = TransferQueue(journal)
    numbers, rng = itertools.count(), random.Random(0)

    async def work(session_id: int) -> None:
        lease = SessionLease(uid="a", session_id=session_id % 4, attempt=session_id // 4)
        await turns_of_the_loop(20 * lease.attempt)
        try:
            await queue.open_lease(lease)
            for _ in range(8):
                number = next(numbers)
                keys = [f"a_{lease.session_id}_{index}" for index in range(rng.randint(1, 3))]
                tags = [{f"t{number % 5}": number, "last": number}] * len(keys)
                fields = {"responses": [[number]] * len(keys)}
                await queue.kv_batch_put(keys, partition_id="train", lease=lease, fields=fields, tags=tags)
                if rng.random() < 0.1:
                    await queue.kv_clear(keys[:1], partition_id="train")
        except StaleLeaseError:
            """A sibling's retry, or a clear, was first."""

    async def answer() -> None:
        while True:
            await asyncio.sleep(0)
            if rng.random() < 0.4:
                journal.acknowledge()

    answering = asyncio.create_task(answer())
    await queue.open_lease(GroupLease(uid="a"))
    await asyncio.gather(*[work(session_id) for session_id in range(16)])
    answering.cancel()
    assert len(journal.entries) > 60
    assert look(journal.next_queue(), is_durable=True) == look(queue, is_durable=True)
    puts = [row.tag["last"] for entry in journal.entries for op in entry for row in getattr(op, "rows", ())[:1]]
    assert puts == sorted(puts)


async def test_a_change_after_the_put_does_not_reach_the_journal(hand_journal: MakeJournal, look: Look) -> None:
    """An entry that waits is what was put: neither the caller's tensor nor the store's later acts change it."""
    journal = hand_journal(is_by_hand=True)
    queue = TransferQueue(journal)
    lease = SessionLease(uid="a", session_id=0)
    values = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])]
    acts = (
        queue.open_lease(GroupLease(uid="a")),
        queue.open_lease(lease),
        queue.kv_batch_put([f"a_0_{i}" for i in range(3)], partition_id="train", lease=lease, fields={"responses": values}),
        queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"responses": [9]}, tag={"n": 1}),
        queue.kv_clear(["a_0_1"], partition_id="train"),
    )
    waiting = []
    for act in acts:
        waiting.append(asyncio.create_task(act))
        await asyncio.sleep(0)
    values[0].zero_()
    before = look(queue, is_durable=True)
    assert look(journal.next_queue(), is_durable=True) == before
    written = next(op for entry in journal.entries for op in entry if hasattr(op, "field"))
    assert bytes(written.values)[:8] == (1).to_bytes(8, "little")
    journal.acknowledge()
    await asyncio.gather(*waiting)
