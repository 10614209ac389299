"""Steps: what one trains on is recorded once and frozen, retired whole, hidden until it is purged; and a run that starts over."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncrl.errors import AsyncRLError, DuplicateKeyError, RecordError, StaleLeaseError, StoreError, UnknownKeyError
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


async def test_a_record_is_made_once_and_repeated_without_a_change(furnished: TransferQueue, look: Look) -> None:
    await furnished.record(3, D, partition_id="train")
    before = look(furnished)
    for step, keys in ((1, A), (2, B), (3, D)):
        await furnished.record(step, keys, partition_id="train")
    assert look(furnished) == before


REFUSED: dict[str, tuple[int, list[str], type[AsyncRLError], str]] = {
    "no keys": (3, [], StoreError, "a record of step 3 without keys"),
    "a key twice": (3, ["d_0_0", "d_0_0"], DuplicateKeyError, "'d_0_0'"),
    "an unknown key": (3, [*D, "x_0_0"], UnknownKeyError, "'x_0_0'"),
    "other keys": (2, D, RecordError, "step 2 is recorded with 2 keys, first 'b_0_0'"),
    "another order": (2, B[::-1], RecordError, "step 2 is recorded"),
    "a retired step with other keys": (1, D, RecordError, "step 1 is recorded"),
    "a step before the last": (0, D, RecordError, "step 0 cannot be recorded after step 2"),
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


async def test_a_step_is_not_retired_twice_even_when_its_keys_came_again(furnished: TransferQueue) -> None:
    await settled(furnished, "a")
    with pytest.raises(RecordError, match="step 1 cannot be retired twice"):
        await furnished.retire(A, partition_id="train", step=1, lease=StepLease(step=1))


async def test_a_retired_step_may_name_its_prompts(furnished: TransferQueue) -> None:
    await furnished.retire(["b", *B], partition_id="train", step=2, lease=STEP2)
    assert "b" not in (await furnished.kv_list())["train"]


async def test_a_uid_may_come_again_while_its_retired_rows_are_kept(furnished: TransferQueue) -> None:
    """The numbers of the rows tell them apart; the record is still that of the old ones."""
    record = furnished._state.ledger.records[1]
    await settled(furnished, "a", num_rows=1)
    assert not set(record.row_ids) & {row.row_id for row in furnished._state.partitions["train"].rows.values()}
    await furnished.purge(1)
    assert "a_0_0" in (await furnished.kv_list())["train"]


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
        assert [(record.step, record.is_retired) for record in queue._state.ledger.records.values()] == [(1, True), (2, True)]
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


# --- start over


@durable
async def test_a_trajectory_is_trained_once_as_long_as_a_checkpoint_may_ask_for_its_step(
    queue: TransferQueue, reopen: Callable[[], Awaitable[TransferQueue]]
) -> None:
    """Its rows are gone with the step, so its uid can be admitted again; the record remembers it."""
    for step, uid in enumerate("ab", start=1):
        await train(queue, step, await settled(queue, uid))
    queue = await reopen()
    again = await settled(queue, "a")
    with pytest.raises(RecordError, match=r"key 'a_0_0' cannot be recorded for step 3: step 1 has trained on it"):
        await queue.record(3, again, partition_id="train")
    await queue.drop(["a"], partition_id="train", reason="x")
    await queue.purge(1)
    await queue.record(3, await settled(queue, "a"), partition_id="train")


async def test_a_group_is_trained_once_under_whatever_keys(queue: TransferQueue) -> None:
    await train(queue, 1, await settled(queue, "a", num_rows=1))
    lease = SessionLease(uid="a", session_id=1)
    await queue.admit(GroupLease(uid="a"), partition_id="train", cursor=9, tag={"is_prompt": True})
    await queue.open_lease(lease)
    await queue.settle_session(lease, partition_id="train", keys=["a_1_0"], tags=[{"n": 1}], group_tag={"status": "finished"})
    with pytest.raises(RecordError, match=r"key 'a' cannot be recorded for step 2: step 1 has trained on it"):
        await queue.record(2, ["a_1_0"], partition_id="train")


async def test_a_run_that_starts_over_has_nothing_under_way(furnished: TransferQueue, look: Look) -> None:
    queue = furnished
    await queue.open_lease(GroupLease(uid="no_row"))
    await queue.open_lease(SessionLease(uid="no_row", session_id=0))
    await queue.put_turn(SessionLease(uid="no_row", session_id=0), 0, {"responses": [1]})
    await queue.start_over(step=1, cursor=1)
    seen = look(queue)
    assert (seen["rows"], seen["leases"], seen["turns"], [*seen["records"]]) == ({}, {}, {}, [1])
    assert seen["counters"] == {"admitted": 5, "cursor": 1, "dropped/restart": 4}
    assert queue.stats()["open_leases"] == queue.stats()["bytes"] == 0
    await queue.record(2, await settled(queue, "b"), partition_id="train")


STARTS = {0: (5, 0, []), 1: (4, 0, [1]), 2: (3, 0, [1, 2]), 9: (3, 2, [])}
"""Step -> groups dropped, groups purged, records left: `a` was retired with step 1, `b` recorded for step 2, three were under way.
Where there is no way from the records to the step, they are of no use."""


@pytest.mark.parametrize("step", STARTS)
async def test_what_later_steps_had_counts_as_dropped(step: int, furnished: TransferQueue) -> None:
    await furnished.start_over(step=step, cursor=step)
    records = [*furnished._state.ledger.records]
    assert (counted(furnished, "dropped/restart"), counted(furnished, "purged_groups"), records) == STARTS[step]


@durable
async def test_a_run_that_started_over_can_still_go_back_to_an_older_checkpoint(
    queue: TransferQueue, reopen: Callable[[], Awaitable[TransferQueue]]
) -> None:
    for step in (1, 2, 3):
        await train(queue, step, await settled(queue, f"g{step}"))
    await queue.purge(1)
    await queue.record(4, await settled(queue, "g4"), partition_id="train")
    await queue.start_over(step=4, cursor=4)
    queue = await reopen()
    assert (queue.purged_step, queue.last_step, await queue.kv_list()) == (1, 4, {})
    await queue.start_over(step=2, cursor=2)
    assert (counted(queue, "purged_groups"), counted(queue, "dropped/restart")) == (1, 2)
    await train(queue, 3, await settled(queue, "g3"))
    await queue.purge(3)
    assert counted(queue, "purged_groups") == 3


async def test_rows_for_evaluation_are_not_counted_when_a_run_starts_over(furnished: TransferQueue) -> None:
    lease = GroupLease(uid="v")
    await furnished.open_lease(lease)
    await furnished.kv_put("v", partition_id="val", lease=lease, tag={"n": 1})
    await furnished.start_over(step=1, cursor=1)
    assert counted(furnished, "dropped/restart") == 4
    assert await furnished.kv_list() == {}


async def test_a_run_may_start_over_twice_and_from_before_what_was_purged(queue: TransferQueue) -> None:
    for step in (1, 2, 3):
        await train(queue, step, await settled(queue, f"g{step}"))
    await queue.purge(3)
    for step in (2, 1, 1):
        await queue.start_over(step=step, cursor=step)
        assert counted(queue, "dropped/restart") == 0
    await train(queue, 2, await settled(queue, "again"))


async def test_an_empty_store_may_start_over(queue: TransferQueue) -> None:
    await queue.start_over(step=4, cursor=17)
    assert counted(queue, "cursor") == 17
    keys = await settled(queue, "a")
    with pytest.raises(RecordError, match="step 4 cannot be recorded after step 4"):
        await queue.record(4, keys, partition_id="train")
    await queue.record(5, keys, partition_id="train")
