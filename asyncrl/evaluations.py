"""Evaluations: when the weights are measured, on which engine, and what becomes of the numbers. The trainer calls at each version.

trainer.publish -> [evaluations] -> measure (evaluation.py) -> sight.evaluation -> queue.note_evaluation

`between`: on the run's own engine, and nothing is published until it is over. `snapshot`: on an engine of its own, which lives as
long as the evaluation, beside training; only the copy of the weights is waited for.

Invariants:
1. An evaluation measures one version, the one it is tagged with; no publication touches its engine before it is over.
2. It is due when its version is published or loaded and none of that version or a later one is recorded.
3. It is recorded after its numbers are written: a crash in between repeats it.
4. One that takes longer than `eval.timeout_s` leaves no number and no record; training goes on.
5. One at a time: the next waits for the one before.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from asyncrl.config import TrainRun
from asyncrl.errors import DeadlineError
from asyncrl.ports import Incident, IncidentKind, Policy, Report, RolloutEngine, WeightSnapshot, World
from asyncrl.waiting import no_stray_cancel, within

Measure = Callable[[RolloutEngine, int], Awaitable[dict[str, float]]]
"""(engine, version) -> `eval/*` numbers of the weights in the engine, which are that version's."""
OpenEngine = Callable[[], AbstractAsyncContextManager[RolloutEngine]]


class Told(Protocol):
    """Who is told of them: the Sight of the run."""

    def say(self, text: str, /) -> None: ...

    async def evaluation(self, step: int, numbers: Mapping[str, float], /) -> None: ...


class Recorded(Protocol):
    """Where it is kept which version was evaluated last: the TransferQueue of the run."""

    @property
    def evaluated(self) -> int:
        """-1: none yet."""
        ...

    async def note_evaluation(self, version: int, /) -> None: ...


class Evaluations:
    """The evaluations of one run. `measure` None: there is nothing to measure, and none is ever due.

    engine: the run's own. open_engine: makes another for `eval.where = "snapshot"`; None: they run between publications.
    """

    def __init__(
        self,
        measure: Measure | None,
        *,
        run: TrainRun,
        world: World,
        policy: Policy,
        engine: RolloutEngine,
        open_engine: OpenEngine | None,
        queue: Recorded,
        sight: Told,
        report: Report,
        total_steps: int,
    ) -> None:
        self._measure = measure
        self._run = run
        self._world = world
        self._policy = policy
        self._engine = engine
        self._open_engine = open_engine if run.eval.where == "snapshot" else None
        self._queue = queue
        self._sight = sight
        self._report = report
        self._total_steps = total_steps
        self._beside: asyncio.Task[None] | None = None
        self._beside_version = -1
        self.has_failed = False
        """One that ran beside training has raised: its version is owed its numbers, which no later weights can give."""

    # --- the trainer's side -----------------------------------------------------------------------------------------------------

    def is_due(self, step: int, version: int) -> bool:
        """Do the weights of `step`, which the engine has as `version`, still want their evaluation?"""
        config = self._run.trainer
        if self._measure is None or version <= self._queue.evaluated:
            return False
        if step == 0:
            return config.val_before_train
        return step >= self._total_steps or _ends_interval(step, self._run.publish_freq, config.test_freq)

    async def run_if_due(self, step: int, version: int) -> None:
        """Evaluate the weights of `step` if it is due; beside training, returns once their copy is made and the one before is over.

        Raises EvaluationError, of the one before too; DeadlineError when the copy of the weights takes too long.
        """
        if self._beside is not None and self._beside.done():
            await self.settle()  # what it failed of is raised soon
        if self._measure is None or not self.is_due(step, version):
            return
        if self._open_engine is None:
            await self._end(self._measure(self._engine, version), step, version)
            return
        await self.settle()
        limit_s = self._run.trainer.stage_timeout_s
        snapshot = await self._world.offload(self._policy.snapshot, version, pool="model", timeout_s=limit_s)
        work = self._run_beside(self._measure, self._open_engine, snapshot, step, version)
        # Not a TaskGroup: it would cancel the trainer's step for what it is told at the next version.
        self._beside = asyncio.create_task(work, name=f"evaluation of version {version}")
        self._beside_version = version

    async def settle(self, *, before: int | None = None) -> None:
        """Wait for the one that runs beside training; bounded by its deadline. Raises what it raised.

        before: only for one of a lower version. Who loads the weights of `before` can measure these again, and no older ones.
        """
        if self._beside is None:
            return
        if before is not None and self._beside_version >= before and not self._beside.done():
            return
        await asyncio.wait({self._beside})  # not the task itself: who is cut short here has not ended it
        task, self._beside = self._beside, None
        self.has_failed |= task.cancelled() or task.exception() is not None
        task.result()

    async def close(self) -> None:
        """End the one that runs; it leaves no number."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.wait({self._beside})
            if not self._beside.cancelled():
                self._beside.exception()  # the run is over, and asyncio would log it as forgotten

    # --- one evaluation ---------------------------------------------------------------------------------------------------------

    async def _run_beside(
        self, measure: Measure, open_engine: OpenEngine, snapshot: WeightSnapshot, step: int, version: int
    ) -> None:
        async def measured() -> dict[str, float]:
            async with open_engine() as engine:
                await engine.publish(version, snapshot)
                return await measure(engine, version)

        with no_stray_cancel(f"the evaluation of version {version}"):
            await self._end(measured(), step, version)

    async def _end(self, measuring: Awaitable[dict[str, float]], step: int, version: int) -> None:
        """Its numbers, written and then recorded; or what was late, told."""
        limit_s = self._run.eval.timeout_s
        late = f"the evaluation of version {version} took longer than eval.timeout_s = {limit_s:g} s: it has no numbers"
        try:
            async with within(limit_s, lambda: late):
                numbers = await measuring
        except DeadlineError as error:
            self._sight.say(str(error))
            incident = Incident(kind=IncidentKind.DEADLINE, what="evaluation", text=str(error), step=step, limit="eval.timeout_s")
            self._report(incident)
            return
        await self._sight.evaluation(step, {**numbers, "eval/version": float(version)})
        await self._queue.note_evaluation(version)


def _ends_interval(step: int, steps_a_version: int, freq: int) -> bool:
    """Is one of the version's steps, the last of which is `step`, a multiple of `freq`? 0: never."""
    return freq > 0 and step // freq > (step - steps_a_version) // freq
