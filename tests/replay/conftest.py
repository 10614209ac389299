"""A store, an admission and a replay buffer that follow each other, and the runner's writes without a runner."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

import pytest

from asyncrl.config import ReplayConfig
from asyncrl.journal.port import Journal
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.ports import Incident, World
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.recovery import found_groups
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
        version: int,
        max_tries: int,
    ) -> None:
        self.queue = queue
        self.incidents: list[Incident] = []
        self.admission = Admission(
            batch_size=batch_size,
            updates=updates,
            max_staleness=max_staleness,
            version=version,
            found=found_groups(queue, step=version * updates),
        )
        self.replay = ReplayBuffer(
            self.queue,
            self.admission,
            group_size=GROUP_SIZE,
            config=config,
            world=world,
            filter_groups=filter_groups,
            max_tries=max_tries,
            report=self.incidents.append,
            describe=lambda uid: f"session 0 of {uid}: tool search for 3.0 s",
        )
        self.batch_size = batch_size

    async def admit(self, uid: str) -> None:
        self.admission.admit(uid)
        await self.queue.admit(
            GroupLease(uid=uid),
            partition_id="train",
            cursor=self.queue.cursor + 1,
            tag={"status": "pending", "is_prompt": True},
        )

    async def status(self, uid: str, status: str, **tag: bool | str | int) -> None:
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

    async def fail(self, uid: str, failure: str = "infra: engine lost", *, row: int = -1, num_done: int = 1) -> None:
        await self.status(uid, "running", row=row)
        for session_id in range(num_done):
            await self.write(uid, session_id)
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
    failed_groups: Literal["refill", "train_partial", "abort"] = "refill",
    quarantine_after: int = 3,
    filter_groups: bool = False,
    world: World | None = None,
    journal: Journal | None = None,
    queue: TransferQueue | None = None,
    version: int = 0,
    max_tries: int = 5,
) -> AsyncIterator[Rig]:
    config = ReplayConfig(
        sample_timeout_s=sample_timeout_s,
        max_failed_groups_in_a_row=max_failed,
        max_filtered_groups_in_a_row=max_filtered,
        failed_groups=failed_groups,
        quarantine_after=quarantine_after,
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
        version=version,
        max_tries=max_tries,
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
