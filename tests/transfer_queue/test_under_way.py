"""What a restart goes on with: groups as they stood, reopened in one transaction; the cursor, counts and evaluations of the run."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from asyncrl.errors import DeadlineError, JournalWriteError, LeaseScopeError, StaleLeaseError, StoreError, TagValueError
from asyncrl.journal.model import MemoryJournal
from asyncrl.keys import GroupLease, SessionLease
from asyncrl.transfer_queue import GroupUnderWay, SessionUnderWay, TransferQueue

Look = Callable[..., dict[str, Any]]
Reopen = Callable[..., Awaitable[TransferQueue]]
durable = pytest.mark.parametrize("house", ["model", "sqlite"], indirect=True)
A = GroupLease(uid="a")
FAILED = {"status": "failure", "failure": "its tool"}


def session(number: int, uid: str = "a", *, attempt: int = 0, incarnation: int = 0) -> SessionLease:
    return SessionLease(uid=uid, session_id=number, attempt=attempt, incarnation=incarnation)


async def admit(queue: TransferQueue, uid: str = "a", *, cursor: int = 1, row: int = 0) -> None:
    await queue.admit(GroupLease(uid=uid), partition_id="train", cursor=cursor, tag={"status": "pending", "row": row})


async def half_done(queue: TransferQueue) -> None:
    """Group `a` of four sessions: 0 settled with two rows, 1 failed, 2 under way at attempt 1 with two turns, 3 just begun."""
    await admit(queue)
    await queue.begin_sessions(A, [session(n) for n in range(4)], partition_id="train", tag={"status": "running"})
    keys = ["a_0_0", "a_0_1"]
    await queue.settle_session(session(0), partition_id="train", keys=keys, tags=[{"n": 1}, {"n": 2}])
    await queue.settle_session(session(1), partition_id="train", group_tag={"failure": "its tool"}, ends_group=False)
    await queue.put_turn(session(2), 0, {"responses": [9]})
    again = session(2, attempt=1)
    await queue.open_lease(again)
    for turn in range(2):
        await queue.put_turn(again, turn, {"responses": [turn]})


SESSIONS = (
    SessionUnderWay(session_id=0, attempt=0, is_open=False, num_turns=0),
    SessionUnderWay(session_id=1, attempt=0, is_open=False, num_turns=0),
    SessionUnderWay(session_id=2, attempt=1, is_open=True, num_turns=2),
    SessionUnderWay(session_id=3, attempt=0, is_open=True, num_turns=0),
)
HALF_DONE = GroupUnderWay(
    uid="a",
    tag={"status": "running", "row": 0, "failure": "its tool"},
    is_settled=False,
    sessions=SESSIONS,
    keys=("a_0_0", "a_0_1"),
)


# --- groups under way


async def test_groups_under_way_are_those_alive_in_admission_order(furnished: TransferQueue) -> None:
    """`a` is retired, `b` recorded; `d` has settled, `c` is half done, `p` has not begun."""
    found = furnished.groups_under_way("train")
    assert [(group.uid, group.is_settled, group.keys) for group in found] == [
        ("d", True, ("d_0_0", "d_0_1")),
        ("c", False, ("c_0_0",)),
        ("p", False, ()),
    ]
    assert [group.sessions for group in found] == [(), (SessionUnderWay(session_id=0, attempt=0, is_open=True, num_turns=1),), ()]
    assert [group.tag["row"] for group in found] == [12, 13, 14]
    assert furnished.groups_under_way("val") == []


async def test_the_order_is_that_of_admissions_and_not_of_what_came_later(queue: TransferQueue) -> None:
    for cursor, uid in enumerate("cab", start=1):
        await admit(queue, uid, cursor=cursor)
    for uid in "ba":
        await queue.settle_group(GroupLease(uid=uid), partition_id="train", tag=FAILED)
    assert [group.uid for group in queue.groups_under_way("train")] == ["c", "a", "b"]


@durable
async def test_a_half_done_group_is_told_as_it_stood(queue: TransferQueue, reopen: Reopen) -> None:
    await half_done(queue)
    assert queue.groups_under_way("train") == [HALF_DONE]
    for _ in range(2):
        assert (await reopen()).groups_under_way("train") == [HALF_DONE]


# --- reopen


@durable
async def test_a_reopened_group_goes_on_where_it_stood(queue: TransferQueue, reopen: Reopen) -> None:
    await half_done(queue)
    for _ in range(2):
        queue = await reopen()
        group = GroupLease(uid="a", incarnation=queue.incarnation)
        sessions, kept = queue.reopen_group(group, partition_id="train")
        assert sessions == [session(2, attempt=1, incarnation=group.incarnation), session(3, incarnation=group.incarnation)]
        await kept
        assert queue.groups_under_way("train") == [HALF_DONE]
    for stale in (session(2, attempt=1), session(3), session(0, incarnation=group.incarnation)):
        with pytest.raises(StaleLeaseError):
            await queue.settle_session(stale, partition_id="train")
    await queue.put_turn(sessions[0], 2, {"responses": [2]})
    await queue.settle_session(sessions[0], partition_id="train", keys=["a_2_0"], tags=[{"n": 1}])
    await queue.settle_session(sessions[1], partition_id="train", group_tag=FAILED)
    (found,) = queue.groups_under_way("train")
    assert (found.is_settled, found.sessions, found.keys) == (True, (), ("a_0_0", "a_0_1", "a_2_0"))


@durable
async def test_a_group_that_had_not_begun_is_reopened_and_begins(queue: TransferQueue, reopen: Reopen) -> None:
    await admit(queue)
    queue = await reopen()
    group = GroupLease(uid="a", incarnation=queue.incarnation)
    sessions, kept = queue.reopen_group(group, partition_id="train", tag={"status": "pending"})
    assert sessions == []
    await kept
    begun = [session(n, incarnation=queue.incarnation) for n in range(2)]
    await queue.begin_sessions(group, begun, partition_id="train", tag={"status": "running"})


async def test_reopening_acts_at_the_call_and_is_one_entry(hand_journal: Callable[..., Any]) -> None:
    """A crash between the group's lease and its sessions' must not show unsettled sessions as settled."""
    journal = hand_journal(is_by_hand=False)
    await half_done(queue := TransferQueue(journal))
    journal._is_by_hand, count = True, len(journal.entries)
    before = queue.groups_under_way("train")
    sessions, kept = queue.reopen_group(GroupLease(uid="a", incarnation=1), partition_id="train", tag={"n": 1})
    assert len(journal.entries) == count + 1
    await queue.kv_batch_get(["a"], partition_id="train", fields=[])  # any look at it: the act is done, the entry is not kept
    assert not kept.done()
    for number in (count, count + 1):
        (found,) = journal.next_queue(number).groups_under_way("train")
        assert found.sessions == before[0].sessions
    with pytest.raises(StaleLeaseError):
        await queue.put_turn(session(2, attempt=1), 2, {"responses": [2]})
    journal.acknowledge()
    await kept
    assert len(sessions) == 2


async def test_a_group_that_is_taken_over_keeps_its_sessions_unsettled(queue: TransferQueue, look: Look) -> None:
    await half_done(queue)
    await queue.open_lease(GroupLease(uid="a", incarnation=1))
    assert queue.groups_under_way("train")[0].sessions == SESSIONS
    assert queue.stats()["open_leases"] == 1
    sessions, kept = queue.reopen_group(GroupLease(uid="a", incarnation=2), partition_id="train")
    await kept
    assert [lease.session_id for lease in sessions] == [2, 3]


@pytest.mark.parametrize("state", ["open", "reopened", "settled", "recorded", "unknown"])
async def test_only_a_group_of_an_earlier_incarnation_is_reopened(state: str, furnished: TransferQueue, look: Look) -> None:
    uid = {"settled": "d", "recorded": "b", "unknown": "x"}.get(state, "c")
    lease = GroupLease(uid=uid, incarnation=0 if state == "open" else 1)
    if state == "reopened":
        await furnished.reopen_group(lease, partition_id="train")[1]
    before = look(furnished)
    with pytest.raises((StaleLeaseError, LeaseScopeError), match=f"'{uid}'"):
        furnished.reopen_group(lease, partition_id="train", tag={"n": 5})
    assert {**look(furnished), "stats": 0} == {**before, "stats": 0}


async def test_a_refused_tag_reopens_nothing(furnished: TransferQueue, look: Look) -> None:
    before = look(furnished)
    with pytest.raises(TagValueError):
        furnished.reopen_group(GroupLease(uid="c", incarnation=1), partition_id="train", tag={"n": []})  # type: ignore[dict-item]
    assert look(furnished) == before


# --- admit


async def test_admissions_have_the_order_of_the_calls(hand_journal: Callable[..., Any]) -> None:
    """However the journal answers, and although nobody waits for them."""
    journal = hand_journal(is_by_hand=True)
    queue = TransferQueue(journal)
    kept = [queue.admit(GroupLease(uid=uid), partition_id="train", cursor=n, tag={}) for n, uid in enumerate("bca", start=1)]
    assert [group.uid for group in queue.groups_under_way("train")] == ["b", "c", "a"]
    assert (queue.cursor, len(journal.entries)) == (3, 3)
    assert not any(future.done() for future in kept)
    for count in range(4):
        after = journal.next_queue(count)
        assert (after.cursor, after.counters().get("admitted", 0)) == (count, count)
    journal.acknowledge()
    await asyncio.gather(*kept)


async def test_without_a_journal_an_admission_is_kept_at_once() -> None:
    kept = TransferQueue().admit(A, partition_id="train", cursor=1, tag={})
    assert kept.done()


async def test_the_cursor_never_goes_back(queue: TransferQueue, look: Look) -> None:
    await admit(queue, cursor=5)
    before = look(queue)
    with pytest.raises(StoreError, match="group 'b' cannot be admitted at cursor 4: the feed is at 5"):
        await admit(queue, "b", cursor=4)
    assert look(queue) == before
    await admit(queue, "b", cursor=9)


async def test_an_admission_that_is_not_kept_raises(hand_journal: Callable[..., Any]) -> None:
    journal = hand_journal(fails_at=0)
    with pytest.raises(JournalWriteError):
        await TransferQueue(journal).admit(A, partition_id="train", cursor=1, tag={})
    silent = TransferQueue(hand_journal(is_by_hand=True), commit_timeout_s=0.005)
    with pytest.raises(DeadlineError, match="did not acknowledge"):
        await silent.admit(A, partition_id="train", cursor=1, tag={})


# --- counts


@durable
async def test_failures_are_counted_by_their_dataset_row(queue: TransferQueue, reopen: Reopen) -> None:
    for cursor, (uid, row) in enumerate({"a": 7, "b": 7, "c": 3, "d": -1, "e": 5, "f": 7}.items(), start=1):
        await admit(queue, uid, cursor=cursor, row=row)
    await queue.open_lease(GroupLease(uid="untagged"))
    await queue.kv_put("untagged", partition_id="train", lease=GroupLease(uid="untagged"), tag={"n": 1})
    await queue.drop(["a", "b", "c", "d", "untagged", "gone"], partition_id="train", reason="failure")
    await queue.drop(["e"], partition_id="train", reason="no_signal")
    queue = await reopen()
    await queue.drop(["f"], partition_id="train", reason="failure")
    assert queue.failed_rows() == {7: 3, 3: 1}
    assert queue.counters() == {
        "admitted": 6, "cursor": 6, "dropped/failure": 6, "dropped/no_signal": 1, "failed_row/3": 1, "failed_row/7": 3,
    }  # fmt: skip


@durable
async def test_an_evaluation_is_noted_once_and_never_falls(queue: TransferQueue, reopen: Reopen) -> None:
    assert queue.evaluated == -1
    for version, newest in ((0, 0), (3, 3), (2, 3)):
        await queue.note_evaluation(version)
        assert queue.evaluated == newest
    assert (await reopen(0)).evaluated == 3


async def test_what_was_done_before_a_sync_survives_a_power_loss() -> None:
    journal = MemoryJournal()
    queue = TransferQueue(journal)
    keeps: list[Callable[[], Awaitable[None]]] = [queue.sync, partial(queue.note_evaluation, 1)]
    for number, keep in enumerate(keeps):
        await admit(queue, f"g{number}", cursor=number + 1)
        assert journal.lose_power().load().counters.get("cursor", 0) == number
        await keep()
        left = journal.lose_power()
        found = TransferQueue(left, left.load())
        assert (found.cursor, len(found.groups_under_way("train"))) == (number + 1, number + 1)
    assert found.evaluated == 1


async def test_a_sync_changes_nothing(queue: TransferQueue, look: Look) -> None:
    await queue.sync()
    before = look(queue)
    await queue.sync()
    assert look(queue) == before
