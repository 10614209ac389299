"""Every write under an open lease: who may write what, and who no longer may."""

from collections.abc import Awaitable, Callable

import pytest

from asyncrl.errors import LeaseScopeError, StaleLeaseError, UnknownKeyError
from asyncrl.keys import GroupLease, Lease, SessionLease, StepLease
from asyncrl.transfer_queue import TransferQueue

OpenSession = Callable[..., Awaitable[SessionLease]]
GROUP, SESSION, STEP = GroupLease(uid="a"), SessionLease(uid="a", session_id=0), StepLease(step=1)


async def put(queue: TransferQueue, key: str, lease: Lease) -> None:
    if isinstance(lease, StepLease):
        await queue.kv_put(key, partition_id="train", lease=lease, fields={"advantages": [0.0]})
    else:
        await queue.kv_put(key, partition_id="train", lease=lease, fields={"extra_fields": 1}, tag={"status": "x"})


async def keys_of(queue: TransferQueue) -> list[str]:
    return list((await queue.kv_list("train"))["train"])


@pytest.mark.parametrize(("key", "lease"), [("a", GROUP), ("a_0_0", SESSION), ("a_0_0", STEP)])
async def test_a_write_without_an_open_lease_is_refused_and_counted(key: str, lease: Lease, queue: TransferQueue) -> None:
    with pytest.raises(StaleLeaseError, match=f"refused a write of key '{key}' in 'train'.*is not open"):
        await put(queue, key, lease)
    assert queue.stats()["refused_writes"] == 1
    assert await keys_of(queue) == []


@pytest.mark.parametrize("key", ["b", "a_0_0", "a_"])
async def test_a_group_writes_only_its_prompt(key: str, queue: TransferQueue) -> None:
    await queue.open_lease(GROUP)
    with pytest.raises(LeaseScopeError, match=f"'{key}'"):
        await put(queue, key, GROUP)


