"""`asyncrl trace`: which groups of a run's trace are shown, in which format. Loads no torch.

cli -> [trace_command] -> trace_file, trace_view, perfetto
"""

import io
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from rich.console import Console

from asyncrl.errors import DataError
from asyncrl.observe.perfetto import trace_events
from asyncrl.observe.run_folder import RunFolder
from asyncrl.observe.trace_file import GroupRow, Record, StepLine, TraceFile
from asyncrl.observe.trace_view import field_objects, heading, span_objects, tables
from asyncrl.wording import names_shown, nearest


class TraceFormat(StrEnum):
    """What the trace is shown as."""

    TABLE = "table"
    JSONL = "jsonl"
    PERFETTO = "perfetto"


def render_trace(folder: Path, *, group: str | None, step: int | None, form: TraceFormat, width: int | None = None) -> str:
    """The groups asked for: `group` in the newest step that has it, or in `step`; all groups of `step`; else the newest one.

    width: of a table, in characters; None: as wide as its columns need, for a file or a pager.
    Raises DataError, which names what is there, for a folder, step or group that is not.
    """
    file = _open(folder)
    head = _head(file, group, step)
    groups = [row for row in head.groups if group in (None, row.uid)]
    if step is None:
        groups = [max(groups, key=lambda row: (row.status == "trained", row.number))]
    record = file.read(head.step)
    if form is TraceFormat.TABLE:
        return _table(record, groups, width)
    return _jsonl(record, groups) if form is TraceFormat.JSONL else json.dumps(trace_events(record, groups)) + "\n"


def write_output(path: Path, text: str) -> None:
    """Raises DataError when the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"--output {path}: cannot be written ({error})") from error


def _open(folder: Path) -> TraceFile:
    run = RunFolder(path=folder)
    if not folder.is_dir():
        beside = sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) if folder.parent.is_dir() else []
        raise DataError(f"{folder}: no such run folder; in {folder.parent}: {names_shown(beside)}{nearest(folder.name, beside)}")
    if not run.trace.is_file():
        raise DataError(f"{folder} has no {run.trace.name}: its run had trainer.trace_groups = 0, or ended before a step did")
    file = TraceFile(run.trace)
    if not file.heads:
        raise DataError(f"{run.trace} has no whole step yet")
    return file


def _head(file: TraceFile, group: str | None, step: int | None) -> StepLine:
    steps = [head.step for head in file.heads]
    if step is not None and step not in steps:
        raise DataError(f"{file.path} has no step {step}; it has {_steps_text(steps)}")
    found = [head for head in file.heads if step in (None, head.step) and _has(head, group)]
    if found:
        return found[-1]
    there = {row.uid: head.step for head in file.heads for row in head.groups if step in (None, head.step)}
    listed = ", ".join(f"{uid} (step {at})" for uid, at in list(there.items())[-_LISTED:])
    older = f", and {len(there) - _LISTED} older ones" if len(there) > _LISTED else ""
    where = "" if step is None else f" in step {step}"
    raise DataError(f"{file.path} has no group {group!r}{where}; it has {listed}{older}")


_LISTED = 8
"""Groups that a message lists, the newest last."""


def _has(head: StepLine, group: str | None) -> bool:
    return group is None or any(row.uid == group for row in head.groups)


def _steps_text(steps: Sequence[int]) -> str:
    """`steps 1-3, 7`."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and parts[-1][-1] == step - 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    shown = ["-".join(map(str, part)) for part in parts]
    if len(shown) > _LISTED:
        shown = [*shown[: _LISTED // 2], "...", *shown[_LISTED // -2 :]]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}"


# --- formats ----------------------------------------------------------------------------------------------------------------------


def _table(record: Record, groups: Sequence[GroupRow], width: int | None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width or _WIDEST, color_system=None, highlight=False, markup=False)
    for group in groups:
        console.print(heading(record.head, group), soft_wrap=True)
        for table in tables(record, group):
            console.print()
            console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


_WIDEST = 400
"""Characters; no table needs as many."""


def _jsonl(record: Record, groups: Sequence[GroupRow]) -> str:
    fields = [told for group in groups for told in field_objects(record, group)]
    return "".join(json.dumps(told) + "\n" for told in [*fields, *span_objects(record, groups)])
