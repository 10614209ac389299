"""Sight: collects the numbers of a step and shows them. The trainer's one door to metrics, progress, trajectories and the curve.

trainer -> [sight] -> metrics.jsonl, incidents.jsonl, trace.jsonl, TensorBoard, trajectories/, curve.png, progress bar

It decides nothing. File work goes through `world.offload`.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Protocol

from asyncrl.config import TrainerConfig
from asyncrl.observe.curve import draw_curve
from asyncrl.observe.incidents import IncidentLog, Incidents, Line, incident_lines
from asyncrl.observe.lineage import Lineage
from asyncrl.observe.loop_lag import LoopLag
from asyncrl.observe.loop_watch import LoopWatch
from asyncrl.observe.metrics import MetricsLog
from asyncrl.observe.no_signal import NoSignalWatch
from asyncrl.observe.progress import Progress
from asyncrl.observe.run_folder import RunFolder
from asyncrl.observe.trace_file import Record, TraceLog
from asyncrl.observe.trajectories import TrajectoryText, write_trajectories
from asyncrl.ports import Incident, StageResult, World


class NumbersLog(Protocol):
    """Keeps numbers by step; blocking."""

    def log(self, step: int, metrics: Mapping[str, float], /) -> None: ...


class RecordLog(Protocol):
    """Keeps records of traced groups; blocking."""

    def append(self, record: Record, /) -> None: ...


class Bar(Protocol):
    """What the person who watches sees."""

    @property
    def is_live(self) -> bool:
        """Whether somebody watches between steps."""
        ...

    def say(self, text: str, /) -> None: ...

    def step(self, step: int, numbers: Mapping[str, float], /) -> None: ...

    def groups(self, counts: Mapping[str, float], /) -> None: ...


class Sight:
    """The numbers of one run, and its lineage. Made by `open_sight`."""

    def __init__(
        self,
        folder: RunFolder,
        metrics: NumbersLog,
        trace: RecordLog,
        bar: Bar,
        lag: Callable[[], Mapping[str, float]],
        lineage: Lineage,
        world: World,
        *,
        patience: int,
        step: int,
        incidents: Incidents | None = None,
        keep_incidents: Callable[[Sequence[Line]], None] | None = None,
    ) -> None:
        """keep_incidents: writes them down; blocking."""
        self.lineage = lineage
        self._incidents = incidents or Incidents(world)
        self._keep_incidents = keep_incidents
        self._trace = trace
        self._ended = step
        self._folder = folder
        self._metrics = metrics
        self._bar = bar
        self._lag = lag
        self._world = world
        self._no_signal = NoSignalWatch(patience=patience)
        self._step: dict[str, float] = {}

    def say(self, text: str) -> None:
        """One line for the person who watches."""
        self._bar.say(text)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `timing_s/<name>` of this step."""
        started = self._world.now()
        try:
            yield
        finally:
            key, ended = f"timing_s/{name}", self._world.now()
            self._step[key] = self._step.get(key, 0.0) + ended - started
            self.lineage.time(name, started, ended)

    def add(self, result: StageResult) -> None:
        """The numbers of a stage belong to this step, and so does what it read and wrote."""
        self._step.update(result.metrics)
        self.lineage.add(result.reports)

    @property
    def is_live(self) -> bool:
        """Whether somebody watches between steps."""
        return self._bar.is_live

    def groups(self, counts: Mapping[str, int]) -> None:
        """Groups by status, between steps."""
        self._bar.groups(counts)

    async def trajectories(self, step: int, texts: Sequence[TrajectoryText]) -> None:
        """Write sampled trajectories of a step as readable text."""
        if texts:
            await self._world.offload(write_trajectories, self._folder.trajectories, step, texts)

    async def end_step(self, step: int, counts: Mapping[str, float], *, num_tokens: int) -> None:
        """Complete the step's numbers, show and log them. num_tokens: of the step's trajectories, prompts included."""
        step_s = sum(value for name, value in self._step.items() if name.startswith("timing_s/"))
        tokens_per_s = num_tokens / step_s if step_s else 0.0
        lag = {f"loop_lag/{name}": value for name, value in self._lag().items()}
        incidents = self._incidents.counts()
        numbers = {**self._step, **counts, **lag, **incidents, "timing_s/step": step_s, "perf/tokens_per_s": tokens_per_s}
        self._step = {}
        if warning := self._no_signal.see(step, numbers):
            self.say(warning)
        self._bar.step(step, numbers)
        await self._world.offload(self._metrics.log, step, numbers)
        await self.write_trace()
        await self.write_incidents()
        self._ended = step

    async def write_trace(self) -> None:
        """Append what is known of the traced groups of the step under way to trace.jsonl; nothing when there are none."""
        if (record := self.lineage.end_step(self._ended + 1)) is not None:
            await self._world.offload(self._trace.append, record)

    async def write_incidents(self) -> None:
        """Append those since the last call to incidents.jsonl."""
        lines = self._incidents.take()
        if lines and self._keep_incidents is not None:
            await self._world.offload(self._keep_incidents, lines)

    def hear(self, incident: Incident) -> None:
        """An engine's are said at once: they are few, and a run may stand still meanwhile."""
        if incident.what == "engine":
            self.say(incident.text)

    def say_incidents(self) -> None:
        """What went wrong since the controller began, a line a kind."""
        for line in incident_lines(self._incidents.counts()):
            self.say(f"incidents: {line}")

    async def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show and log the `eval/*` numbers of the weights after `step`."""
        shown = "  ".join(
            f"{name.removeprefix('eval/')} {value:.3f}" for name, value in numbers.items() if name.endswith("/success")
        )
        self.say(f"evaluation after step {step}: {shown}")
        await self._world.offload(self._metrics.log, step, dict(numbers))


@asynccontextmanager
async def open_sight(
    folder: RunFolder,
    config: TrainerConfig,
    lineage: Lineage,
    incidents: Incidents,
    *,
    world: World,
    total_steps: int,
    step: int = 0,
    incarnation: int = 0,
) -> AsyncIterator[Sight]:
    """Open the run's files and the progress bar. Leaving, also by an error, draws the curve of what was logged, records groups
    dropped last, and writes and says the incidents."""
    metrics = await world.offload(partial(MetricsLog, folder, tensorboard=config.tensorboard, incarnation=incarnation))
    try:
        trace = await world.offload(TraceLog, folder.trace)
        log = await world.offload(partial(IncidentLog, folder.incidents, incarnation=incarnation))
        with Progress(total_steps=total_steps, step=step) as bar:
            async with LoopLag() as lag, LoopWatch(config.max_loop_lag_s, incidents.report):
                sight = Sight(
                    folder,
                    metrics,
                    trace,
                    bar,
                    lag.stats,
                    lineage,
                    world,
                    patience=config.no_signal_patience,
                    step=step,
                    incidents=incidents,
                    keep_incidents=log.append,
                )
                incidents.tell(sight.hear)
                try:
                    yield sight
                finally:
                    sight.say_incidents()
                    await sight.write_trace()
                    await sight.write_incidents()
    finally:
        await world.offload(metrics.close)
        await world.offload(draw_curve, folder.path)