@pytest.mark.parametrize("key", ["a", "a_1_0", "b_0_0", "a_0_", "a_0_01", "a_0_x", "a_0_0_0", "a_0_-1", "a_0_²"])
async def test_a_session_writes_only_its_trajectories(key: str, queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session("a", 0)
    with pytest.raises(LeaseScopeError, match=f"'{key}'"):
        await put(queue, key, lease)


async def test_a_step_only_adds_columns_to_rows_that_exist(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await put(queue, "a_0_0", lease)
    await queue.open_lease(STEP)
    await put(queue, "a_0_0", STEP)
    with pytest.raises(UnknownKeyError, match="'a_0_1'"):
        await put(queue, "a_0_1", STEP)
    with pytest.raises(LeaseScopeError, match=r"columns, not tags.*'a_0_0'"):
        await queue.kv_put("a_0_0", partition_id="train", lease=STEP, tag={"status": "x"})
    with pytest.raises(LeaseScopeError, match="field 'extra_fields' of key 'a_0_0': its session wrote it"):
        await queue.kv_put("a_0_0", partition_id="train", lease=STEP, fields={"extra_fields": 2})


async def test_a_step_opened_with_keys_writes_only_those(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    for key in ("a_0_0", "a_0_1"):
        await put(queue, key, lease)
    await queue.open_lease(STEP, keys=["a_0_0"], partition_id="train")
    await put(queue, "a_0_0", STEP)
    with pytest.raises(LeaseScopeError, match="'a_0_1'"):
        await put(queue, "a_0_1", STEP)
    with pytest.raises(LeaseScopeError, match="'a_0_0' in 'val'"):
        await queue.kv_put("a_0_0", partition_id="val", lease=STEP, fields={"advantages": [0.0]})


async def test_a_key_belongs_to_one_owner(queue: TransferQueue, open_session: OpenSession) -> None:
    """A uid may look like a trajectory key; its rows are still not a session's."""
    await put(queue, "a_0_0", await open_session("a", 0))
    await queue.open_lease(GroupLease(uid="a_0_0"))
    with pytest.raises(LeaseScopeError, match="belongs to"):
        await put(queue, "a_0_0", GroupLease(uid="a_0_0"))


async def test_a_session_needs_its_group(queue: TransferQueue) -> None:
    with pytest.raises(StaleLeaseError, match="group 'a' has no open lease"):
        await queue.open_lease(SESSION)


async def test_a_retry_deletes_the_rows_before_it_and_ends_the_older_lease(queue: TransferQueue, open_session: OpenSession) -> None:
    first = await open_session("a", 0)
    other = await open_session("a", 1)
    await put(queue, "a_0_0", first)
    await put(queue, "a_0_1", first)
    await put(queue, "a_1_0", other)
    second = await open_session("a", 0, attempt=1)
    assert await keys_of(queue) == ["a_1_0"]
    with pytest.raises(StaleLeaseError):
        await put(queue, "a_0_0", first)
    with pytest.raises(StaleLeaseError, match="a retry is a higher attempt"):
        await queue.open_lease(first)
    await put(queue, "a_0_0", second)
    await put(queue, "a_1_0", other)
    with pytest.raises(StaleLeaseError, match="attempt 1 has written"):
        await queue.open_lease(first)


async def test_a_restart_keeps_rows_and_ends_leases_of_the_incarnation_before(
    queue: TransferQueue, open_session: OpenSession
) -> None:
    before = await open_session("a", 0)
    await put(queue, "a_0_0", before)
    await queue.open_lease(GroupLease(uid="a", incarnation=1))
    with pytest.raises(StaleLeaseError):
        await put(queue, "a_0_0", before)
    with pytest.raises(StaleLeaseError):
        await queue.open_lease(before)
    after = SessionLease(uid="a", session_id=0, incarnation=1)
    await queue.open_lease(after)
    assert await keys_of(queue) == ["a_0_0"]
    await put(queue, "a_0_1", after)


@pytest.mark.parametrize("lease", [GROUP, SESSION, STEP])
async def test_no_lease_opens_twice(lease: Lease, queue: TransferQueue) -> None:
    if lease is SESSION:
        await queue.open_lease(GROUP)
    await queue.open_lease(lease)
    with pytest.raises(StaleLeaseError, match="is open"):
        await queue.open_lease(lease)


async def test_a_settled_session_does_not_come_back(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session("a", 0)
    await queue.close_lease(lease)
    with pytest.raises(StaleLeaseError, match="has settled"):
        await queue.open_lease(lease)
    await open_session("a", 0, attempt=1)


async def test_a_settled_group_does_not_come_back(queue: TransferQueue) -> None:
    await queue.open_lease(GROUP)
    await put(queue, "a", GROUP)
    await queue.close_lease(GROUP)
    with pytest.raises(StaleLeaseError, match="incarnation 0 has written"):
        await queue.open_lease(GROUP)
    await queue.open_lease(GroupLease(uid="a", incarnation=1))


async def test_rows_remember_their_attempt_after_their_group_was_closed(queue: TransferQueue, open_session: OpenSession) -> None:
    await put(queue, "a_0_0", await open_session("a", 0, attempt=2))
    await queue.close_lease(GROUP)
    await queue.open_lease(GroupLease(uid="a", incarnation=1))
    with pytest.raises(StaleLeaseError, match="attempt 2 has written"):
        await queue.open_lease(SessionLease(uid="a", session_id=0, attempt=1, incarnation=1))


async def test_closing_is_idempotent_and_a_group_takes_its_sessions_along(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session("a", 0)
    assert queue.stats()["open_leases"] == 2
    for _ in range(2):
        await queue.close_lease(GROUP)
    assert queue.stats()["open_leases"] == 0
    with pytest.raises(StaleLeaseError):
        await put(queue, "a_0_0", lease)
    await queue.close_lease(lease)


async def test_an_older_lease_of_a_step_gives_way_to_a_higher_incarnation(queue: TransferQueue) -> None:
    await queue.open_lease(STEP)
    await queue.open_lease(StepLease(step=1, incarnation=1))
    await queue.close_lease(STEP)
    assert queue.stats()["open_leases"] == 1


async def test_leaving_the_store_closes_all_leases() -> None:
    async with TransferQueue() as queue:
        await queue.open_lease(GROUP)
        await queue.open_lease(STEP)
    with pytest.raises(StaleLeaseError):
        await put(queue, "a", GROUP)
