"""ReplayBuffer: a watch that dies, or shows what cannot be, is never a silent wait."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from asyncrl.config import ReplayConfig
from asyncrl.errors import (
    AdmissionError,
    ReplayError,
    TransitionError,
)
from asyncrl.keys import GroupLease
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.transfer_queue import TransferQueue
from asyncrl.world import RealWorld

StartRig = Callable[..., AbstractAsyncContextManager[Any]]
Settled = Callable[[], Coroutine[Any, Any, None]]


async def broken(rig: Any) -> ReplayError:
    with pytest.raises(ReplayError, match="no longer follows partition 'train'") as caught:
        await asyncio.wait_for(rig.replay.sample(1, 1), 10)
    return caught.value


async def test_a_cancelled_watch_is_no_silent_wait() -> None:
    queue, admission = TransferQueue(), Admission(batch_size=1)
    replay = ReplayBuffer(queue, admission, group_size=1, config=ReplayConfig(), world=RealWorld())
    running = asyncio.create_task(replay.run())
    sampling = asyncio.create_task(replay.sample(1, 1))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    with pytest.raises(ReplayError, match="no longer follows partition 'train': CancelledError"):
        await sampling


async def test_a_closed_store_is_no_silent_wait(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=1) as rig:
        await rig.queue.__aexit__(None, None, None)
        await settled()
        assert "the TransferQueue was closed" in str(await broken(rig))


async def follow_until_it_breaks(write: Callable[[TransferQueue, Admission], Coroutine[Any, Any, None]]) -> Exception:
    queue, admission = TransferQueue(), Admission(batch_size=2)
    replay = ReplayBuffer(queue, admission, group_size=2, config=ReplayConfig(), world=RealWorld())
    running = asyncio.create_task(replay.run())
    await write(queue, admission)
    with pytest.raises(ReplayError) as caught:
        await asyncio.wait_for(replay.sample(1, 1), 10)
    error = (await asyncio.gather(running, return_exceptions=True))[0]
    assert caught.value.__cause__ is error
    assert isinstance(error, Exception)
    return error


async def prompt(queue: TransferQueue, **tag: bool | str) -> None:
    await queue.open_lease(GroupLease(uid="a"))
    await queue.kv_put("a", partition_id="train", lease=GroupLease(uid="a"), tag={"is_prompt": True, **tag})


async def test_a_group_that_was_not_admitted_breaks_replay() -> None:
    async def write(queue: TransferQueue, admission: Admission) -> None:
        await prompt(queue, status="pending")

    error = await follow_until_it_breaks(write)
    assert isinstance(error, AdmissionError)
    assert "group 'a' is in partition 'train' but was not admitted" in str(error)


@pytest.mark.parametrize(
    ("status", "text"),
    [("done", "its status must be one of"), ("finished", "is finished but has rows of sessions [], not of all 2")],
)
async def test_a_nonsense_group_breaks_replay(status: str, text: str) -> None:
    async def write(queue: TransferQueue, admission: Admission) -> None:
        admission.admit("a")
        await prompt(queue, status=status)

    error = await follow_until_it_breaks(write)
    assert isinstance(error, TransitionError)
    assert text in str(error)
