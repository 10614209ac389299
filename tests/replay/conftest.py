"""A store, an admission and a replay buffer that follow each other, and the runner's writes without a runner."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from asyncrl.config import ReplayConfig
from asyncrl.journal.port import Journal
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.ports import World
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.transfer_queue import TransferQueue
from asyncrl.world import RealWorld

GROUP_SIZE = 2


class Rig:
    """What a trainer and its runner do to replay, step by step."""

    def __init__(
        self,
        *,
        batch_size: int,
        updates: int,
        max_staleness: int,
        config: ReplayConfig,
        queue: TransferQueue,
        filter_groups: bool,
        world: World,
    ) -> None:
        self.queue = queue
        self.admission = Admission(batch_size=batch_size, updates=updates, max_staleness=max_staleness)
        self.replay = ReplayBuffer(
            self.queue, self.admission, group_size=GROUP_SIZE, config=config, world=world, filter_groups=filter_groups
        )
        self.batch_size = batch_size

    async def admit(self, uid: str) -> None:
        self.admission.admit(uid)
        await self.queue.open_lease(GroupLease(uid=uid))
        await self.status(uid, "pending", is_prompt=True)

    async def status(self, uid: str, status: str, **tag: bool | str) -> None:
        await self.queue.kv_put(uid, partition_id="train", lease=GroupLease(uid=uid), tag={"status": status, **tag})

    async def write(self, uid: str, session_id: int, num_outputs: int = 1, score: float | None = None) -> None:
        """One session, from its lease to its rows."""
        lease = SessionLease(uid=uid, session_id=session_id)
        await self.queue.open_lease(lease)
        keys = [f"{uid}_{session_id}_{index}" for index in range(num_outputs)]
        fields: dict[str, list[Any]] = {"responses": [[session_id] * 5] * num_outputs, "extra_fields": [{"uid": uid}] * num_outputs}
        tags = [{"response_len": 5, **({} if score is None else {"score": score})}] * num_outputs
        await self.queue.kv_batch_put(keys, partition_id="train", lease=lease, fields=fields, tags=tags)
        await self.queue.close_lease(lease)

    async def finish(self, uid: str, *scores: float) -> None:
        await self.status(uid, "running")
        for session_id in reversed(range(GROUP_SIZE)):
            await self.write(uid, session_id, score=scores[session_id] if scores else None)
        await self.settle(uid, "finished")

    async def fail(self, uid: str, failure: str = "infra: engine lost") -> None:
        await self.status(uid, "running")
        await self.write(uid, 0)
        await self.settle(uid, "failure", failure=failure)

    async def settle(self, uid: str, status: str, **tag: str) -> None:
        await self.status(uid, status, **tag)
        await self.queue.close_lease(GroupLease(uid=uid))

    async def train(self, step: int, batch: KVBatchMeta, *, attempt: int = 0) -> None:
        """Stage writes and retirement of a step."""
        lease = StepLease(step=step, attempt=attempt)
        await self.queue.open_lease(lease)
        columns = {"advantages": [[0.5] * 5] * len(batch)}
        await self.queue.kv_batch_put(batch.keys, partition_id="train", lease=lease, fields=columns)
        await self.queue.retire(batch.keys, partition_id="train", step=step, lease=lease)
        await self.queue.close_lease(lease)


@asynccontextmanager
async def _start(
    *,
    batch_size: int = 2,
    updates: int = 1,
    max_staleness: int = 0,
    sample_timeout_s: float = 30.0,
    max_failed: int = 32,
    max_filtered: int = 32,
    filter_groups: bool = False,
    world: World | None = None,
    journal: Journal | None = None,
    queue: TransferQueue | None = None,
) -> AsyncIterator[Rig]:
    config = ReplayConfig(
        sample_timeout_s=sample_timeout_s, max_failed_groups_in_a_row=max_failed, max_filtered_groups_in_a_row=max_filtered
    )
    store = queue or TransferQueue(journal)
    rig = Rig(
        batch_size=batch_size,
        updates=updates,
        max_staleness=max_staleness,
        config=config,
        queue=store,
        filter_groups=filter_groups,
        world=world or RealWorld(),
    )
    running = asyncio.create_task(rig.replay.run())
    await settle_loop()
    try:
        yield rig
    finally:
        running.cancel()
        await asyncio.wait([running])


async def settle_loop() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


StartRig = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def start_rig() -> StartRig:
    """`async with start_rig(batch_size=2) as rig`: replay follows the store until the block ends."""
    return _start


@pytest.fixture
def settled() -> Callable[[], object]:
    return settle_loop
