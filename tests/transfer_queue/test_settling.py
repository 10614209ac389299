"""A group's life in transactions: admitted, its sessions settled, itself settled or dropped; and the counts that must add up."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncrl.errors import AsyncRLError, DuplicateKeyError, FieldError, LeaseScopeError, StaleLeaseError, StoreError, TagValueError
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.transfer_queue import TransferQueue

Look = Callable[..., dict[str, Any]]
A, A0, A1 = GroupLease(uid="a"), SessionLease(uid="a", session_id=0), SessionLease(uid="a", session_id=1)
PROMPT = {"raw_prompt": [{"role": "user", "content": "1 + 1"}]}


async def admit(queue: TransferQueue, uid: str = "a", *, cursor: int = 1, incarnation: int = 0) -> GroupLease:
    lease = GroupLease(uid=uid, incarnation=incarnation)
    await queue.admit(lease, partition_id="train", cursor=cursor, tag={"is_prompt": True}, fields=PROMPT)
    return lease


async def start(queue: TransferQueue, uid: str = "a", num_sessions: int = 2) -> list[SessionLease]:
    """A group with its sessions under way."""
    await admit(queue, uid)
    leases = [SessionLease(uid=uid, session_id=number) for number in range(num_sessions)]
    for lease in leases:
        await queue.open_lease(lease)
    return leases


async def settle(queue: TransferQueue, lease: SessionLease, *, is_last: bool = False) -> None:
    await queue.settle_session(
        lease,
        partition_id="train",
        keys=[f"{lease.uid}_{lease.session_id}_0"],
        fields={"responses": [[lease.session_id]]},
        tags=[{"seq_len": 1}],
        group_tag={"status": "finished"} if is_last else None,
    )


def counted(queue: TransferQueue) -> dict[str, float]:
    return {name.removeprefix("ledger/"): value for name, value in queue.stats().items() if name.startswith("ledger/") and value}


# --- begin


async def test_sessions_begin_together_with_the_tag_of_their_prompt(queue: TransferQueue) -> None:
    await admit(queue)
    await queue.begin_sessions(A, [A0, A1], partition_id="train", tag={"status": "running"})
    assert (await queue.kv_list())["train"]["a"]["status"] == "running"
    assert queue.stats()["open_leases"] == 3
    await settle(queue, A0)
    await settle(queue, A1, is_last=True)
    assert queue.stats()["open_leases"] == 0


@pytest.mark.parametrize(
    ("group", "sessions"),
    [
        (A, [A1, A0]),
        (A, [A1, A1]),
        (A, [A1, SessionLease(uid="b", session_id=0)]),
        (GroupLease(uid="a", incarnation=1), [A1]),
        (A, [A1, SessionLease(uid="a", session_id=2, incarnation=-1)]),
    ],
    ids=["one is open", "twice", "of another group", "not the group's lease", "one is lower"],
)
async def test_sessions_begin_all_or_none(
    group: GroupLease, sessions: list[SessionLease], queue: TransferQueue, look: Look
) -> None:
    await admit(queue)
    await queue.open_lease(A0)
    before = look(queue)
    with pytest.raises((StaleLeaseError, DuplicateKeyError)):
        await queue.begin_sessions(group, sessions, partition_id="train", tag={"status": "running"})
    assert look(queue) == before


# --- admit


async def test_an_admitted_group_has_lease_row_cursor_and_count(queue: TransferQueue) -> None:
    lease = await admit(queue, cursor=7)
    assert await queue.kv_list() == {"train": {"a": {"is_prompt": True}}}
    got = await queue.kv_batch_get(["a"], partition_id="train", fields=["raw_prompt"])
    assert got.get("raw_prompt").tolist() == [PROMPT["raw_prompt"]]
    assert counted(queue) == {"admitted": 1, "cursor": 7}
    await queue.kv_put("a", partition_id="train", lease=lease, tag={"status": "running"})


@pytest.mark.parametrize("incarnation", [0, 1])
@pytest.mark.parametrize("state", ["open", "settled", "only a lease", "in another partition"])
async def test_a_group_under_way_is_not_admitted_again(state: str, incarnation: int, queue: TransferQueue, look: Look) -> None:
    """It would be counted twice, and leave the count of those under way wrong for ever."""
    if state == "only a lease":
        await queue.open_lease(A)
    elif state == "in another partition":
        await queue.open_lease(A)
        await queue.kv_put("a", partition_id="val", lease=A, tag={"n": 1})
        await queue.close_lease(A)
    else:
        await admit(queue)
    if state == "settled":
        await queue.settle_group(A, partition_id="train", tag={"status": "failure"})
    before = look(queue)
    with pytest.raises(StaleLeaseError, match="group 'a' cannot be admitted again"):
        await admit(queue, incarnation=incarnation, cursor=2)
    assert look(queue) == before


@pytest.mark.parametrize(("tag", "fields"), [({"n": [1]}, PROMPT), ({}, {"raw_prompt": {1, 2}})])
async def test_a_refused_admission_counts_and_opens_nothing(tag: Any, fields: Any, queue: TransferQueue, look: Look) -> None:
    before = look(queue)
    with pytest.raises((TagValueError, FieldError), match="key 'a'"):
        await queue.admit(A, partition_id="train", cursor=1, tag=tag, fields=fields)
    assert look(queue) == before
    await admit(queue)


# --- settle


async def test_a_session_settles_rows_lease_and_turns_at_once(queue: TransferQueue) -> None:
    lease, other = await start(queue)
    await queue.put_turn(lease, 0, {"responses": [1]})
    await queue.put_turn(other, 0, {"responses": [2]})
    await settle(queue, lease)
    assert list((await queue.kv_list())["train"]) == ["a", "a_0_0"]
    assert await queue.kv_turns("a", 0) == []
    assert len(await queue.kv_turns("a", 1)) == 1
    assert queue.stats()["open_leases"] == 2
    with pytest.raises(StaleLeaseError, match="'a_0_0'"):
        await settle(queue, lease)
    with pytest.raises(StaleLeaseError, match="has settled"):
        await queue.open_lease(lease)


async def test_the_last_session_settles_its_group_and_a_watcher_sees_it_whole(queue: TransferQueue) -> None:
    leases = await start(queue)
    watch = queue.kv_watch("train")
    await anext(watch)
    await settle(queue, leases[0])
    assert await anext(watch) == {"a_0_0": {"seq_len": 1}}
    await settle(queue, leases[1], is_last=True)
    assert await anext(watch) == {"a_1_0": {"seq_len": 1}, "a": {"is_prompt": True, "status": "finished"}}
    assert queue.stats()["open_leases"] == 0
    latecomers: list[GroupLease | SessionLease] = [A, *leases]
    for late in latecomers:
        with pytest.raises(StaleLeaseError):
            await queue.open_lease(late)


async def test_a_failed_session_settles_without_rows(queue: TransferQueue) -> None:
    (lease,) = await start(queue, num_sessions=1)
    await queue.settle_session(lease, partition_id="train", group_tag={"status": "failure"})
    assert await queue.kv_list() == {"train": {"a": {"is_prompt": True, "status": "failure"}}}
    assert queue.stats()["open_leases"] == 0


BAD: dict[str, tuple[dict[str, Any], type[AsyncRLError], str]] = {
    "rows twice": ({"keys": ["a_0_0", "a_0_0"], "tags": [{}, {}]}, DuplicateKeyError, "'a_0_0'"),
    "rows of another": ({"keys": ["a_1_0"], "tags": [{}]}, LeaseScopeError, "'a_1_0'"),
    "a bad value": ({"keys": ["a_0_0"], "fields": {"extra_fields": [object()]}}, FieldError, "'extra_fields' of key 'a_0_0'"),
    "a bad tag of the group": ({"keys": ["a_0_0"], "group_tag": {"n": []}}, TagValueError, "'n' of key 'a'"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_refused_settling_leaves_the_session_under_way(name: str, queue: TransferQueue, look: Look) -> None:
    lease = (await start(queue))[0]
    await queue.put_turn(lease, 0, {"responses": [1]})
    before = look(queue)
    what, error, text = BAD[name]
    with pytest.raises(error, match=text):
        await queue.settle_session(lease, partition_id="train", **what)
    assert look(queue) == before
    await settle(queue, lease)


@pytest.mark.parametrize("end", ["cleared", "dropped", "taken over", "retried", "group closed", "reopened", "own row cleared"])
async def test_a_session_whose_door_was_shut_settles_nothing(end: str, queue: TransferQueue, look: Look) -> None:
    lease = (await start(queue))[0]
    await queue.kv_put("a_0_1", partition_id="train", lease=lease, tag={"n": 1})
    ends: dict[str, Callable[[], Awaitable[object]]] = {
        "cleared": lambda: queue.kv_clear(["a"], partition_id="train"),
        "dropped": lambda: queue.drop(["a"], partition_id="train", reason="x"),
        "taken over": lambda: queue.open_lease(GroupLease(uid="a", incarnation=1)),
        "retried": lambda: queue.open_lease(SessionLease(uid="a", session_id=0, attempt=1)),
        "group closed": lambda: queue.close_lease(A),
        "reopened": lambda: queue.reopen_group(GroupLease(uid="a", incarnation=1), partition_id="train")[1],
        "own row cleared": lambda: queue.kv_clear(["a_0_1"], partition_id="train"),
    }
    await ends[end]()
    before = look(queue)
    for is_last in (False, True):
        with pytest.raises(StaleLeaseError, match=r"refused a write of key 'a_0_0' in 'train'.*is not open"):
            await settle(queue, lease, is_last=is_last)
    with pytest.raises(StaleLeaseError):
        await queue.settle_session(lease, partition_id="train")
    if end not in ("taken over", "reopened", "retried", "own row cleared"):
        with pytest.raises(StaleLeaseError, match="'a'"):
            await queue.settle_group(A, partition_id="train", tag={"status": "failure"})
    assert look(queue) == before


async def test_a_session_may_settle_into_a_partition_that_has_vanished(queue: TransferQueue) -> None:
    await queue.open_lease(A)
    await queue.open_lease(A0)
    await queue.open_lease(A1)
    await queue.kv_put("a_1_0", partition_id="train", lease=A1, tag={"n": 1})
    await queue.kv_clear(["a_1_0"], partition_id="train")
    assert await queue.kv_list() == {}
    await settle(queue, A0, is_last=True)
    assert await queue.kv_list() == {"train": {"a_0_0": {"seq_len": 1}, "a": {"status": "finished"}}}


async def test_settling_a_group_ends_what_is_left_of_it(queue: TransferQueue) -> None:
    lease = (await start(queue))[0]
    await queue.put_turn(lease, 0, {"responses": [1]})
    await queue.settle_group(A, partition_id="train", tag={"status": "failure"})
    stats = queue.stats()
    assert (stats["open_leases"], stats["turns"]) == (0, 0)
    with pytest.raises(StaleLeaseError):
        await settle(queue, lease)


async def test_siblings_settle_at_the_same_time(queue: TransferQueue) -> None:
    leases = await start(queue, num_sessions=8)
    await asyncio.gather(*[settle(queue, lease, is_last=lease is leases[-1]) for lease in leases])
    assert list((await queue.kv_list())["train"]) == ["a", *[f"a_{number}_0" for number in range(8)]]
    assert queue.stats()["open_leases"] == 0


# --- drop and clear


async def test_a_dropped_group_is_gone_counted_and_its_doors_are_shut(queue: TransferQueue) -> None:
    (lease,) = await start(queue, num_sessions=1)
    await queue.put_turn(lease, 0, {"responses": [1]})
    await admit(queue, "b", cursor=2)
    await queue.drop(["a"], partition_id="train", reason="no_signal")
    assert await queue.kv_list() == {"train": {"b": {"is_prompt": True}}}
    assert counted(queue) == {"admitted": 2, "cursor": 2, "dropped/no_signal": 1}
    assert (queue.stats()["open_leases"], queue.stats()["turns"]) == (1, 0)


async def test_what_is_not_there_is_dropped_without_a_count(queue: TransferQueue) -> None:
    await admit(queue)
    for _ in range(2):
        await queue.drop(["a", "never_admitted"], partition_id="train", reason="failure")
    assert counted(queue) == {"admitted": 1, "cursor": 1, "dropped/failure": 1}


async def test_a_trajectory_is_not_dropped(queue: TransferQueue, look: Look) -> None:
    (lease,) = await start(queue, num_sessions=1)
    await settle(queue, lease)
    before = look(queue)
    with pytest.raises(StoreError, match="'a_0_0' is a trajectory of group 'a'"):
        await queue.drop(["a_0_0"], partition_id="train", reason="x")
    assert look(queue) == before


async def test_clearing_a_prompt_counts_and_clearing_a_trajectory_or_another_partition_does_not(queue: TransferQueue) -> None:
    (lease,) = await start(queue, num_sessions=1)
    await settle(queue, lease, is_last=True)
    await queue.open_lease(GroupLease(uid="v"))
    await queue.kv_put("v", partition_id="val", lease=GroupLease(uid="v"), tag={"n": 1})
    await queue.kv_clear(["a_0_0"], partition_id="train")
    await queue.kv_clear(["v"], partition_id="val")
    assert counted(queue) == {"admitted": 1, "cursor": 1}
    await queue.kv_clear(["a"], partition_id="train")
    assert counted(queue) == {"admitted": 1, "cursor": 1, "dropped/cleared": 1}


async def test_a_prompt_whose_name_ends_in_a_number_shuts_nobody_elses_door(queue: TransferQueue) -> None:
    (lease,) = await start(queue, num_sessions=1)
    await queue.kv_clear(["a_0"], partition_id="train")
    await settle(queue, lease)
    await admit(queue, "a_0", cursor=2)
    await queue.drop(["a_0"], partition_id="train", reason="x")
    assert list((await queue.kv_list())["train"]) == ["a", "a_0_0"]


async def test_a_dropped_uid_may_be_admitted_again(queue: TransferQueue) -> None:
    for cursor in range(3):
        await admit(queue, cursor=cursor)
        await queue.drop(["a"], partition_id="train", reason="failure")
    assert counted(queue) == {"admitted": 3, "cursor": 2, "dropped/failure": 3}


async def test_admitted_is_trained_dropped_and_open(furnished: TransferQueue) -> None:
    """Through every way that a group can go."""
    queue = furnished

    def check() -> None:
        count = counted(queue)
        dropped = sum(value for name, value in count.items() if name.startswith("dropped/"))
        recorded = {uid for record in queue._state.ledger.records.values() for uid in record.uids}
        alive = [uid for partition in queue._state.partitions.values() for uid in partition.uids if uid not in recorded]
        assert count["admitted"] == count.get("purged_groups", 0) + len(recorded) + dropped + len(alive)

    check()
    await queue.purge(1)
    check()
    await queue.drop(["p"], partition_id="train", reason="failure")
    check()
    await queue.retire(["b_0_0", "b_0_1"], partition_id="train", step=2, lease=StepLease(step=2))
    check()
    assert counted(queue) == {
        "admitted": 5, "cursor": 5, "purged_step": 1, "purged_groups": 1, "dropped/failure": 1,
    }  # fmt: skip
