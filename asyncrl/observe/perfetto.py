"""A record of the trace in the Trace Event Format, for ui.perfetto.dev and chrome://tracing.

trace_file -> [perfetto] -> {"traceEvents": [...]}

A group is a process and a session a track (thread) in it, with its turns, tool calls and reward; the trainer is a process of its
own with the stages of the step. Times are microseconds since the first event. Spans of a track must nest, so tool calls of one turn
that overlap get tracks of their own below their session's.
Source: "Trace Event Format" (Google, 2016): complete events (`X`) and metadata events (`M`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from asyncrl.observe.trace_file import FieldLine, GroupRow, Record, SpanLine
from asyncrl.ports import Json, SpanKind

_TRAINER = 1
"""Process number of the trainer; the groups follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """tracks: name -> spans that nest; the order is that of the thread numbers, from 1."""

    name: str
    tracks: dict[str, list[SpanLine]] = field(default_factory=dict)


def trace_events(record: Record, groups: Sequence[GroupRow]) -> dict[str, Json]:
    """The object that Perfetto opens."""
    spans = [line for line in record.lines if isinstance(line, SpanLine)]
    trainer = _Process(name="trainer", tracks={"stages": [line for line in spans if line.uid is None]})
    processes = [trainer, *(_group_process(record, group, spans) for group in groups)]
    shown = [line for process in processes for track in process.tracks.values() for line in track]
    origin_s = min((line.start_s for line in shown), default=0.0)
    columns = _columns_by_stage(record, groups)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"step": record.head.step, "wall_time_at_0": record.head.wall_time + origin_s},
        "traceEvents": [
            event for pid, process in enumerate(processes, _TRAINER) for event in _events(pid, process, origin_s, columns)
        ],
    }


def _group_process(record: Record, group: GroupRow, spans: Iterable[SpanLine]) -> _Process:
    process = _Process(name=f"group {group.uid} ({group.status} in step {record.head.step})")
    for line in spans:
        if line.uid == group.uid:
            name = "group" if line.session_id is None else f"session {line.session_id}"
            process.tracks.setdefault(_free_track(process, name, line), []).append(line)
    return process


def _free_track(process: _Process, name: str, line: SpanLine) -> str:
    """The first of `session 0`, `session 0, also 2`, ... in which no span of its kind is under way: only tools overlap."""
    tracks, number = process.tracks, 1
    track = name
    while any(other.span == line.span and line.start_s < other.end_s for other in tracks.get(track, ())):
        number += 1
        track = f"{name}, also {number}"
    return track


def _columns_by_stage(record: Record, groups: Sequence[GroupRow]) -> dict[str, dict[str, list[str]]]:
    """stage -> access -> fields: what a stage's event says when it is clicked."""
    uids, found = {group.uid for group in groups}, dict[str, dict[str, list[str]]]()
    for line in record.lines:
        if isinstance(line, FieldLine) and line.uid in uids:
            fields = found.setdefault(line.stage, {}).setdefault(line.access, [])
            if line.field not in fields:
                fields.append(line.field)
    return found


def _events(pid: int, process: _Process, origin_s: float, columns: dict[str, dict[str, list[str]]]) -> list[dict[str, Json]]:
    events = [_metadata("process_name", pid, 0, process.name)]
    for tid, (name, lines) in enumerate(process.tracks.items(), 1):
        events.append(_metadata("thread_name", pid, tid, name))
        events += [_complete(pid, tid, line, origin_s, columns) for line in lines]
    return events


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Json]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(pid: int, tid: int, line: SpanLine, origin_s: float, columns: dict[str, dict[str, list[str]]]) -> dict[str, Json]:
    told = columns.get(line.name, {}) if line.span is SpanKind.STAGE else {}
    start, end = (round((seconds - origin_s) * 1e6) for seconds in (line.start_s, line.end_s))
    return {
        "ph": "X",
        "name": line.name,
        "cat": str(line.span),
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": end - start,
        "args": {"outcome": line.outcome, **line.facts, **told},
    }
