"""How long after its last group has finished does a step have its batch, with 100,000 keys alive? Milliseconds.

    python benchmarks/sample_latency.py [--groups 12500] [--samples 300] [--sync normal] [--json]

Real: TransferQueue (in memory, and with its journal), Admission, ReplayBuffer. 12,500 groups of 8 trajectories are alive, all of
them finished but for the last session of each eighth group. A step asks for 8 groups and waits; that session settles, which ends
the last group of the batch; measured is the time from the call that settles it to the return of `sample`. With the journal that
holds the record of the step: it is on the disk, synced, before `sample` returns, and with it all that was written since the step
before (64 trajectories). Then the step is retired, its version published, and 8 groups are admitted in its place, so the number of
keys stays.

JSON: for memory and journal: median_ms, p99_ms, max_ms, keys; settle_ms: what the call itself takes, its acknowledgement included.
"""

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from asyncrl.config import ReplayConfig
from asyncrl.event_loop import run_loop
from asyncrl.keys import TRAIN, GroupLease, SessionLease, StepLease
from asyncrl.ports import GroupStatus
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.world import RealWorld

BATCH, GROUP_SIZE, RESPONSE_LEN = 8, 8, 32
TIMEOUT_S = 600.0
WARM_UP = 10

Sync = Literal["normal", "full"]
Numbers = dict[str, float]


class Producer:
    """Writes what the agents of a run write, group after group, in the order of the feed."""

    def __init__(self, queue: TransferQueue, admission: Admission) -> None:
        self._queue = queue
        self._admission = admission
        self._row = {"responses": torch.arange(RESPONSE_LEN), "rollout_log_probs": torch.full((RESPONSE_LEN,), -0.5)}
        self._number = 0
        self._open: list[SessionLease] = []
        """The last session of each batch, which has not settled."""

    async def add(self) -> None:
        """One more group; of each eighth the last session stays open."""
        group = GroupLease(uid=f"{self._number:016x}")
        self._number += 1
        self._admission.admit(group.uid)
        tag: dict[str, Any] = {"is_prompt": True, "status": GroupStatus.PENDING}
        prompt = {"raw_prompt": [{"role": "user", "content": "12 * 34 = ?"}]}
        await self._queue.admit(group, partition_id=TRAIN, cursor=self._number, tag=tag, fields=prompt)
        leases = [SessionLease(uid=group.uid, session_id=session) for session in range(GROUP_SIZE)]
        await self._queue.begin_sessions(group, leases, partition_id=TRAIN, tag={"status": GroupStatus.RUNNING})
        if self._number % BATCH == 0:
            self._open.append(leases.pop())
        for lease in leases:
            await self._settle(lease, is_last=lease.session_id == GROUP_SIZE - 1)

    async def finish_next(self) -> None:
        """The session that the next batch waits for."""
        await self._settle(self._open.pop(0), is_last=True)

    async def _settle(self, lease: SessionLease, *, is_last: bool) -> None:
        tag: dict[str, Any] = {"status": "finished", "policy_len": RESPONSE_LEN, "score": lease.session_id / GROUP_SIZE}
        await self._queue.settle_session(
            lease,
            partition_id=TRAIN,
            keys=[f"{lease.uid}_{lease.session_id}_0"],
            fields={name: [values] for name, values in self._row.items()},
            tags=[tag],
            group_tag={"status": GroupStatus.FINISHED} if is_last else None,
        )


class Consumer:
    """Steps of a run, without their stages."""

    def __init__(self, queue: TransferQueue, admission: Admission, replay: ReplayBuffer, producer: Producer) -> None:
        self._queue = queue
        self._admission = admission
        self._replay = replay
        self._producer = producer
        self.waited_ms: list[float] = []
        self.settle_ms: list[float] = []

    async def step(self, step: int) -> None:
        """Wait for the batch, finish its last group, and put as many groups in its place."""
        sampling = asyncio.create_task(self._sample(step))
        await _quiet()
        assert not sampling.done()
        start = time.perf_counter()
        await self._producer.finish_next()
        self.settle_ms.append((time.perf_counter() - start) * 1e3)
        keys, returned = await sampling
        self.waited_ms.append((returned - start) * 1e3)
        assert len(keys) == BATCH * GROUP_SIZE
        lease = StepLease(step=step)
        await self._queue.open_lease(lease, keys=keys, partition_id=TRAIN)
        await self._queue.retire(keys, partition_id=TRAIN, step=step, lease=lease)
        await self._queue.close_lease(lease)
        self._admission.publish(step)
        await self._queue.purge(step)
        for _ in range(BATCH):
            await self._producer.add()

    async def _sample(self, step: int) -> tuple[tuple[str, ...], float]:
        batch = await self._replay.sample(step, BATCH)
        return batch.keys, time.perf_counter()


async def _quiet() -> None:
    """Until replay has seen all that is written."""
    for _ in range(20):
        await asyncio.sleep(0)


async def measure(queue: TransferQueue, world: RealWorld, *, groups: int, samples: int) -> Numbers:
    admission = Admission(batch_size=BATCH, max_staleness=groups // BATCH)
    config = ReplayConfig(sample_timeout_s=TIMEOUT_S)
    replay = ReplayBuffer(queue, admission, group_size=GROUP_SIZE, config=config, world=world)
    producer = Producer(queue, admission)
    consumer = Consumer(queue, admission, replay, producer)
    following = asyncio.create_task(replay.run())
    await asyncio.sleep(0)
    for _ in range(groups):
        await producer.add()
    gc.collect()
    for step in range(1, WARM_UP + samples + 1):
        await consumer.step(step)
    keys = queue.stats()["keys"]
    following.cancel()
    await asyncio.wait([following])
    waited = sorted(consumer.waited_ms[WARM_UP:])
    return {
        "median_ms": statistics.median(waited),
        "p99_ms": waited[(len(waited) - 1) * 99 // 100],
        "max_ms": waited[-1],
        "settle_ms": statistics.median(consumer.settle_ms[WARM_UP:]),
        "keys": keys,
    }


@asynccontextmanager
async def _opened(name: str, sync: Sync, world: RealWorld) -> AsyncIterator[TransferQueue]:
    if name == "memory":
        async with TransferQueue() as queue:
            yield queue
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        async with open_queue(path, sync=sync, world=world, commit_timeout_s=TIMEOUT_S) as queue:
            yield queue


async def measure_both(groups: int, samples: int, sync: Sync) -> dict[str, Numbers]:
    found: dict[str, Numbers] = {}
    async with RealWorld() as world:
        for name in ("memory", "journal"):
            async with _opened(name, sync, world) as queue:
                numbers = await measure(queue, world, groups=groups, samples=samples)
            found[name] = {each: round(value, 3) for each, value in numbers.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=12_500, help="alive; a multiple of 8")
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--sync", choices=["normal", "full"], default="normal", help="store.sync; a record is always synced")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = run_loop(measure_both(arguments.groups, arguments.samples, arguments.sync))
    for name, numbers in found.items():
        print(
            f"{name:8} {numbers['keys']:,.0f} keys alive: median {numbers['median_ms']:.2f} ms, p99 {numbers['p99_ms']:.2f} ms, "
            f"max {numbers['max_ms']:.2f} ms; settling alone {numbers['settle_ms']:.2f} ms"
        )
    print("goal: median 5 ms or less")
    if arguments.json:
        print(json.dumps({"bench": "sample-latency", **found}))


if __name__ == "__main__":
    main()
