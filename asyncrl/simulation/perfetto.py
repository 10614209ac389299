"""trace.json of a simulated run, for ui.perfetto.dev: the trainer, the engines and the tools, and a track for each traced session.

Activity, watcher's records -> [perfetto] -> {"traceEvents": [...]}

Times are virtual microseconds. Work of one kind that overlaps gets tracks of its own, as slots have. Source of the format: "Trace
Event Format" (Google, 2016).
"""

import heapq
from collections.abc import Iterator

from asyncrl.observe.trace_file import SpanLine
from asyncrl.ports import Json
from asyncrl.simulation.activity import Activity
from asyncrl.simulation.run import Outcome

MAX_EVENTS = 200_000
"""A browser takes this many; a longer run is cut, which `otherData.cut_at_s` says."""


def trace_of(outcome: Outcome, activity: Activity) -> dict[str, Json]:
    """The object that Perfetto opens."""
    events: list[dict[str, Json]] = []
    processes = [*_work(activity), *_sessions(outcome)]
    shown = sorted(((start, end, number) for number, (_, _, start, end, _) in enumerate(processes)))[:MAX_EVENTS]
    cut_at_s = shown[-1][0] if len(shown) < len(processes) else None
    tracks: dict[str, dict[str, list[tuple[float, int]]]] = {}
    numbers: dict[tuple[str, str, int], tuple[int, int]] = {}
    for start, end, number in shown:
        process, track, _, _, name = processes[number]
        lane = _free_lane(tracks.setdefault(process, {}).setdefault(track, []), start, end)
        place = (process, track, lane)
        if place not in numbers:
            pid = list(tracks).index(process) + 1
            numbers[place] = pid, len(numbers) + 1
            events.append(_named("process_name", pid, 0, process))
            events.append(_named("thread_name", *numbers[place], track if lane == 0 else f"{track}, also {lane + 1}"))
        pid, tid = numbers[place]
        ts = round(start * 1e6)
        events.append({"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": round(end * 1e6) - ts})
    return {
        "displayTimeUnit": "ms",
        "otherData": {"seed": outcome.seed, "virtual_s": outcome.seconds, "cut_at_s": cut_at_s},
        "traceEvents": events,
    }


Piece = tuple[str, str, float, float, str]
"""(process, track, start, end, name)."""


def _work(activity: Activity) -> Iterator[Piece]:
    for (who, what), intervals in activity.work.items():
        process, track = (who, what) if " " not in who else (who.split()[0], who)
        for start, end in zip(intervals.starts, intervals.ends, strict=True):
            yield process, track, start, end, what


def _sessions(outcome: Outcome) -> Iterator[Piece]:
    """Of traced groups: their spans, in seconds since the life began, which its record says."""
    for record in outcome.watcher.records:
        origin_s = record.head.wall_time
        for line in record.lines:
            if isinstance(line, SpanLine) and line.uid is not None and line.session_id is not None:
                yield f"group {line.uid}", f"session {line.session_id}", origin_s + line.start_s, origin_s + line.end_s, line.name


def _free_lane(lanes: list[tuple[float, int]], start: float, end: float) -> int:
    """The lane that is free for the longest; lanes: heap of (until when it is taken, number)."""
    if lanes and lanes[0][0] <= start:
        _, lane = heapq.heappop(lanes)
    else:
        lane = len(lanes)
    heapq.heappush(lanes, (end, lane))
    return lane


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Json]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
