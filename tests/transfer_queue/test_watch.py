"""Watches: a snapshot, then every change once; nobody polls, nobody is missed, nobody is kept."""

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from asyncrl.fields import Tag
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.transfer_queue import TransferQueue, Watch

OpenSession = Callable[..., Awaitable[SessionLease]]


async def tag(queue: TransferQueue, key: str, lease: SessionLease, value: int) -> None:
    await queue.kv_put(key, partition_id="train", lease=lease, tag={"n": value})


async def test_the_first_item_is_the_snapshot_empty_or_not(queue: TransferQueue, open_session: OpenSession) -> None:
    assert await anext(queue.kv_watch("train")) == {}
    lease = await open_session()
    watch = queue.kv_watch("train")
    await tag(queue, "a_0_0", lease, 1)
    assert await anext(watch) == {"a_0_0": {"n": 1}}


async def test_changes_between_two_items_come_together_with_the_last_tag(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    watch = queue.kv_watch("train")
    await tag(queue, "a_0_0", lease, 1)
    await tag(queue, "a_0_1", lease, 1)
    await anext(watch)
    for value in range(5):
        await tag(queue, "a_0_1", lease, value)
    await queue.kv_clear(["a_0_0"], partition_id="train")
    assert await anext(watch) == {"a_0_1": {"n": 4}, "a_0_0": None}


async def test_a_key_that_came_and_went_is_in_no_item(queue: TransferQueue, open_session: OpenSession) -> None:
    watch = queue.kv_watch("train")
    await anext(watch)
    for session_id in range(50):
        lease = await open_session("a", session_id)
        await tag(queue, f"a_{session_id}_0", lease, 0)
        await queue.kv_clear([f"a_{session_id}_0"], partition_id="train")
    lease = await open_session("b")
    await tag(queue, "b_0_0", lease, 1)
    assert await anext(watch) == {"b_0_0": {"n": 1}}


async def test_a_column_without_a_tag_wakes_nobody(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await tag(queue, "a_0_0", lease, 1)
    watch = queue.kv_watch("train")
    await anext(watch)
    step = StepLease(step=1)
    await queue.open_lease(step)
    await queue.kv_put("a_0_0", partition_id="train", lease=step, fields={"advantages": [0.0]})
    await tag(queue, "a_0_1", lease, 2)
    assert await anext(watch) == {"a_0_1": {"n": 2}}


async def test_a_change_wakes_every_waiting_watcher_of_the_partition_only(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    watches = [queue.kv_watch("train") for _ in range(3)]
    other = queue.kv_watch("val")
    for watch in [*watches, other]:
        await anext(watch)
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(watch.__anext__()) for watch in watches]
        idle = tasks.create_task(other.__anext__())
        await asyncio.sleep(0)
        await tag(queue, "a_0_0", lease, 1)
        assert [await task for task in waiting] == [{"a_0_0": {"n": 1}}] * 3
        assert not idle.done()
        idle.cancel()


async def test_a_retry_and_a_retirement_are_seen(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session("a", 0)
    await tag(queue, "a_0_0", lease, 1)
    watch = queue.kv_watch("train")
    await anext(watch)
    lease = await open_session("a", 0, attempt=1)
    assert await anext(watch) == {"a_0_0": None}
    await tag(queue, "a_0_0", lease, 2)
    assert await anext(watch) == {"a_0_0": {"n": 2}}
    step = StepLease(step=1)
    await queue.open_lease(step)
    await queue.retire(["a_0_0"], partition_id="train", step=1, lease=step)
    assert await anext(watch) == {"a_0_0": None}


async def test_cleared_and_written_again_is_one_change(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session("a", 0)
    await tag(queue, "a_0_0", lease, 1)
    watch = queue.kv_watch("train")
    await anext(watch)
    await queue.kv_clear(["a_0_0"], partition_id="train")
    lease = await open_session("a", 0, attempt=1)
    await tag(queue, "a_0_0", lease, 2)
    assert await anext(watch) == {"a_0_0": {"n": 2}}


async def test_a_watcher_that_leaves_is_forgotten(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()

    async def look_once() -> None:
        async for _ in queue.kv_watch("train"):
            break

    kept = queue.kv_watch("train")
    await look_once()
    gc.collect()
    assert queue.stats()["watchers"] == 1
    kept.close()
    await tag(queue, "a_0_0", lease, 1)
    assert queue.stats()["watchers"] == 0


async def test_a_cancelled_wait_loses_nothing(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    watch = queue.kv_watch("train")
    await anext(watch)
    waiting = asyncio.create_task(watch.__anext__())
    await asyncio.sleep(0)
    putting = asyncio.create_task(tag(queue, "a_0_0", lease, 1))
    asyncio.get_running_loop().call_soon(waiting.cancel)  # the put has woken the waiter, which is cancelled before it runs
    await putting
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await anext(watch) == {"a_0_0": {"n": 1}}


async def test_leaving_the_store_ends_a_watch_after_its_last_changes() -> None:
    async with TransferQueue() as queue:
        watch = queue.kv_watch("train")
        await anext(watch)
        await queue.open_lease(GroupLease(uid="a"))
        await queue.kv_put("a", partition_id="train", lease=GroupLease(uid="a"), tag={"n": 1})
    assert [item async for item in watch] == [{"a": {"n": 1}}]


async def test_what_a_change_costs_does_not_grow_with_the_keys() -> None:
    """All tags are read once, for the snapshot; after it only those of the keys that changed."""
    snapshots: list[dict[str, Tag | None]] = [{f"k{number}": {} for number in range(1000)}]
    read: list[str] = []

    def read_one(key: str) -> Tag:
        read.append(key)
        return {"n": 1}

    watch = Watch(snapshot=snapshots.pop, read=read_one)
    assert len(await anext(watch)) == 1000
    assert not read
    watch.note("k17", existed=True, exists=True)
    watch.note("k17", existed=True, exists=True)
    assert await anext(watch) == {"k17": {"n": 1}}
    assert read == ["k17"]
