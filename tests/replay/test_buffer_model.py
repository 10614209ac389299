"""An adversary decides what finishes, fails, drops and publishes, and when; replay agrees with a model that a child could check."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from asyncrl.protocol.batch_meta import KVBatchMeta

StartRig = Callable[..., AbstractAsyncContextManager[Any]]
Settled = Callable[[], Coroutine[Any, Any, None]]

GROUP_SIZE = 2
ACTIONS = (
    *("admit", "admit", "session", "session", "session", "sample", "sample"),
    *("fail", "drop", "clear", "train", "restore", "publish"),
)
PLAN = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7)), max_size=120)
"""What to do, and to which group."""


@dataclass
class Model:
    """Groups by what is left of them; steps by what they hold."""

    alive: dict[str, list[int]] = field(default_factory=dict)
    """uid -> sessions still to come, in the order in which they will."""
    records: dict[int, list[str]] = field(default_factory=dict)
    dropped: int = 0
    admitted: int = 0
    trained: int = 0
    version: int = 0
    step: int = 0

    def head(self, batch_size: int) -> list[str] | None:
        """The next batch, if it is ready."""
        head = list(self.alive)[:batch_size]
        return head if len(head) == batch_size and not any(self.alive[uid] for uid in head) else None


class Adversary:
    def __init__(self, rig: Any, batch_size: int, limit: int) -> None:
        self.rig, self.batch_size, self.limit = rig, batch_size, limit
        self.model = Model()
        self.sampling: asyncio.Task[KVBatchMeta] | None = None
        self.batch: KVBatchMeta | None = None
        self.is_trained = True

    async def act(self, action: str, choice: int) -> None:
        await getattr(self, action)(choice)

    def pick(self, uids: list[str], choice: int) -> str | None:
        return uids[choice % len(uids)] if uids else None

    async def admit(self, choice: int) -> None:
        recorded = sum(map(len, self.model.records.values()))
        has_place = len(self.model.alive) + recorded < self.limit
        assert self.rig.admission.has_place == has_place
        if not has_place:
            return
        uid = f"u{self.model.admitted}"
        self.model.admitted += 1
        self.model.alive[uid] = [0, 1] if choice % 2 else [1, 0]
        await self.rig.admit(uid)
        if choice % 3 == 0:
            await self.rig.status(uid, "running")

    async def session(self, choice: int) -> None:
        uid = self.pick([uid for uid, left in self.model.alive.items() if left], choice)
        if uid is None:
            return
        left = self.model.alive[uid]
        if len(left) == GROUP_SIZE:
            await self.rig.status(uid, "running")
        await self.rig.write(uid, left[0])
        if len(left) == 1:
            await self.rig.settle(uid, "finished")
        left.pop(0)  # after the writes: the model is as late as a watcher may be

    async def fail(self, choice: int) -> None:
        uid = self.pick([uid for uid, left in self.model.alive.items() if left], choice)
        if uid is not None:
            await self.rig.status(uid, "running")
            await self.rig.settle(uid, "failure", failure="infra: it broke")
            self.forget(uid)

    async def drop(self, choice: int) -> None:
        uid = self.pick(list(self.model.alive), choice)
        if uid is not None and self.rig.admission.is_alive(uid):
            self.rig.admission.drop(uid, "no_signal")
            await self.rig.queue.kv_clear([uid], partition_id="train")
            self.forget(uid)

    async def clear(self, choice: int) -> None:
        uid = self.pick(list(self.model.alive), choice)
        if uid is not None and self.rig.admission.is_alive(uid):
            await self.rig.queue.kv_clear([uid], partition_id="train")
            self.forget(uid)

    def forget(self, uid: str) -> None:
        del self.model.alive[uid]
        self.model.dropped += 1

    async def sample(self, _: int) -> None:
        if self.sampling is None and self.is_trained:
            self.sampling = asyncio.create_task(self.rig.replay.sample(self.model.step + 1, self.batch_size))

    async def train(self, _: int) -> None:
        if self.batch is not None and not self.is_trained:
            await self.rig.train(self.model.step, self.batch)
            self.is_trained = True

    async def restore(self, _: int) -> None:
        if self.batch is not None and not self.is_trained:
            await self.rig.replay.restore(self.model.step)
            assert await self.rig.replay.sample(self.model.step, self.batch_size) == self.batch

    async def publish(self, _: int) -> None:
        if self.is_trained and self.model.version < self.model.step:
            self.model.version += 1
            self.model.trained += len(self.model.records.pop(self.model.version))
            self.rig.admission.publish(self.model.version)

    def take(self) -> None:
        """A sample is ready exactly when the model's head is, and is the model's head."""
        if self.sampling is None:
            return
        head = self.model.head(self.batch_size)
        assert self.sampling.done() == (head is not None), (head, self.model)
        if head is None:
            return
        self.batch = self.sampling.result()
        assert self.batch.keys == tuple(f"{uid}_{session}_0" for uid in head for session in range(GROUP_SIZE))
        self.sampling, self.is_trained = None, False
        self.model.step += 1
        self.model.records[self.model.step] = head
        for uid in head:
            del self.model.alive[uid]

    def check(self) -> None:
        self.rig.admission.check_conservation()
        model, count = self.model, self.rig.admission.counters()
        assert (count["admitted"], count["trained"], count["dropped"]) == (model.admitted, model.trained, model.dropped)
        assert self.rig.admission.alive == tuple(model.alive)
        counts = self.rig.replay.counts()
        assert counts["finished"] == sum(not left for left in model.alive.values())
        assert counts["pending"] + counts["running"] + counts["finished"] == len(model.alive)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=PLAN, batch_size=st.integers(1, 3), max_staleness=st.integers(0, 2))
async def test_replay_agrees_with_the_model(
    plan: list[tuple[str, int]], batch_size: int, max_staleness: int, start_rig: StartRig, settled: Settled
) -> None:
    async with start_rig(batch_size=batch_size, max_staleness=max_staleness, max_failed=1000) as rig:
        adversary = Adversary(rig, batch_size, (max_staleness + 1) * batch_size)
        for action, choice in plan:
            await adversary.act(action, choice)
            await settled()
            adversary.take()
            adversary.check()
        if adversary.sampling is not None:
            adversary.sampling.cancel()
            await asyncio.wait([adversary.sampling])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations([(group, session) for group in range(3) for session in range(GROUP_SIZE)]), data=st.data())
async def test_every_order_and_spacing_of_writes_gives_the_same_batch(
    order: list[tuple[int, int]], data: st.DataObject, start_rig: StartRig
) -> None:
    """The watch may coalesce as it likes, and the sample may start at any moment."""
    gaps = data.draw(st.lists(st.integers(0, 4), min_size=len(order), max_size=len(order)))
    start_at = data.draw(st.integers(0, len(order)))
    async with start_rig(batch_size=3) as rig:
        for group in range(3):
            await rig.admit(f"u{group}")
        left = dict.fromkeys(range(3), GROUP_SIZE)
        sampling: asyncio.Task[KVBatchMeta] | None = None
        for position, ((group, session), gap) in enumerate(zip(order, gaps, strict=True)):
            if position == start_at:
                sampling = asyncio.create_task(rig.replay.sample(1, 3))
            if left[group] == GROUP_SIZE:
                await rig.status(f"u{group}", "running")
            await rig.write(f"u{group}", session)
            left[group] -= 1
            if left[group] == 0:
                await rig.settle(f"u{group}", "finished")
            for _ in range(gap):
                await asyncio.sleep(0)
        batch = await (sampling or rig.replay.sample(1, 3))
        assert batch.keys == tuple(f"u{group}_{session}_0" for group in range(3) for session in range(GROUP_SIZE))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gaps=st.lists(st.integers(0, 3), min_size=8, max_size=8), failing=st.sets(st.integers(0, 7), max_size=5))
async def test_failures_at_any_spacing_are_refilled_and_counted(gaps: list[int], failing: set[int], start_rig: StartRig) -> None:
    """A feed that refills as places come free, while groups end: the batch is the first that finish, in admission order."""
    good = [f"u{number}" for number in range(8) if number not in failing][:3]
    async with start_rig(batch_size=3) as rig:

        async def feed() -> None:
            for number, gap in enumerate(gaps):
                await rig.admission.wait_for_place()
                await rig.admit(f"u{number}")
                for _ in range(gap):
                    await asyncio.sleep(0)
                await (rig.fail(f"u{number}") if number in failing else rig.finish(f"u{number}"))

        feeding = asyncio.create_task(feed())
        batch = await rig.replay.sample(1, 3)
        assert batch.uids[::GROUP_SIZE] == tuple(good)
        failed_before = {number for number in failing if number < int(good[-1][1:])}
        assert rig.admission.counters().get("dropped/failure", 0) == len(failed_before)
        feeding.cancel()
        await asyncio.wait([feeding])
        rig.admission.check_conservation()
