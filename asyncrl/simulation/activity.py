"""Activity: who was busy from when to when, as the edges tell it, and what share of the time that was.

edges -> seams -> [Activity] -> report, timeline, perfetto

Everything is computed from intervals that really happened, on one grid: the moments at which anything begins or ends. Between two
of them nothing changes, so busy time and idle time by cause add up to all of the time.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

TRAINER, TOOL, REWARD, ENGINE = "trainer", "tool", "reward", "engine"


@dataclass(slots=True)
class Intervals:
    """Begins and ends of one kind of work, in virtual seconds."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def add(self, start_s: float, end_s: float) -> None:
        self.starts.append(start_s)
        self.ends.append(end_s)

    def until(self, end_s: float) -> "tuple[Times, Times]":
        """Sorted begins and sorted ends, cut at `end_s`: work that a crash took along was under way until then."""
        starts, ends = np.minimum(np.array(self.starts), end_s), np.minimum(np.array(self.ends), end_s)
        return np.sort(starts), np.sort(ends)


class Activity:
    """An Observer. `work`: (who, what) -> intervals; engines as `("engine 3", "row")`. `lengths`: session -> ids it was given."""

    def __init__(self) -> None:
        self.work: dict[tuple[str, str], Intervals] = {}
        self.lengths: dict[str, int] = {}

    def busy(self, who: str, what: str, start_s: float, end_s: float) -> None:
        intervals = self.work.get((who, what))
        if intervals is None:
            intervals = self.work[who, what] = Intervals()
        intervals.add(start_s, end_s)

    def token(self, request_id: str, ids: list[int]) -> None:
        session = "_".join(request_id.split("_")[:2])
        self.lengths[session] = self.lengths.get(session, 0) + len(ids)

    def durations(self, who: str, what: str) -> Times:
        """Seconds of each piece of work, in the order of their ends."""
        found = self.work.get((who, what), Intervals())
        seconds: Times = np.array(found.ends) - np.array(found.starts)
        return seconds

    def kinds(self, who: str) -> list[str]:
        """What `who` did, in the order in which it came."""
        return [what for name, what in self.work if name == who]

    @property
    def engines(self) -> list[str]:
        return sorted((who for who, _ in self.work if who.startswith(ENGINE)), key=lambda name: int(name.split()[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """`edges`: [G + 1] moments in order, from 0 to the end of the run. The counts hold from edges[i] to edges[i + 1], each [G].

    rows: running in all engines; tools, rewards: under way; trainer: what -> 0 or more.
    """

    edges: Times
    rows: Counts
    tools: Counts
    rewards: Counts
    trainer: dict[str, Counts]

    @property
    def seconds(self) -> Times:
        seconds: Times = np.diff(self.edges)
        return seconds

    @property
    def trainer_busy(self) -> npt.NDArray[np.bool_]:
        return np.any([counts > 0 for counts in self.trainer.values()], axis=0) if self.trainer else np.zeros(len(self.rows), bool)


def grid_of(activity: Activity, end_s: float) -> Grid:
    """`end_s`: when the run was over."""
    parts = {name: intervals.until(end_s) for name, intervals in activity.work.items()}
    edges = np.unique(np.concatenate([[0.0, end_s], *(moments for pair in parts.values() for moments in pair)]))

    def counted(pairs: "list[tuple[Times, Times]]") -> Counts:
        total = np.zeros(len(edges) - 1, dtype=np.int64)
        for starts, ends in pairs:
            total += np.searchsorted(starts, edges[:-1], side="right") - np.searchsorted(ends, edges[:-1], side="right")
        return total

    return Grid(
        edges=edges,
        rows=counted([pair for (who, _), pair in parts.items() if who.startswith(ENGINE)]),
        tools=counted([pair for (who, _), pair in parts.items() if who == TOOL]),
        rewards=counted([pair for (who, _), pair in parts.items() if who == REWARD]),
        trainer={what: counted([pair]) for (who, what), pair in parts.items() if who == TRAINER},
    )


CAUSES = ("generation", "tools", "rewards", "trainer", "nothing")
"""What an idle resource waits for, the first that is under way: for the trainer's work only engines wait."""


def idle_causes(grid: Grid) -> dict[str, npt.NDArray[np.bool_]]:
    """cause -> [G]: whether it is the one in each stretch. Exactly one is."""
    found = np.zeros(len(grid.rows), bool)
    under_way = {
        "trainer": grid.trainer_busy,
        "generation": grid.rows > 0,
        "tools": grid.tools > 0,
        "rewards": grid.rewards > 0,
        "nothing": np.ones(len(grid.rows), bool),
    }
    causes = {}
    for cause, flags in under_way.items():
        causes[cause] = flags & ~found
        found |= flags
    return causes
