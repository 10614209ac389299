"""Groups under a policy, loop, reward and trainer that raise, cancel, hang and hold on at random: nothing is lost, nothing hangs.

Runner, store, replay and admission are the product's; the trainer is a loop of their calls. The seed decides what goes wrong; a
test that fails shows it.
"""

import asyncio
import logging
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from asyncrl.agents.chat_template import ChatTemplate, load_chat_template
from asyncrl.agents.loop import AgentLoopOutput, SessionContext
from asyncrl.agents.runner import GroupRunner
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.config import TrainRun, parse_run
from asyncrl.errors import DeadlineError, EngineError, GroupsExhaustedError, RewardError
from asyncrl.keys import StepLease
from asyncrl.ports import GenerateRequest, Prompt, RewardRequest, RewardResult
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.transfer_queue import TransferQueue
from asyncrl.world import RealWorld

BATCH, SESSIONS, GROUPS = 4, 3, 300


class Chaos:
    """What goes wrong, drawn from one seed. `end` lets go of everything that holds on."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.end = asyncio.Event()
        self.deeds: Counter[str] = Counter()

    async def strike(self) -> None:
        """Mostly a few turns of the loop; sometimes a deed. After the end none: who held on goes home."""
        if self.end.is_set():
            return
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        deed = self.rng.choices(("nothing", "error", "cancelled", "cancel", "hang", "hold"), (60, 2, 1, 1, 1, 1))[0]
        self.deeds[deed] += 1
        match deed:
            case "error":
                raise self.rng.choice(
                    (EngineError("lost"), RewardError("broken"), ValueError("odd"), TimeoutError(), OSError(5, "io"))
                )
            case "cancelled":
                raise asyncio.CancelledError
            case "cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            case "hang":
                await asyncio.Event().wait()
            case "hold":
                await self._hold()

    async def _hold(self) -> None:
        while not self.end.is_set():
            try:
                await self.end.wait()
            except asyncio.CancelledError:
                continue


@dataclass(slots=True)
class ChaosLoop:
    """single_turn between two strikes, with an output now and then that cannot be stored."""

    chaos: Chaos

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        await self.chaos.strike()
        outputs = await SingleTurn().run(prompt, context)
        await self.chaos.strike()
        if self.chaos.rng.random() < 0.01:
            return [replace(outputs[0], extra_fields={"object": object()})]
        if self.chaos.rng.random() < 0.01:
            return []
        return outputs * self.chaos.rng.randint(1, 2)


@dataclass(slots=True)
class ChaosScorer:
    chaos: Chaos

    async def score(self, request: RewardRequest) -> RewardResult:
        await self.chaos.strike()
        return RewardResult(score=self.chaos.rng.random())


@dataclass(slots=True)
class Rooms:
    """What a trainer holds."""

    chaos: Chaos
    queue: TransferQueue
    admission: Admission
    replay: ReplayBuffer
    agents: GroupRunner

    async def admit(self) -> None:
        for number in range(GROUPS):
            await self.admission.wait_for_place()
            uid = f"u{number}"
            self.admission.admit(uid)
            self.agents.start(Prompt(uid=uid, messages=[{"role": "user", "content": "1+1?"}], data_source="sums"))
        self.replay.close_feed()

    async def cancel_at_random(self) -> None:
        """Tasks of sessions and of groups under way are cancelled as no part of the product would."""
        while True:
            await asyncio.sleep(0.005)
            running = (await self.queue.kv_list("train"))["train"]
            tasks = [task for task in asyncio.all_tasks() if _victim(task.get_name(), running)]
            if tasks and self.chaos.rng.random() < 0.3:
                self.chaos.deeds["task cancelled"] += 1
                self.chaos.rng.choice(sorted(tasks, key=lambda task: task.get_name())).cancel()

    async def sample(self, step: int) -> KVBatchMeta:
        """Some samples are cut short and begin anew."""
        while True:
            try:
                async with asyncio.timeout(self.chaos.rng.choice((0.001, 0.01, None))):
                    return await self.replay.sample(step, BATCH)
            except DeadlineError:  # nothing came for replay.sample_timeout_s: it says what it waited for
                raise
            except TimeoutError:
                self.chaos.deeds["sample cut short"] += 1

    async def train(self, step: int, attempt: int = 0) -> None:
        """One step; it fails now and then, before or after its columns are written."""
        batch = await self.sample(step)
        assert len(batch) >= BATCH * SESSIONS
        assert [uid for uid, before in zip(batch.uids, (None, *batch.uids), strict=False) if uid != before] == sorted(
            set(batch.uids), key=lambda uid: int(uid[1:])
        )
        lease = StepLease(step=step, attempt=attempt)
        await self.queue.open_lease(lease, keys=batch.keys, partition_id="train")
        try:
            if self.chaos.rng.random() < 0.1:
                raise ZeroDivisionError
            scores = await self.queue.kv_batch_get(batch.keys, partition_id="train", fields=["rm_scores"])
            await self.queue.kv_batch_put(
                batch.keys, partition_id="train", lease=lease, fields={"advantages": list(scores["rm_scores"].unbind())}
            )
            if self.chaos.rng.random() < 0.1:
                raise ZeroDivisionError
            await self.queue.retire(batch.keys, partition_id="train", step=step, lease=lease)
        except ZeroDivisionError:
            self.chaos.deeds["step failed"] += 1
            await self.replay.restore(step)
            await self.train(step, attempt + 1)
        finally:
            await self.queue.close_lease(lease)

    async def train_all(self) -> None:
        step = 0
        while True:
            step += 1
            try:
                await self.train(step)
            except GroupsExhaustedError:
                return
            await asyncio.sleep(0)
            self.admission.publish(step)
            self.admission.check_conservation()


def _victim(name: str, running: dict[str, object] | object) -> bool:
    kind, _, rest = name.partition(" ")
    assert isinstance(running, dict)
    return (kind == "session" and rest.rpartition("_")[0] in running) or (kind == "group" and rest in running)


@asynccontextmanager
async def opened(chaos: Chaos, template: ChatTemplate, run: TrainRun) -> AsyncIterator[Rooms]:
    async def answer(request: GenerateRequest) -> Sequence[int]:
        await chaos.strike()
        return template.encode_assistant("2") if chaos.rng.random() < 0.98 else []

    async with RealWorld() as world, TransferQueue() as queue:
        admission = Admission(batch_size=BATCH, max_staleness=1)
        # Each try of a step fails with a chance of a fifth: five in a row would come now and then.
        replay = ReplayBuffer(queue, admission, group_size=SESSIONS, config=run.replay, world=world, max_tries=100)
        async with GroupRunner(queue, ScriptedEngine(answer), ChaosScorer(chaos), template, {}, run, world) as agents:
            agents._parts = replace(agents._parts, loop=ChaosLoop(chaos))
            try:
                yield Rooms(chaos, queue, admission, replay, agents)
            finally:
                chaos.end.set()  # also of a test that failed: who holds on would keep its loop from being closed


@pytest.fixture(scope="module")
def template(model_folder: Path) -> ChatTemplate:
    run = parse_run(TrainRun, {"model": {"path": str(model_folder)}, "data": {"train_files": ["-"]}})
    return load_chat_template(run.model, [])


@pytest.mark.parametrize(
    "drawn", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(None, id="any", marks=pytest.mark.long)]
)
async def test_nothing_is_lost_and_nothing_hangs(
    drawn: int | None, template: ChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    sections = {
        "model": {"path": "-"},
        "data": {"train_files": ["-"]},
        "rollout": {"n": SESSIONS, "request_timeout_s": 0.03},
        "agent": {"name": "single_turn", "timeout_s": 0.05, "max_concurrent_sessions": 16},
        "replay": {"sample_timeout_s": 20.0, "max_failed_groups_in_a_row": GROUPS},
    }
    before = asyncio.all_tasks()
    seed = random.randrange(10**9) if drawn is None else drawn
    sys.stdout.write(f"seed {seed}\n")
    chaos = Chaos(seed)
    async with opened(chaos, template, parse_run(TrainRun, sections)) as rooms, asyncio.TaskGroup() as background:
        tasks = [background.create_task(task) for task in (rooms.replay.run(), rooms.admit(), rooms.cancel_at_random())]
        await rooms.train_all()
        for task in tasks:
            task.cancel()
    assert asyncio.all_tasks() == before
    counts = rooms.admission.counters()
    assert (counts["admitted"], counts["open"]) == (GROUPS, 0)
    assert counts["trained"] + counts["dropped"] == GROUPS
    assert counts["trained"] % BATCH == 0
    assert counts["dropped"] == counts.get("dropped/failure", 0) + counts.get("dropped/feed_end", 0)
    assert counts["trained"] > 0
    assert counts["dropped/failure"] > 0
    stats = rooms.queue.stats()
    assert (stats["keys"], stats["bytes"], stats["open_leases"]) == (0, 0, 0)
    assert not caplog.records, "asyncio reports what nobody heard of"
    assert min(chaos.deeds[deed] for deed in ("error", "hang", "hold", "cancelled", "cancel", "task cancelled")) > 0, chaos.deeds
