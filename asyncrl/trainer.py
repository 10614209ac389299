"""The way of a training run, top to bottom; read this file first.

    dataset row -> uid -> group (pending) -> sessions (running) -> turns -> reward -> trajectory rows -> group (finished | failure)
      -> sample -> [old_log_probs] -> [ref_log_prob] -> advantages -> actor update -> metrics -> retire -> publish (version + 1)

        feed.take ──> agents.start ──> TransferQueue ──kv_watch──> replay.sample ──keys──> run_stage … ──> queue.retire
            ^                              (rows)                       |                     |                |
            └──────── admission: a place is freed by publication ───────┘<── engine.publish <─┘   checkpoint <─┘

Who waits for whom:
  admit     consumes a place and a row; produces a running group; waits for admission; unblocked by publish, or by a dropped group
  sample    consumes the oldest groups; produces keys and tags; waits until all are terminal; unblocked by the last session's settling
  stages    consume columns, produce columns; wait for nothing but their compute
  publish   consumes a snapshot; produces version + 1; waits for the decode step in flight

Invariants: every admitted group is trained, dropped with a reason, or open (I1); a step's keys are retired before its version is
published; a step that fails gives its groups back to replay; a checkpoint stands at a step border, where no group is alive.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from asyncrl.agents.runner import GroupRunner
from asyncrl.config import TrainRun
from asyncrl.feed import Feed
from asyncrl.keys import StepLease
from asyncrl.observe.sight import Sight
from asyncrl.ports import RolloutEngine, StepContext, World
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.stages.stage import Stage, StepScope, run_stage
from asyncrl.stopping import Stop, StopRequested, until
from asyncrl.training.actor import Actor
from asyncrl.transfer_queue import TransferQueue

Evaluate = Callable[[int], Awaitable[dict[str, float]]]
"""Weight version -> `eval/*` numbers."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The rooms of one run, already open, and the step it has reached. `fit` is the whole run."""

    run: TrainRun
    world: World
    feed: Feed
    queue: TransferQueue
    agents: GroupRunner
    admission: Admission
    replay: ReplayBuffer
    actor: Actor
    engine: RolloutEngine
    stages: tuple[Stage, ...]
    evaluate: Evaluate | None
    save: Callable[[int], Awaitable[None]]
    sight: Sight
    stop: Stop
    total_steps: int
    step: int = 0
    _saved_step: int = field(default=-1)

    async def fit(self) -> None:
        """Train until the last step, the feed's end or a stop; leaves a checkpoint of the last border."""
        self._saved_step = self.step
        async with asyncio.TaskGroup() as background:
            tasks = [background.create_task(self.replay.run()), background.create_task(self.admit())]
            try:
                await self._steps()
            except StopRequested:
                self.sight.say(f"stopping after step {self.step}")
            finally:
                for task in tasks:
                    task.cancel()
        await self._save_border()

    async def _steps(self) -> None:
        if self.step == 0 and self.run.trainer.val_before_train:
            await self._evaluate()
        while self.step < self.total_steps:
            await self.train_step(self.step + 1)
        if self.run.trainer.test_freq == 0 or self.step % self.run.trainer.test_freq:
            await self._evaluate()

    async def admit(self) -> None:
        """Keep the admitted groups at the bound; ends with the feed."""
        while True:
            await self.admission.wait_for_place()
            prompt = self.feed.take(self.engine.version)
            if prompt is None:
                self.replay.close_feed()
                return
            self.admission.admit(prompt.uid)
            self.agents.start(prompt)

    async def train_step(self, step: int) -> None:
        """One step: sample, stages, retire, checkpoint when due, publish, evaluate when due."""
        started = self.world.now()
        async with until(self.stop):
            batch = await self.replay.sample(step, self.run.data.train_batch_size)
        sampled = self.world.now()
        metrics = await self._run_stages(step, batch)
        self.step = step
        updated = self.world.now()
        if self._is_due(self.run.trainer.save_freq):
            await self._save_border()
        if step < self.total_steps:
            await self._publish(step)
        timing = {"timing_s/gen": sampled - started, "timing_s/update": updated - sampled, "timing_s/step": self.world.now() - started}
        await self.sight.step(step, batch, {**metrics, **timing}, self._counts())
        if self._is_due(self.run.trainer.test_freq):
            await self._evaluate()

    async def _run_stages(self, step: int, batch: KVBatchMeta) -> dict[str, float]:
        """Run the stages under the step's lease and retire the batch; on failure its groups are sampleable again."""
        lease = StepLease(step=step)
        level = self.run.trainer.invariants
        scope = StepScope(
            queue=self.queue,
            world=self.world,
            batch=batch,
            lease=lease,
            context=StepContext(step=step, version=step - 1, seed=self.world.seed("step", step)),
            check=level == "all" or (level == "sampled" and step % 10 == 1),
        )
        metrics: dict[str, float] = {}
        await self.queue.open_lease(lease)
        done = False
        try:
            for stage in self.stages:
                result = await run_stage(stage, scope)
                metrics.update(result.metrics)
            await self.sight.trajectories(step, batch, self.queue)
            await self.queue.retire(batch.keys, partition_id=batch.partition_id, step=step, lease=lease)
            done = True
        finally:
            if not done:
                await self.replay.restore(step)
            await self.queue.close_lease(lease)
        return metrics
