"""The way of a training run, top to bottom; read this file first.

    dataset row -> uid -> group (pending) -> sessions (running) -> turns -> reward -> trajectory rows -> group (finished | failure)
      -> sample -> balance -> [old_log_probs] -> [ref_log_prob] -> [values] -> [correction] -> advantages -> [critic update]
      -> actor update -> metrics -> retire -> publish (version + 1)

        feed.take ──> agents.start ──> TransferQueue ──kv_watch──> replay.sample ──keys──> run_stage … ──> queue.retire
            ^                              (rows)                       |                     |                |
            └──────── admission: a place is freed by publication ───────┘<── engine.publish <─┘   checkpoint <─┘

Who waits for whom:
  admit     consumes a place and a row; produces a running group; waits for admission; unblocked by publish, or by a dropped group
  sample    consumes the oldest groups; produces keys and tags; waits until all are terminal; unblocked by the last session's end
  balance   consumes keys and tags; produces the order in which the ranks take them; waits for nothing
  stages    consume columns, produce columns; wait for nothing but their compute
  publish   consumes a snapshot; produces version + 1; waits for the decode step in flight

Async mode is the same lines: with `trainer.max_staleness` > 0 there are places for more groups than one step takes, so sessions go
on while the actor trains. A restart is the same lines too: a step that has a record samples the keys of its record, and no session
goes on before the last of these steps is done and published.

Invariants: every admitted group is trained, dropped with a reason, or open; record, update, retire, publish, in this order; a step
that fails gives its groups back to replay; a checkpoint stands at the end of a version, with the journal synced before it; a run
that fails between two versions leaves one too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from asyncrl.agents.runner import GroupRunner
from asyncrl.config import TrainRun
from asyncrl.errors import (
    AlgorithmError,
    AsyncRLError,
    DeadlineError,
    GroupFailedError,
    JournalWriteError,
    StalledError,
    StrayCancelError,
)
from asyncrl.evaluations import Evaluations
from asyncrl.feed import Feed
from asyncrl.keys import StepLease
from asyncrl.observe.lengths import length_metrics
from asyncrl.observe.sight import Sight
from asyncrl.observe.trajectories import TrajectoryText
from asyncrl.ports import Decode, Incident, IncidentKind, Policy, Report, RolloutEngine, StageResult, StepContext, World
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.recovery import Open
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.stages.balance import balance
from asyncrl.stages.contract import check_cleanup, check_sample
from asyncrl.stages.stage import Stage, StepScope, run_stage
from asyncrl.stages.trajectory_texts import TEXT_FIELDS, first_trajectories, trajectory_texts
from asyncrl.stopping import Stop, StopRequested, until
from asyncrl.transfer_queue import TransferQueue
from asyncrl.waiting import give_way, no_stray_cancel, within
from asyncrl.wording import first_of

REDRAW_S = 0.2
"""A redraw of the bar costs a millisecond; five a second are enough for the eye."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The rooms of one run, already open, and the step that its weights have reached. `fit` is the whole run."""

    run: TrainRun
    world: World
    feed: Feed
    queue: TransferQueue
    agents: GroupRunner
    admission: Admission
    replay: ReplayBuffer
    actor: Policy
    engine: RolloutEngine
    stages: tuple[Stage, ...]
    evaluations: Evaluations
    save: Callable[[int], Awaitable[list[int]]]
    """Writes a checkpoint of a step; returns the steps of those that are kept, oldest first."""
    sight: Sight
    report: Report
    decode: Decode
    stop: Stop
    total_steps: int
    step: int = 0
    """Steps that the weights have seen."""
    open: tuple[Open, ...] = ()
    """Groups that a restart has found half done."""
    kept: Sequence[int] = ()
    """Steps of the checkpoints that are kept, oldest first."""
    _saved: int = field(default=0, init=False)
    _recorded: int = field(default=0, init=False)
    """Steps up to this one are repeated."""
    _is_updating: bool = field(default=False, init=False)
    _doing: str = field(default="", init=False)
    """For the record of what ends the run: `sample`, `publish`, `checkpoint`, `evaluation`, or a stage's name."""
    _caught_up: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def fit(self) -> None:
        """Train until the last step or a stop; leaves a checkpoint of the last version, also when a task of the run fails.

        What failed is raised as itself, not in a group.
        """
        self._saved = self.step
        try:
            with no_stray_cancel("the trainer"):
                await self._fit()
        except AsyncRLError as error:
            self.report(_incident_of(error, self._doing, self.step + 1))
            raise
        finally:
            self.sight.say(self.admission.summary())

    async def _fit(self) -> None:
        try:
            with no_stray_cancel("the trainer"):
                await self._train()
        except (ExceptionGroup, StrayCancelError) as error:
            await self._save_after_failure()
            first = first_of(error)
            raise first from first.__cause__
        except asyncio.CancelledError:
            if self.agents.has_failed:  # it was they who cancelled this task; what failed is raised when they are left
                await self._save_after_failure()
            raise
        await self._save()

    async def _save_after_failure(self) -> None:
        """Unless an update was under way the weights are those of a step: what was learned need not be lost with what failed. Where
        an older version is owed its evaluation, only older weights can give it: then the steps are repeated."""
        doing = self._doing
        try:
            if not (self._is_updating or self.evaluations.has_failed):
                await self._save()
        except asyncio.CancelledError:
            if not self.agents.has_failed:
                raise
            await self._save()  # the agents failed while it was written; they cancel this task once
        except (AsyncRLError, OSError) as second:  # the first is what ended the run, and is raised
            self.sight.say(f"no checkpoint of step {self.step} could be left: {second}")
        self._doing = doing
        if self.run.store.journal:
            self.sight.say(f"the run failed; step {self._saved} is what --resume goes on from")

    async def _train(self) -> None:
        """The steps, with admission and replay in the background."""
        async with asyncio.TaskGroup() as background:
            following = background.create_task(self.replay.run())
            admitting = background.create_task(_in_background("admission", self.admit))
            showing = background.create_task(_in_background("the display of groups", self.show_groups))
            try:
                await self._steps()
            except StopRequested:
                self.sight.say(f"stopping after step {self.step}")
            finally:
                for task in (admitting, showing, following):
                    task.cancel()

    async def _steps(self) -> None:
        """All steps that are left, with what is due between them."""
        recorded = self._recorded = self.queue.last_step
        if self.step < recorded:
            steps = f"steps {self.step + 1} to {recorded}" if self.step + 1 < recorded else f"step {recorded}"
            self.sight.say(f"repeated before anything is generated, on what was recorded: {steps}")
        self._open_generation()
        await self._purge()  # a crash may have come between a checkpoint and this
        await self._evaluate()
        while self.step < self.total_steps:
            step = self.step + 1
            batch = await self.train_step(step)
            if self._ends_version:
                await self.publish(self.version)
            self._open_generation()
            # Before the checkpoint: what goes on from that does not train the step again, and its numbers would be missing.
            await self.sight.end_step(step, self._counts(step, batch), num_tokens=batch.num_tokens)
            if self._ends_version:
                await self._keep_version()
                await self._evaluate()
        async with until(self.stop):
            await self.evaluations.settle()

    async def _keep_version(self) -> None:
        """A checkpoint where one is due; the journal forgets what none needs any more."""
        save_freq = self.run.trainer.save_freq
        if self.step == self.total_steps or (save_freq and self.step % save_freq == 0):
            await self._save()
        elif not self._saved:
            await self._purge()

    @property
    def version(self) -> int:
        """Weight version of the steps that are done."""
        return self.step // self.run.publish_freq

    @property
    def _ends_version(self) -> bool:
        return self.step % self.run.publish_freq == 0

    def _open_generation(self) -> None:
        """No token for training is sampled before the last recorded step is done and its version published: it would be too old by
        then, or newer than the weights that train on it."""
        if self.step >= self._recorded:
            self._caught_up.set()

    async def admit(self) -> None:
        """Go on with what a restart has found, then keep as many groups alive as the staleness bound allows; ends with the feed."""
        await self._caught_up.wait()
        for each in self.open:
            self.sight.lineage.admit(each.prompt)
            self.agents.resume(each.prompt, each.found)
        while True:
            await self.admission.wait_for_place()
            await self.world.site("trainer.admit")
            if not self.admission.has_place:  # nobody else takes places, but the run may have come to its end
                continue
            prompt = self.feed.take(self.engine.version)
            if prompt is None:
                self.replay.close_feed()
                return
            self.admission.admit(prompt.uid)
            self.sight.lineage.admit(prompt)
            self.agents.start(prompt)
            await give_way()  # a batch of them at once would hold the loop

    async def show_groups(self) -> None:
        """Keep the groups on the progress bar up to date, a few times a second at most."""
        shown = self.world.now()
        while self.sight.is_live:
            await self.admission.changed.wait()
            if self.world.now() - shown >= REDRAW_S:
                shown = self.world.now()
                self.sight.groups(self.replay.counts())

    async def train_step(self, step: int) -> KVBatchMeta:
        """Sample a batch, run the stages under the step's lease, retire it. On failure its groups are sampleable again."""
        self._doing = "sample"
        with self.sight.timing("gen"):
            async with self._until_stopped():
                batch = await self.replay.sample(step, self.run.data.train_batch_size)
        scope = StepScope(
            queue=self.queue,
            world=self.world,
            batch=batch,
            lease=StepLease(step=step, incarnation=self.queue.incarnation),
            context=StepContext(step=step, version=self.version, seed=self.world.seed("step", step)),
            check=self._checks_invariants(step),
            timeout_s=self.run.trainer.stage_timeout_s,
        )
        await self.queue.open_lease(scope.lease, keys=batch.keys, partition_id=batch.partition_id)
        self._is_updating, has_learned = True, False
        try:
            await self.world.site("trainer.sampled")  # the step's groups are recorded: they stay, whatever comes meanwhile
            await self._check_sample(scope)
            balanced = await self._traced(await self._balance(scope))
            for stage in self.stages:
                self._doing = stage.name
                with self.sight.timing(stage.name):
                    self.sight.add(await run_stage(stage, balanced))
                has_learned = has_learned or stage.learns
            texts = await self._trajectory_texts(batch)
            await self._trace_end(balanced)
        except BaseException as error:
            if isinstance(error, AlgorithmError):
                self._is_updating = has_learned or error.has_learned  # else the weights are those of the step before
            await self.replay.restore(step)
            await self.queue.close_lease(scope.lease)
            raise
        # From here on the weights are those of the step, whatever becomes of its rows.
        self.step = step
        self._is_updating = False
        await self.world.site("trainer.trained")  # the step is done: what ends the run here can be resumed from it
        await self.queue.retire(batch.keys, partition_id=batch.partition_id, step=step, lease=scope.lease)
        await self.queue.close_lease(scope.lease)
        await check_cleanup(scope)
        await self.sight.trajectories(step, texts)  # not in the step: a full disk must not make a trained one look failed
        return batch

    def _until_stopped(self) -> AbstractAsyncContextManager[None]:
        """A stop waits for the end of a version: only there can a checkpoint be."""
        return until(self.stop) if self._ends_version else nullcontext()

    async def _check_sample(self, scope: StepScope) -> None:
        # What a step was recorded with it keeps, whatever has become of the key since.
        may_lack = self.run.replay.failed_groups == "train_partial" or scope.context.step <= self._recorded
        await check_sample(
            scope, group_size=self.run.rollout.n, max_staleness=self.admission.max_staleness, may_lack_sessions=may_lack
        )

    async def _balance(self, scope: StepScope) -> StepScope:
        """The step with its rows in the order of the ranks; for one rank that is the order in which they were sampled."""
        with self.sight.timing("balance"):
            split = partial(balance, scope.batch, self.actor.num_ranks, groups_each=self.run.mini_batch_groups)
            dispatch = await self.world.offload(split, pool="model", timeout_s=scope.timeout_s)
            if scope.check:
                await self.world.offload(dispatch.check, pool="model", timeout_s=scope.timeout_s)
        self.sight.add(StageResult(metrics=dispatch.metrics))
        return replace(scope, batch=dispatch.batch, context=replace(scope.context, shards=dispatch.row_shards))

    async def _traced(self, scope: StepScope) -> StepScope:
        """The step with its traced rows; the lineage learns what the store holds of them."""
        rows = self.sight.lineage.rows_of(scope.batch.groups)
        if not rows:
            return scope
        chosen = scope.batch.select(rows)
        held = await self.queue.describe(chosen.keys, partition_id=chosen.partition_id)
        self.sight.lineage.begin_step(scope.context, chosen.keys, chosen.tags, held)
        return replace(scope, traced=rows)

    async def _trace_end(self, scope: StepScope) -> None:
        if scope.traced:
            chosen = scope.batch.select(scope.traced)
            self.sight.lineage.retire(await self.queue.describe(chosen.keys, partition_id=chosen.partition_id))

    async def publish(self, version: int) -> None:
        """Give the engine a snapshot of the weights; that frees the places of the groups they were trained on."""
        self._doing = "publish"
        with self.sight.timing("publish"):
            await give_weights(version, self.actor, self.engine, self.run, self.world)
        await self.world.site("trainer.published")  # the engine samples from it already; its places are only free later
        self.admission.publish(version)

    async def _save(self) -> None:
        """A checkpoint, if there is none of this step. Evaluations of versions before it are recorded first, the journal synced:
        nothing that it takes for granted can be lost after it. (Of a journal that has failed, records and evaluations are.)"""
        if self._saved != self.step and self._ends_version:
            self._doing = "checkpoint"
            await self.evaluations.settle(before=self.version)
            if self.queue.failure is None:
                await self.queue.sync()
            self.kept = await self.save(self.step)
            self._saved = self.step
            await self._purge()  # with each of them: lives that end by a failure would pile their steps up

    async def _purge(self) -> None:
        """Forget the steps that no checkpoint will ask for again: those up to the oldest that is kept, or all when none is made."""
        if self.queue.failure is not None:
            return
        if self.kept:
            await self.queue.purge(self.kept[0])
        elif not self.run.trainer.save_freq and not self._saved:
            await self.queue.purge(self.step)

    async def _evaluate(self) -> None:
        self._doing = "evaluation"
        async with until(self.stop):
            await self.evaluations.run_if_due(self.step, self.version)

    def _checks_invariants(self, step: int) -> bool:
        level = self.run.trainer.invariants
        return level == "all" or (level == "sampled" and step % 10 == 1)

    async def _trajectory_texts(self, batch: KVBatchMeta) -> list[TrajectoryText]:
        chosen = first_trajectories(batch, self.run.trainer.log_trajectories)
        if not len(chosen):
            return []
        columns = await self.queue.kv_batch_get(chosen.keys, partition_id=chosen.partition_id, fields=TEXT_FIELDS)
        return trajectory_texts(chosen.keys, columns, self.decode)

    def _counts(self, step: int, batch: KVBatchMeta) -> dict[str, float]:
        self.admission.check_conservation()
        return {
            "training/global_step": float(step),
            "training/epoch": self.feed.cursor / self.feed.num_rows,
            **{f"admission/{name}": float(count) for name, count in self.admission.counters().items()},
            **{f"groups/{name}": float(count) for name, count in {**self.replay.counts(), **self.replay.stats()}.items()},
            **{f"agents/{name}": value for name, value in self.agents.stats().items()},
            **{f"engine/{name}": value for name, value in self.engine.stats().items()},
            **{f"transfer_queue/{name}": value for name, value in self.queue.stats().items()},
            **length_metrics(self.agents.take_lengths(), [int(tag["policy_len"]) for tag in batch.tags]),
        }


