"""The time of a simulated run, cut at every moment at which anything changes, and what it went to.

Activity -> [grid] -> report, timeline

Between two moments of the grid nothing changes, and in each stretch every slot of an engine and every second of the trainer has
exactly one name: so busy time and idle time by cause add up to all of the time.

Which cause a free slot has: the first in this order that still has sessions to fill slots with: those that queue at another engine,
whose call failed, at a tool, at a reward, in the controller, and those that might begin. What is left has no session to run: the
staleness bound admits none before the next publication. Then it is what the trainer is at: it waits for the last sessions of its
batch, or it is at a stage.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.config.simulation import Scenario
from asyncrl.simulation.activity import ENGINE, TRAINER, WAIT, Activity, Intervals, Wait
from asyncrl.simulation.session_times import CONTROLLER, LOST, QUEUE, REWARD, TOOL_PREFIX

Times = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

BETWEEN, RESTART = "between stages", "restart"
"""What the trainer is at when it is at no stage: its store and its journal; and its process is not there."""
BEGINNING, SETTLING = "begin of sessions", "end of sessions"
LAST_SESSIONS = "last sessions of the batch"
DOWN = "engine down"
FREE = 2**-20
"""Slots below which a share of one is the rounding of a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """`edges`: [G + 1] moments in order, from 0 to the end. The rest holds from edges[i] to edges[i + 1], each [G].

    rows: running in all engines; down: engines that are dead; at: state -> sessions in it; room: sessions that might begin;
    trainer: number of its stage in `stages`; groups: status -> groups.
    """

    edges: Times
    rows: Counts
    down: Counts
    at: dict[str, Counts]
    room: Counts
    trainer: Counts
    stages: tuple[str, ...]
    groups: dict[str, Counts]

    @property
    def seconds(self) -> Times:
        seconds: Times = np.diff(self.edges)
        return seconds

    def is_at(self, stage: str) -> npt.NDArray[np.bool_]:
        """Where the trainer is at `stage`."""
        flags: npt.NDArray[np.bool_] = self.trainer == self.stages.index(stage)
        return flags

    def tools(self) -> dict[str, Counts]:
        return {name: counts for name, counts in self.at.items() if name.startswith(TOOL_PREFIX)}


def grid_of(activity: Activity, end_s: float) -> Grid:
    """`end_s`: when the run was over; what a crash took along was under way until its life's end."""
    columns = activity.sessions.segments
    states = np.frombuffer(columns.states, dtype=np.uint16) if columns.states else np.zeros(0, np.uint16)
    starts, ends = (_cut(np.array(each), end_s) for each in (columns.starts, columns.ends))
    of_engines = [intervals for (who, what), intervals in activity.work.items() if who.startswith(ENGINE) and what == "row"]
    downs = [intervals for (who, what), intervals in activity.work.items() if who.startswith(ENGINE) and what == "down"]
    row_starts, row_ends = cut_columns(of_engines, end_s)
    down_starts, down_ends = cut_columns(downs, end_s)
    spans = [*_trainer_spans(activity, end_s)]
    moments = [np.array([0.0, end_s]), starts, ends, row_starts, row_ends, down_starts, down_ends]
    moments += [np.array([moment for _, *pair in spans for moment in pair]), _cut(np.array(activity.points.times), end_s)]
    edges = np.unique(np.concatenate(moments))
    stages = tuple(dict.fromkeys([BETWEEN, RESTART, WAIT, *(name for name, _, _ in spans)]))
    points = activity.points
    return Grid(
        edges=edges,
        rows=_count(edges, row_starts, row_ends),
        down=_count(edges, down_starts, down_ends),
        at={name: _count(edges, starts[states == n], ends[states == n]) for n, name in enumerate(columns.names)},
        room=_held(edges, points.times, points.room),
        trainer=_painted(edges, spans, stages),
        stages=stages,
        groups={name: _held(edges, points.times, getattr(points, name)) for name in ("pending", "running", "finished", "training")},
    )


def _cut(moments: Times, end_s: float) -> Times:
    cut: Times = np.minimum(moments, end_s)
    return cut


def cut_columns(found: Iterable[Intervals], end_s: float) -> tuple[Times, Times]:
    """Begins and ends of all these intervals, none after `end_s`."""
    parts = [(np.array(each.starts), np.array(each.ends)) for each in found]
    starts, ends = (np.concatenate([np.zeros(0), *(part[side] for part in parts)]) for side in (0, 1))
    return _cut(starts, end_s), _cut(ends, end_s)


def _count(edges: Times, starts: Times, ends: Times) -> Counts:
    """[G]: intervals that hold from each edge to the next."""
    begun = np.searchsorted(np.sort(starts), edges[:-1], side="right")
    counts: Counts = begun - np.searchsorted(np.sort(ends), edges[:-1], side="right")
    return counts


