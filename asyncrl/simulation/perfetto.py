"""trace.json of a simulated run, for ui.perfetto.dev: trainer, engines, tools and groups, and a track for each of some sessions.

Activity -> [perfetto] -> {"traceEvents": [...]}

Times are virtual microseconds from the begin of the run. Stages and sessions are spans (`X`), which do not overlap on a track;
what many share, such as slots and tools, are counters (`C`), so the file stays small whatever the run. Source of the format: "Trace
Event Format" (Google, 2016).
"""

from collections.abc import Iterator

import numpy as np

from asyncrl.ports import Json
from asyncrl.simulation.activity import ENGINE, TRAINER, WAIT, Activity, Intervals
from asyncrl.simulation.grid import Grid, Times, cut_columns, grid_of
from asyncrl.simulation.report import run_end_s
from asyncrl.simulation.run import Outcome

MAX_ENGINES = 32
"""Engines with a counter each; of more there is the sum alone."""
MAX_POINTS = 4000
"""Of a counter: where it has more changes, every k-th is shown."""
MAX_STAGES = 20_000
"""Spans of the trainer: the first ones, which `otherData.trainer_until_s` says."""
TRAINER_PID, ENGINES_PID, SESSIONS_PID, GROUPS_PID, FIRST_TRACKS_PID = 1, 2, 3, 4, 5


def trace_of(outcome: Outcome, activity: Activity) -> dict[str, Json]:
    """The object that Perfetto opens; its events are in the order of time."""
    end_s = run_end_s(outcome, activity)
    grid = grid_of(activity, end_s)
    spans = sorted(_trainer(activity, end_s), key=lambda span: (span[0], span[1]))
    until_s = spans[MAX_STAGES][0] if len(spans) > MAX_STAGES else end_s
    names = [_named("process_name", pid, 0, name) for pid, name in _PROCESSES.items()]
    names.append(_named("thread_name", TRAINER_PID, 1, "stages"))
    events = [_span(name, TRAINER_PID, 1, start, end) for start, end, name in spans[:MAX_STAGES]]
    for name, pid, times, values in _counters(activity, grid, end_s):
        events += _counter(name, pid, times, values)
    for kind, event in _sessions(activity, end_s):
        (names if kind == "M" else events).append(event)
    events.sort(key=lambda event: (event["ts"], event["pid"], event["tid"]))
    told = {"seed": outcome.seed, "virtual_s": end_s, "trainer_until_s": until_s, "sessions_shown": len(activity.tracks)}
    return {"displayTimeUnit": "ms", "otherData": told, "traceEvents": [*names, *events]}


_PROCESSES = {TRAINER_PID: "trainer", ENGINES_PID: "engines", SESSIONS_PID: "sessions", GROUPS_PID: "groups"}


def _trainer(activity: Activity, end_s: float) -> Iterator[tuple[float, float, str]]:
    """Stages, and checkpoints, which lie between them."""
    saves = activity.work.get((TRAINER, "save"), Intervals())
    for name, each in [*activity.stages.items(), ("save", saves)]:
        for start, end in zip(each.starts, each.ends, strict=True):
            yield min(start, end_s), min(end, end_s), "wait for a batch" if name == WAIT else name


def _counters(activity: Activity, grid: Grid, end_s: float) -> "Iterator[tuple[str, int, Times, np.ndarray[tuple[int], np.dtype]]]":
    edges = grid.edges[:-1]
    yield "busy slots", ENGINES_PID, edges, grid.rows
    engines = [(who, each) for (who, what), each in activity.work.items() if who.startswith(ENGINE) and what == "row"]
    for who, each in sorted(engines, key=lambda pair: int(pair[0].split()[-1])) if len(engines) <= MAX_ENGINES else ():
        starts, ends = (np.sort(column) for column in cut_columns([each], end_s))
        times = np.unique(np.concatenate([starts, ends]))
        yield who, ENGINES_PID, times, np.searchsorted(starts, times, side="right") - np.searchsorted(ends, times, side="right")
    for state, counts in grid.at.items():
        yield state, SESSIONS_PID, edges, counts
    for status, counts in grid.groups.items():
        yield status, GROUPS_PID, edges, counts


def _counter(name: str, pid: int, times: Times, values: "np.ndarray[tuple[int], np.dtype]") -> list[dict[str, Json]]:
    """Its changes; of too many every k-th moment, as it is then."""
    changed = np.flatnonzero(np.diff(values, prepend=-1))
    shown = changed[:: -(-len(changed) // MAX_POINTS) or 1]
    return [
        {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(float(times[i])), "args": {name: int(values[i])}} for i in shown
    ]


def _sessions(activity: Activity, end_s: float) -> Iterator[tuple[str, dict[str, Json]]]:
    """A process a group, a track a session: what it was at, one after the other."""
    pids: dict[str, int] = {}
    for session in activity.tracks:
        if session.uid not in pids:
            pids[session.uid] = FIRST_TRACKS_PID + len(pids)
            yield "M", _named("process_name", pids[session.uid], 0, f"group {session.uid}")
        pid, tid = pids[session.uid], session.number + 1
        yield "M", _named("thread_name", pid, tid, f"session {session.number}")
        for state, start, end in session.segments:
            yield "X", _span(state, pid, tid, start, min(end, end_s))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _span(name: str, pid: int, tid: int, start: float, end: float) -> dict[str, Json]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": _us(start), "dur": _us(end) - _us(start), "args": {}}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Json]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
