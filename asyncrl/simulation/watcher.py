"""Watcher: what the controller tells of itself, kept in memory; and where oracles look at it.

sight -> [Watcher] -> report, oracles
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from asyncrl.observe.incidents import Incidents, Line
from asyncrl.observe.lineage import Lineage
from asyncrl.observe.run_folder import RunFolder
from asyncrl.observe.sight import Sight
from asyncrl.observe.trace_file import Record
from asyncrl.ports import SessionSpan, World
from asyncrl.trainer import Trainer
from asyncrl.wiring import Edges


class Watcher:
    """`steps`: the numbers of each step, as metrics.jsonl would have them, with the second of its end; `records`: traced groups;
    `said`: lines for a person; `told`: incidents. `measured`: told (step, version) of each evaluation that is written down."""

    is_live = False
    folder = Path("simulated")
    watch_sessions: Callable[[SessionSpan], SessionSpan] | None = None
    """What puts listeners around the spans of sessions, for who wants to see them all."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.records: list[Record] = []
        self.said: list[str] = []
        self.told: list[Line] = []
        self.incidents: Incidents | None = None
        self.measured: Callable[[int, int], None] | None = None
        self.trainer: Trainer | None = None
        self.edges: Edges | None = None

    def begin(self, trainer: Trainer, edges: Edges) -> None:
        """A life begins."""
        self.trainer, self.edges = trainer, edges

    def end(self, now_s: float) -> None:
        """The life is over, however it came."""
        if self.incidents is not None:
            self.told += self.incidents.take()
            self.incidents = None

    def timed(self, name: str, start_s: float, end_s: float) -> None:
        """The trainer did `name`: a stage, the wait for a batch (`gen`), a publication."""

    # --- what sight tells

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_s = 0.0 if self.trainer is None else self.trainer.world.now()
        self.steps.append({"step": float(step), "simulated_s": now_s, **metrics})
        if self.measured is not None and "eval/version" in metrics:
            self.measured(step, int(metrics["eval/version"]))

    def keep_incidents(self, lines: Sequence[Line]) -> None:
        self.told += lines

    def append(self, record: Record) -> None:
        self.records.append(record)

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """The log has them already."""

    def groups(self, counts: Mapping[str, float]) -> None:
        """Nobody watches."""


class WatchedSight(Sight):
    """A Sight whose watcher hears of each stage as it ends."""

    def __init__(self, watcher: Watcher, lineage: Lineage, incidents: Incidents, world: World, *, patience: int) -> None:
        super().__init__(
            RunFolder(path=watcher.folder),
            watcher,
            watcher,
            watcher,
            dict,
            lineage,
            world,
            patience=patience,
            step=0,
            incidents=incidents,
            keep_incidents=watcher.keep_incidents,
        )
        self._watcher = watcher
        watcher.incidents = incidents

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        start_s = self._world.now()
        try:
            with super().timing(name):
                yield
        finally:
            self._watcher.timed(name, start_s, self._world.now())