def _held(edges: Times, times: Sequence[float], values: Sequence[int]) -> Counts:
    """[G]: the value of the newest point up to each edge; 0 before the first."""
    column = np.concatenate([[0], np.array(values, dtype=np.int64)])
    held: Counts = column[np.searchsorted(np.array(times), edges[:-1], side="right")]
    return held


def _trainer_spans(activity: Activity, end_s: float) -> Iterator[tuple[str, float, float]]:
    """(stage, begin, end), each over what came before: the actor's work, for steps that were cut; stages; checkpoints; restarts."""
    work = {what: each for (who, what), each in activity.work.items() if who == TRAINER}
    saves = {name: each for name, each in work.items() if name == "save"}
    for found in ({name: each for name, each in work.items() if name not in saves}, activity.stages, saves):
        for name, each in found.items():
            for start, end in zip(each.starts, each.ends, strict=True):
                yield name, min(start, end_s), min(end, end_s)
    over = [end for _, end in activity.lives]
    nexts = [*(begin for begin, _ in activity.lives[1:]), end_s]
    for end, begin in zip(over, nexts, strict=True):
        if begin > end:
            yield RESTART, end, begin


def _painted(edges: Times, spans: list[tuple[str, float, float]], stages: tuple[str, ...]) -> Counts:
    painted = np.zeros(len(edges) - 1, dtype=np.int64)
    for name, start, end in spans:
        painted[np.searchsorted(edges, start) : np.searchsorted(edges, end)] = stages.index(name)
    return painted


# --- what it went to --------------------------------------------------------------------------------------------------------------


def slot_seconds(grid: Grid, scenario: Scenario) -> tuple[float, dict[str, float]]:
    """Busy, and idle by cause: together engines x slots x the time of the run."""
    slots = scenario.rollout.max_num_seqs
    seconds = grid.seconds
    free = (scenario.sim.engine.count * slots - grid.rows).astype(np.float64)
    idle: dict[str, float] = {}

    def take(name: str, sessions: Times | Counts) -> None:
        taken = np.minimum(free, sessions)
        idle[name] = idle.get(name, 0.0) + float(taken @ seconds)
        np.subtract(free, taken, out=free)

    take(RESTART, np.where(grid.is_at(RESTART), free, 0.0))
    take(DOWN, grid.down * slots)
    take(QUEUE, grid.at[QUEUE])
    take(LOST, grid.at[LOST])
    _take_tools(grid, free, take)
    for state, sessions in ((REWARD, grid.at[REWARD]), (CONTROLLER, grid.at[CONTROLLER]), (BEGINNING, grid.room)):
        take(state, sessions)
    for stage in grid.stages:
        take(LAST_SESSIONS if stage == WAIT else f"trainer: {stage}", np.where(grid.is_at(stage), free, 0.0))
    return float(grid.rows @ seconds), {name: value for name, value in idle.items() if value > FREE}


def _take_tools(grid: Grid, free: Times, take: Callable[[str, Times], None]) -> None:
    """Each tool has its share of the slots that all of them keep free."""
    tools = grid.tools()
    total = sum(tools.values(), np.zeros(len(free), np.int64))
    share = np.minimum(free, total) / np.maximum(total, 1)
    for name, sessions in tools.items():
        take(name, sessions * share)


def trainer_seconds(grid: Grid, waits: Iterable[Wait]) -> tuple[dict[str, float], dict[str, float]]:
    """Busy by stage, and idle by cause: together the time of the run. The wait for a batch is what its last session was at."""
    seconds = grid.seconds
    by_stage = {stage: float(seconds[grid.is_at(stage)].sum()) for stage in grid.stages}
    idle = {RESTART: by_stage.pop(RESTART), BETWEEN: by_stage.pop(BETWEEN)}
    waited = by_stage.pop(WAIT)
    for wait in waits:
        for name, value in wait_causes(wait).items():
            idle[name] = idle.get(name, 0.0) + value
            waited -= value
    idle["no batch came"] = waited
    return {n: v for n, v in by_stage.items() if v > 0}, {name: value for name, value in idle.items() if abs(value) > 1e-9}


def wait_causes(wait: Wait) -> dict[str, float]:
    """What a batch's last session was at while the trainer waited: together the wait. {} when no batch came."""
    session = wait.last
    if session is None:
        return {}
    causes: dict[str, float] = {}
    at = wait.start_s
    for state, start, end in session.segments:
        begin, until = max(start, at), min(end, wait.end_s)
        if begin > at:
            causes[BEGINNING] = causes.get(BEGINNING, 0.0) + begin - at
        if until > begin:
            causes[state] = causes.get(state, 0.0) + until - begin
            at = until
    if wait.end_s > at:
        causes[SETTLING] = causes.get(SETTLING, 0.0) + wait.end_s - at
    return causes
