"""Watcher: what the controller tells of itself, kept in memory; and where oracles look at it.

sight -> [Watcher] -> report, oracles
"""

from collections.abc import Mapping
from pathlib import Path

from asyncrl.observe.trace_file import Record
from asyncrl.trainer import Trainer
from asyncrl.wiring import Edges


class Watcher:
    """`steps`: the numbers of each step, as metrics.jsonl would have them, with the second of its end; `records`: traced groups;
    `said`: lines for a person."""

    is_live = False
    folder = Path("simulated")

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.records: list[Record] = []
        self.said: list[str] = []
        self.trainer: Trainer | None = None
        self.edges: Edges | None = None

    def begin(self, trainer: Trainer, edges: Edges) -> None:
        """A life begins."""
        self.trainer, self.edges = trainer, edges

    # --- what sight tells

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_s = 0.0 if self.trainer is None else self.trainer.world.now()
        self.steps.append({"step": float(step), "simulated_s": now_s, **metrics})

    def append(self, record: Record) -> None:
        self.records.append(record)

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """The log has them already."""

    def groups(self, counts: Mapping[str, float]) -> None:
        """Nobody watches."""
