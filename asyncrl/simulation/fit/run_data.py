"""What a real run has left of itself, as far as a scenario can be made of it: whole steps, and the sessions of its traced groups.

run folder -> [run_data] -> measures. Reads config.toml, metrics.jsonl and trace.jsonl, and nothing that the run itself would need.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from asyncrl.config import TrainRun, load_run
from asyncrl.errors import ConfigError, DataError, RunFolderError
from asyncrl.observe.run_folder import RunFolder, existing_file
from asyncrl.observe.spans import OK
from asyncrl.observe.trace_file import Record, SpanLine, TraceFile
from asyncrl.ports import Json, SpanKind

LEAST_STEPS = 2
"""Steps that follow another step: a fit compares neighbours, and leaves the first step out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step between two lines of metrics.jsonl. wall_s: from line to line; None where something that is no step lies between.
    rates: how much each counter of the engine rose."""

    number: int
    wall_s: float | None
    numbers: dict[str, float]
    rates: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of a session; seconds of all its generate calls."""

    start_s: float
    end_s: float
    num_prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call that came to an end by itself, or at its deadline."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A traced session that went well. reward_s: from when to when it was scored; None: it brought its score."""

    uid: str
    turns: tuple[Turn, ...]
    calls: tuple[Call, ...]
    reward_s: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """borders_s: step -> seconds between the end of its last stage and the publication of its weights: its rows are retired then.
    gaps_s: step -> seconds between its publication and the wait for the next batch: its numbers are written then, and a checkpoint
    where one is due."""

    folder: Path
    run: TrainRun
    steps: tuple[Step, ...]
    last_step: int
    sessions: tuple[Session, ...]
    num_failed: int
    borders_s: dict[int, float]
    gaps_s: dict[int, float]
    num_ranks: int


def read_run(folder: Path) -> RunData:
    """Raises RunFolderError or DataError in one line when the folder holds no training run, or not enough of one."""
    files = RunFolder(path=folder)
    run = _config_of(existing_file(folder, files.config.name, "it is not the folder of a run"))
    lines = _step_lines(existing_file(folder, files.metrics.name, "no step of its run has ended"))
    steps = tuple(step for before, line in pairwise(lines) if (step := _step_of(before, line)) is not None)
    if len(steps) < LEAST_STEPS:
        raise RunFolderError(f"{files.metrics} has {len(lines)} steps; a fit needs at least {LEAST_STEPS + 1}, one after the other")
    if "decode_s" not in steps[-1].rates:
        raise RunFolderError(f"{files.metrics} has no engine/decode_s: the engine of this run did not count its work")
    set_key = "set trainer.trace_groups = 1 or more, the data.train_batch_size at most, and run it again"
    trace = TraceFile(existing_file(folder, files.trace.name, f"its run had trainer.trace_groups = 0; {set_key}"))
    used = {step.number for step in steps}
    records = [trace.read(head.step) for head in trace.heads if head.step in used]
    found = [session for record in records for session in _sessions_of(record)]
    sessions = tuple(session for session in found if session is not None)
    if not sessions:
        raise RunFolderError(f"{files.trace} has no session that went well in steps {min(used)} to {max(used)}; {set_key}")
    return RunData(
        folder=folder,
        run=run,
        steps=steps,
        last_step=int(lines[-1]["step"]),
        sessions=sessions,
        num_failed=len(found) - len(sessions),
        borders_s=dict(border for record in records if (border := _border_of(record)) is not None),
        gaps_s=dict(gap for before, record in pairwise(records) if (gap := _gap_between(before, record)) is not None),
        num_ranks=max(record.head.actor.world for record in records),
    )


def _config_of(path: Path) -> TrainRun:
    try:
        return load_run(TrainRun, path)
    except ConfigError as error:
        raise RunFolderError(f"it takes the folder of a training run, as this version of asyncrl writes it: {error}") from error


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------------------


def _step_lines(path: Path) -> list[dict[str, Json]]:
    """In the order of the file, a step that was done again after a restart twice: each time was measured. A line of an evaluation
    stays, as `{}`: what is between its neighbours is no step alone."""
    lines: list[dict[str, Json]] = []
    for number, text in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not text.endswith(b"\n"):
            break
        try:
            line = json.loads(text)
            lines.append({"step": int(line["step"]), **line} if "timing_s/gen" in line else {})
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}:{number}: not a line of metrics ({error})") from error
    return _without_evaluations(lines)


