"""`asyncrl trace`: which groups of a run's trace are shown, in which format. Loads no torch.

cli -> [trace_command] -> trace_file, trace_view, perfetto
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from asyncrl.errors import DataError
from asyncrl.observe.perfetto import trace_events
from asyncrl.observe.run_folder import RunFolder, existing_file
from asyncrl.observe.text_tables import as_text
from asyncrl.observe.trace_file import GroupRow, Record, StepLine, TraceFile
from asyncrl.observe.trace_view import field_objects, heading, span_objects, tables


class TraceFormat(StrEnum):
    """What the trace is shown as."""

    TABLE = "table"
    JSONL = "jsonl"
    PERFETTO = "perfetto"


def render_trace(folder: Path, *, group: str | None, step: int | None, form: TraceFormat, width: int | None = None) -> str:
    """The groups asked for: `group` in the newest step that has it, or in `step`; all groups of `step`; else the newest one.

    width: of the terminal, in characters; None: tables are as wide as they need, for a file or a pager.
    Raises RunFolderError or DataError, which names what is there, for a folder, step or group that is not.
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


def write_output(path: Path, text: str, *, run: Path) -> None:
    """Raises DataError when the file cannot be written, or is one of the run's own: its trace, its journal ..."""
    try:
        if path.is_file() and path.resolve().is_relative_to(run.resolve()):
            raise DataError(f"--output {path}: is a file of the run already, which nothing may replace; give it another name")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"--output {path}: cannot be written ({error.strerror})") from error


def _open(folder: Path) -> TraceFile:
    reasons = "its run had trainer.trace_groups = 0, no step of it has ended, or it was no training"
    file = TraceFile(existing_file(folder, RunFolder(path=folder).trace.name, reasons))
    if not file.heads:
        raise DataError(f"{file.path} has no whole step yet")
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
    shown = []
    for group in groups:
        parts = [part for table in tables(record, group) for part in ("", table)]
        shown.append(as_text([heading(record.head, group), *parts], width))
    return "\n".join(shown)


def _jsonl(record: Record, groups: Sequence[GroupRow]) -> str:
    fields = [told for group in groups for told in field_objects(record, group)]
    return "".join(json.dumps(told) + "\n" for told in [*fields, *span_objects(record, groups)])