async def _in_background(who: str, work: Callable[[], Awaitable[None]]) -> None:
    """Nobody waits for it before the end: what ends it early must not do so in silence."""
    with no_stray_cancel(who):
        await work()


async def give_weights(version: int, actor: Policy, engine: RolloutEngine, run: TrainRun, world: World) -> None:
    """Put the actor's weights into the engine as `version`. Raises DeadlineError when either of them takes too long."""
    snapshot = await world.offload(actor.snapshot, version, pool="model", timeout_s=run.trainer.stage_timeout_s)
    limit_s = run.rollout.publish_timeout_s
    late = f"the engine did not take version {version} within rollout.publish_timeout_s = {limit_s:g} s"
    # Those who wait within have the same deadline first: the gate for the calls in flight, a pool for each of its engines.
    limit_s *= 1 + (not run.rollout.in_flight_updates) + run.rollout.has_pool
    async with within(limit_s, lambda: late):
        await engine.publish(version, snapshot)


def _incident_of(error: AsyncRLError, doing: str, step: int) -> Incident:
    """What ends the run, for its record."""
    kind = IncidentKind.DEADLINE if isinstance(error, DeadlineError) else IncidentKind.FAILURE
    kind = IncidentKind.STALL if isinstance(error, StalledError) else kind
    what = doing if doing in ("sample", "publish", "checkpoint", "evaluation") else "stage"
    what = "journal" if isinstance(error, JournalWriteError) else "group" if isinstance(error, GroupFailedError) else what
    return Incident(kind=kind, what=what, text=str(error), state=doing, step=step)
