"""Steps: what one trains on is recorded once and frozen, retired whole, hidden until it is purged; and back with older weights."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import (
    AsyncRLError,
    DuplicateKeyError,
    JournalDamagedError,
    RecordError,
    StaleLeaseError,
    StoreError,
    UnknownKeyError,
)
from asyncrl.journal.entries import PutRecord, RowEntry, Saved, SavedRow, StepRecord
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.transfer_queue import TransferQueue

Look = Callable[..., dict[str, Any]]
durable = pytest.mark.parametrize("house", ["model", "sqlite"], indirect=True)
A, B, D = ["a_0_0", "a_0_1"], ["b_0_0", "b_0_1"], ["d_0_0", "d_0_1"]
STEP2 = StepLease(step=2)


def counted(queue: TransferQueue, name: str) -> float:
    return queue.stats().get(f"ledger/{name}", 0)


async def settled(queue: TransferQueue, uid: str, *, num_rows: int = 2) -> list[str]:
    """An admitted group of one settled session."""
    lease, keys = SessionLease(uid=uid, session_id=0), [f"{uid}_0_{index}" for index in range(num_rows)]
    await queue.admit(GroupLease(uid=uid), partition_id="train", cursor=9, tag={"is_prompt": True})
    await queue.open_lease(lease)
    rows: dict[str, Any] = {"keys": keys, "fields": {"responses": [[1]] * num_rows}, "tags": [{"seq_len": 1}] * num_rows}
    await queue.settle_session(lease, partition_id="train", group_tag={"status": "finished"}, **rows)
    return keys


async def train(queue: TransferQueue, step: int, keys: list[str]) -> None:
    await queue.record(step, keys, partition_id="train")
    await queue.open_lease(StepLease(step=step))
    await queue.retire(keys, partition_id="train", step=step, lease=StepLease(step=step))
    await queue.close_lease(StepLease(step=step))


# --- record


async def test_a_record_is_made_once_and_counts_its_tries_until_it_is_done(furnished: TransferQueue, look: Look) -> None:
    before = look(furnished)
    assert furnished.recorded(1) == furnished.records[1]
    assert furnished.recorded(3) is None
    assert [(record.step, record.tries) for record in furnished.records.values()] == [(1, 0), (2, 1)]
    assert [await furnished.record(2, B, partition_id="train") for _ in range(3)] == [2, 3, 4]
    assert look(furnished) == before | {"records": {1: furnished.records[1], 2: replace(before["records"][2], tries=4)}}
    await furnished.retire(B, partition_id="train", step=2, lease=STEP2)
    assert (furnished.records[2].tries, furnished.weights_step) == (0, 2)
    assert await furnished.record(3, D, partition_id="train") == 1


@durable
async def test_tries_are_counted_through_restarts(queue: TransferQueue, reopen: Callable[..., Awaitable[TransferQueue]]) -> None:
    """The step that crashes the process is the one whose count grows; one that was done begins anew."""
    await train(queue, 1, await settled(queue, "a"))
    keys = await settled(queue, "b")
    assert await queue.record(2, keys, partition_id="train") == 1
    for tries in (2, 3):
        queue = await reopen(0)
        assert await queue.record(1, A, partition_id="train") == 1
        await queue.open_lease(StepLease(step=1))
        await queue.retire(A, partition_id="train", step=1, lease=StepLease(step=1))
        assert await queue.record(2, keys, partition_id="train") == tries


REFUSED: dict[str, tuple[int, list[str], type[AsyncRLError], str]] = {
    "no keys": (3, [], StoreError, "a record of step 3 without keys"),
    "a key twice": (3, ["d_0_0", "d_0_0"], DuplicateKeyError, "'d_0_0'"),
    "an unknown key": (3, [*D, "x_0_0"], UnknownKeyError, "'x_0_0'"),
    "other keys": (2, D, RecordError, "step 2 is recorded with 2 keys, first 'b_0_0'"),
    "another order": (2, B[::-1], RecordError, "step 2 is recorded"),
    "a retired step with other keys": (1, D, RecordError, "step 1 is recorded"),
    "a retired step": (1, A, RecordError, "step 1 is done: the weights have learned it"),
    "a step before the last": (0, D, RecordError, "step 0 cannot be recorded after step 2"),
    "a step left out": (4, D, RecordError, "step 4 cannot be recorded after step 2"),
    "a key of another step": (3, [*D, *B], RecordError, "key 'b_0_0' cannot be recorded for step 3: step 2 trains on it"),
    "a prompt": (3, ["d", *D], RecordError, "key 'd' is a prompt"),
    "a part of a group": (3, D[1:], RecordError, "key 'd_0_0' of group 'd' is missing"),
    "a group under way": (3, ["c_0_0"], RecordError, "group 'c' has not settled"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_record_changes_nothing(name: str, furnished: TransferQueue, look: Look) -> None:
    step, keys, error, text = REFUSED[name]
    before = look(furnished)
    with pytest.raises(error, match=text):
        await furnished.record(step, keys, partition_id="train")
    assert look(furnished) == before


async def test_a_recorded_group_is_frozen_until_its_step_is_retired(furnished: TransferQueue, look: Look) -> None:
    queue = furnished
    before = look(queue, is_durable=True)
    for lease in (GroupLease(uid="b", incarnation=1), SessionLease(uid="b", session_id=0, attempt=1, incarnation=1)):
        with pytest.raises(StaleLeaseError, match="step 2 trains on its group"):
            await queue.open_lease(lease)
    with pytest.raises(StaleLeaseError, match="step 1 has trained on its group"):
        await queue.open_lease(GroupLease(uid="a", incarnation=1))
    for keys in (["b"], ["b_0_0"], ["p", "b_0_1"]):
        with pytest.raises(RecordError, match="cannot go: step 2 trains on it"):
            await queue.kv_clear(keys, partition_id="train")
    with pytest.raises(RecordError, match="cannot go"):
        await queue.drop(["p", "b"], partition_id="train", reason="x")
    with pytest.raises(StaleLeaseError):
        await queue.admit(GroupLease(uid="b", incarnation=1), partition_id="train", cursor=9, tag={})
    assert look(queue, is_durable=True) == before


async def test_a_record_that_was_not_waited_for_is_waited_for_by_its_repetition(
    hand_journal: Callable[..., Any], furnish_queue: Callable[[TransferQueue], Awaitable[None]]
) -> None:
    """No stage may run before the record is on disk, though the one who asked first was cancelled."""
    journal = hand_journal()
    await furnish_queue(queue := TransferQueue(journal))
    journal._is_by_hand = True
    first = asyncio.create_task(queue.record(3, D, partition_id="train"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(queue.record(3, D, partition_id="train"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not second.done()
    journal.acknowledge()
    await second
    assert journal.synced[-1] == len(journal.entries)


# --- retire and purge


BAD_RETIREMENTS: dict[str, tuple[int, list[str], type[AsyncRLError], str]] = {
    "less": (2, B[:1], RecordError, "step 2 cannot be retired without its key 'b_0_1'"),
    "more": (2, [*B, *D], RecordError, "step 2 cannot be retired with key 'd_0_0'"),
    "a key twice": (2, [*B, *B], DuplicateKeyError, "'b_0_0'"),
    "keys of another step": (3, B, RecordError, "key 'b_0_0' cannot go: step 2 trains on it"),
    "an unknown key": (2, [*B, "x_0_0"], UnknownKeyError, "'x_0_0'"),
    "a retired step": (1, A, UnknownKeyError, "'a_0_0'"),
}


@pytest.mark.parametrize("name", BAD_RETIREMENTS)
async def test_a_refused_retirement_changes_nothing(name: str, furnished: TransferQueue, look: Look) -> None:
    step, keys, error, text = BAD_RETIREMENTS[name]
    if step == 3:
        await furnished.open_lease(StepLease(step=3))
    before = look(furnished)
    with pytest.raises(error, match=text):
        await furnished.retire(keys, partition_id="train", step=step, lease=StepLease(step=step))
    assert look(furnished) == before


async def test_steps_are_retired_in_their_order(furnished: TransferQueue, look: Look) -> None:
    """Else the weights would have a later step and not the one before it."""
    await furnished.record(3, D, partition_id="train")
    await furnished.open_lease(StepLease(step=3))
    before = look(furnished)
    with pytest.raises(RecordError, match="step 3 cannot be retired before step 2"):
        await furnished.retire(D, partition_id="train", step=3, lease=StepLease(step=3))
    assert look(furnished) == before


async def test_a_retired_step_may_name_its_prompts(furnished: TransferQueue) -> None:
    await furnished.retire(["b", *B], partition_id="train", step=2, lease=STEP2)
    assert "b" not in (await furnished.kv_list())["train"]


async def test_a_uid_comes_again_only_when_its_record_is_purged(furnished: TransferQueue) -> None:
    """Its rows would be there twice when older weights are loaded."""
    with pytest.raises(StaleLeaseError, match="group 'a' cannot be admitted again"):
        await settled(furnished, "a")
    await furnished.purge(1)
    await settled(furnished, "a", num_rows=1)
    assert "a_0_0" in (await furnished.kv_list())["train"]


async def test_groups_that_the_weights_have_learned_are_counted(furnished: TransferQueue) -> None:
    assert furnished.num_trained == 1
    await furnished.retire(B, partition_id="train", step=2, lease=STEP2)
    assert furnished.num_trained == 2
    await furnished.purge(1)
    assert (furnished.num_trained, [*furnished.records]) == (2, [2])


async def test_purging_needs_retired_steps_and_may_be_repeated(furnished: TransferQueue, look: Look) -> None:
    before = look(furnished)
    with pytest.raises(RecordError, match="steps up to 7 cannot be purged: step 2 is not retired"):
        await furnished.purge(7)
    assert look(furnished) == before
    for _ in range(2):
        await furnished.purge(1)
        assert [*furnished._state.ledger.records] == [2]
        assert (counted(furnished, "purged_step"), counted(furnished, "purged_groups")) == (1, 1)


async def test_no_step_up_to_a_purged_one_is_recorded(queue: TransferQueue) -> None:
    for step in (1, 2):
        await train(queue, step, await settled(queue, f"g{step}"))
    await queue.purge(2)
    keys = await settled(queue, "a")
    with pytest.raises(RecordError, match="step 2 cannot be recorded after step 2"):
        await queue.record(2, keys, partition_id="train")
    await queue.record(3, keys, partition_id="train")


async def test_a_failed_step_is_revived_under_its_record(furnished: TransferQueue, look: Look) -> None:
    before = look(furnished, is_durable=True)
    await furnished.revive(B, partition_id="train", step=2)
    assert look(furnished, is_durable=True) == before
    await furnished.record(2, B, partition_id="train")
    again = StepLease(step=2, attempt=1)
    await furnished.open_lease(again)
    await furnished.retire(B, partition_id="train", step=2, lease=again)


@durable
async def test_retired_rows_stay_hidden_when_the_next_process_opens(
    furnished: TransferQueue, reopen: Callable[[], Awaitable[TransferQueue]]
) -> None:
    await furnished.retire(B, partition_id="train", step=2, lease=STEP2)
    for _ in range(2):
        queue = await reopen()
        assert list((await queue.kv_list())["train"]) == ["d", "d_0_0", "d_0_1", "c", "c_0_0", "p"]
        assert ([*queue.records], queue.weights_step) == ([1, 2], 2)
    await queue.purge(2)


@durable
async def test_a_recorded_step_is_gone_on_with_by_the_next_process(
    furnished: TransferQueue, reopen: Callable[[], Awaitable[TransferQueue]]
) -> None:
    """Its columns are computed again, under a lease of the new incarnation."""
    queue = await reopen()
    lease = StepLease(step=2, incarnation=queue.incarnation)
    await queue.record(2, B, partition_id="train")
    with pytest.raises(StaleLeaseError):
        await queue.kv_put("b_0_0", partition_id="train", lease=STEP2, fields={"advantages": [0.0]})
    await queue.open_lease(lease, keys=B, partition_id="train")
    await queue.kv_batch_put(B, partition_id="train", lease=lease, fields={"advantages": [[1.0], [2.0]]})
    await queue.retire(B, partition_id="train", step=2, lease=lease)
    assert furnished is not queue


# --- other weights


LEFT = ["d", "d_0_0", "d_0_1", "c", "c_0_0", "p"]


@durable
@pytest.mark.parametrize(
    ("weights_step", "visible", "num_trained"),
    [(0, ["a", *A, "b", *B, *LEFT], 0), (1, ["b", *B, *LEFT], 1), (2, LEFT, 2), (9, LEFT, 2)],
)
async def test_what_is_seen_of_a_record_follows_from_its_step_and_the_weights(
    weights_step: int,
    visible: list[str],
    num_trained: int,
    furnished: TransferQueue,
    reopen: Callable[..., Awaitable[TransferQueue]],
    look: Look,
) -> None:
    """However often, and with which weights, it was opened in between."""
    before = look(furnished, is_durable=True)["rows"]["train"]
    for between in (2, 0, weights_step):
        queue = await reopen(between)
    assert list((await queue.kv_list())["train"]) == visible
    assert (queue.num_trained, queue.last_step, [*queue.records]) == (num_trained, 2, [1, 2])
    rows = {key: row for key, *row in look(queue, is_durable=True)["rows"]["train"]}
    assert {key: row for key, *row in before if key in rows}.items() <= rows.items()


@durable
async def test_lost_steps_are_done_again_on_the_same_keys(
    queue: TransferQueue, reopen: Callable[..., Awaitable[TransferQueue]]
) -> None:
    keys = {step: await settled(queue, f"g{step}") for step in (1, 2, 3)}
    for step in (1, 2, 3):
        await train(queue, step, keys[step])
    alive = await settled(queue, "g4")
    for weights_step in (3, 1, 0, 2):
        queue = await reopen(weights_step)
        assert [group.uid for group in queue.groups_under_way("train")] == ["g4"]
        for step in range(weights_step + 1, 4):
            record = queue.recorded(step)
            assert record is not None
            assert record.keys == tuple(keys[step])
            got = await queue.kv_batch_get(keys[step], partition_id="train", fields=["responses"])
            assert got["responses"].values().tolist() == [1, 1]
            with pytest.raises(RecordError, match="cannot go"):
                await queue.drop([f"g{step}"], partition_id="train", reason="x")
            await train(queue, step, keys[step])
        assert queue.num_trained == 3
    await queue.purge(2)
    await train(queue, 4, alive)


@durable
async def test_a_trajectory_is_trained_once_as_long_as_a_checkpoint_may_ask_for_its_step(
    queue: TransferQueue, reopen: Callable[[], Awaitable[TransferQueue]]
) -> None:
    for step, uid in enumerate("ab", start=1):
        await train(queue, step, await settled(queue, uid))
    queue = await reopen()
    with pytest.raises(StaleLeaseError, match="'a' cannot be admitted again"):
        await settled(queue, "a")
    await queue.purge(1)
    await queue.record(3, await settled(queue, "a"), partition_id="train")


@durable
async def test_purged_steps_are_gone_with_their_rows_in_one_transaction(
    queue: TransferQueue, reopen: Callable[..., Awaitable[TransferQueue]]
) -> None:
    for step in (1, 2, 3):
        await train(queue, step, await settled(queue, f"g{step}"))
    await queue.purge(2)
    queue = await reopen(2)
    assert list((await queue.kv_list())["train"]) == ["g3", "g3_0_0", "g3_0_1"]
    assert (queue.purged_step, queue.last_step, queue.num_trained, [*queue.records]) == (2, 3, 2, [3])


def saved_of(*steps: int, rows: int) -> Saved:
    """Records of one row each, of which the first `rows` are there."""
    row = RowEntry(0, "train", "", "", None, 0, 0, {})
    saved = Saved(rows={n: SavedRow(row=row._replace(row_id=n, key=f"g{n}", uid=f"g{n}")) for n in range(1, rows + 1)})
    records = [StepRecord(step=n, partition_id="train", uids=(f"g{n}",), keys=(), row_ids=(n,)) for n in steps]
    saved.apply([PutRecord(record) for record in records])
    return saved


@pytest.mark.parametrize(
    ("saved", "weights_step", "text"),
    [
        (saved_of(1, 3, rows=3), 0, "no record of step 2; it is purged up to 0, and ends with 3"),
        (saved_of(2, rows=2), 0, "no record of step 1"),
        (saved_of(1, 2, rows=1), 1, "not all rows of step 2: row 2 of 1 is missing"),
    ],
)
def test_a_journal_that_lacks_what_the_weights_need_is_damaged(saved: Saved, weights_step: int, text: str) -> None:
    with pytest.raises(JournalDamagedError, match=text):
        TransferQueue(None, saved, weights_step=weights_step)


def test_what_only_older_weights_would_need_may_be_missing() -> None:
    TransferQueue(None, saved_of(1, 3, rows=3), weights_step=2)
    TransferQueue(None, saved_of(1, 2, rows=0), weights_step=2)