def _without_evaluations(lines: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """An evaluation is told to the step after it."""
    steps: list[dict[str, Json]] = []
    follows = False
    for line in lines:
        if line:
            steps.append({**line, "follows_evaluation": follows})
        follows = not line
    return steps


def _step_of(before: dict[str, Json], line: dict[str, Json]) -> Step | None:
    """None where the run was taken up again between the two."""
    is_of_one_life = line.get("incarnation", 0) == before.get("incarnation", 0)
    is_of_one_life = is_of_one_life and line.get("engine/decode_s", 0.0) >= before.get("engine/decode_s", 0.0)
    if not is_of_one_life or line["step"] != before["step"] + 1:
        return None
    numbers = {name: float(value) for name, value in line.items() if isinstance(value, (int, float))}
    rates = {
        name.removeprefix("engine/"): value - float(before[name])
        for name, value in numbers.items()
        if name.startswith("engine/") and isinstance(before.get(name), (int, float))
    }
    wall_s = None if line["follows_evaluation"] else numbers["wall_time"] - float(before["wall_time"])
    return Step(number=line["step"], wall_s=wall_s, numbers=numbers, rates=rates)


# --- trace.jsonl ------------------------------------------------------------------------------------------------------------------


def _sessions_of(record: Record) -> list[Session | None]:
    """Of the trained groups; None: it failed, or was tried again."""
    trained = {group.uid for group in record.head.groups if group.status == "trained"}
    found: dict[tuple[str, int], list[list[SpanLine]]] = {}
    for line in record.lines:
        if isinstance(line, SpanLine) and line.uid in trained and line.session_id is not None:
            tries = found.setdefault((line.uid, line.session_id), [])
            if line.span is SpanKind.SESSION:
                tries.append([])
            if tries:
                tries[-1].append(line)
    return [_session(uid, spans) for (uid, _), tries in found.items() for spans in tries]


def _session(uid: str, spans: Sequence[SpanLine]) -> Session | None:
    turns = _turns([span for span in spans if span.span is SpanKind.TURN])
    if spans[0].outcome != OK or not turns:
        return None
    rewards = [(span.start_s, span.end_s) for span in spans if span.span is SpanKind.REWARD]
    calls = [
        Call(name=span.name, start_s=span.start_s, end_s=span.end_s)
        for span in spans
        if span.span is SpanKind.TOOL and span.outcome in (OK, "error", "timeout")
    ]
    return Session(uid=uid, turns=turns, calls=tuple(calls), reward_s=rewards[0] if rewards else None)


def _turns(spans: Sequence[SpanLine]) -> tuple[Turn, ...]:
    """A turn that goes on after a close tag in an argument has several calls."""
    by_name: dict[str, list[SpanLine]] = {}
    for span in spans:
        if "tokens" in span.facts:
            by_name.setdefault(span.name, []).append(span)
    return tuple(
        Turn(
            start_s=parts[0].start_s,
            end_s=parts[-1].end_s,
            num_prompt_tokens=int(parts[0].facts["prompt_tokens"]),
            num_tokens=sum(int(part.facts["tokens"]) for part in parts),
        )
        for parts in by_name.values()
    )


def _border_of(record: Record) -> tuple[int, float] | None:
    stages = [line for line in record.lines if isinstance(line, SpanLine) and line.uid is None]
    published = [span.start_s for span in stages if span.name == "publish"]
    ends = [span.end_s for span in stages if published and span.end_s <= published[0]]
    return (record.head.step, published[0] - max(ends)) if ends else None


def _gap_between(before: Record, record: Record) -> tuple[int, float] | None:
    published = [line.end_s for line in before.lines if isinstance(line, SpanLine) and line.uid is None and line.name == "publish"]
    waits = [line.start_s for line in record.lines if isinstance(line, SpanLine) and line.uid is None and line.name == "gen"]
    is_next = record.head.step == before.head.step + 1
    return (before.head.step, waits[0] - published[-1]) if is_next and published and waits else None
