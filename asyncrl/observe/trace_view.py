"""A record of the trace as a person or a program reads it: every line with what the catalogue and its group know of it.

trace_file -> [trace_view] -> table, JSON lines
"""

from collections.abc import Sequence

from msgspec.structs import asdict
from rich.table import Table

from asyncrl.fields import CATALOGUE
from asyncrl.observe.trace_file import FieldLine, GroupRow, Record, SpanLine, StepLine, TopologyRow, TrajectoryRow
from asyncrl.ports import Json

_LISTED = 8
"""Numbers of a row that a cell lists; above it shows the smallest and the largest."""


def field_objects(record: Record, group: GroupRow) -> list[dict[str, Json]]:
    """One object a (stage, field), in the order of the way. Lists have an entry a trajectory; of `dataset` and `feed`, one.

    mask_sums: of the mask that the stage was given; of a stage that reads none, those of the rows at sample.
    """
    shared = {
        "step": record.head.step,
        "incarnation": record.head.incarnation,
        "version": record.head.version,
        "uid": group.uid,
        "topology": {"actor": asdict(record.head.actor), "rollout": asdict(record.head.rollout)},
    }
    lines = [line for line in record.lines if isinstance(line, FieldLine) and line.uid == group.uid]
    return [{"kind": "field", **shared, **_own(line, group)} for line in lines]


def _own(line: FieldLine, group: GroupRow) -> dict[str, Json]:
    entry = CATALOGUE.get(line.field)
    rows = group.rows if len(line.lengths) == len(group.rows) and line.stage not in ("dataset", "feed") else ()
    return {
        "stage": line.stage,
        "access": line.access,
        "field": line.field,
        "producer": None if entry is None else entry.producer,
        "consumers": [] if entry is None else list(entry.consumers),
        "dtype": line.dtype,
        "device": line.device,
        "layout": line.layout,
        "shape": list(line.shape),
        "lengths": list(line.lengths),
        "valid_lengths": _valid(line, rows),
        "mask_sums": list(line.mask_sums) if line.mask_sums is not None else [row.mask_sum for row in rows] or None,
        **{f"{name}s" if name == "key" else name: [getattr(row, name) for row in rows] for name in _OF_ROWS},
    }


_OF_ROWS = ("key", "global_steps", "min_global_steps", "max_global_steps", "is_padding")


def _valid(line: FieldLine, rows: Sequence[TrajectoryRow]) -> list[int]:
    """Entries of each row that are no padding: ragged rows hold none, and a row that only fills a mesh holds nothing else."""
    padding = [row.is_padding for row in rows] or [False] * len(line.lengths)
    return [0 if fills or length < 0 else length for length, fills in zip(line.lengths, padding, strict=True)]


def span_objects(record: Record, groups: Sequence[GroupRow]) -> list[dict[str, Json]]:
    """One object a span of the groups, then the trainer's. `start_s` and `end_s` count from second 0 of the record, `wall_time`."""
    wanted = [*(group.uid for group in groups), None]
    spans = [line for line in record.lines if isinstance(line, SpanLine) and line.uid in wanted]
    return [
        {
            "kind": "span",
            "step": line.step,
            "incarnation": line.incarnation,
            "uid": line.uid,
            "session_id": line.session_id,
            "span": str(line.span),
            "name": line.name,
            "start_s": line.start_s,
            "end_s": line.end_s,
            "wall_time": record.head.wall_time,
            "outcome": line.outcome,
            "facts": line.facts,
        }
        for line in spans
    ]


# --- tables -----------------------------------------------------------------------------------------------------------------------


def heading(head: StepLine, group: GroupRow) -> str:
    """What all lines of a group share."""
    return (
        f"group {group.uid}  prompt {group.number}  {group.status}  step {head.step}  weight version {head.version}"
        f"  actor {_topology_text(head.actor)}  rollout {_topology_text(head.rollout)}"
    )


def _topology_text(topology: TopologyRow) -> str:
    return " ".join(f"{name} {size}" for name, size in asdict(topology).items())


def tables(record: Record, group: GroupRow) -> list[Table]:
    """Trajectories, fields by stage, and spans."""
    return [*([_rows_table(group)] if group.rows else []), _fields_table(record, group), _spans_table(record, group)]


def _rows_table(group: GroupRow) -> Table:
    names = [name for name in TrajectoryRow.__struct_fields__ if name != "mask_sum"]
    table = _table("trajectory", *names[1:], "response_mask.sum()")
    for row in group.rows:
        table.add_row(*(str(getattr(row, name)) for name in names), "-" if row.mask_sum is None else str(row.mask_sum))
    return table


def _fields_table(record: Record, group: GroupRow) -> Table:
    table = _table("stage", "access", "field", "producer", "consumers", "dtype", "device", "shape", "lengths", "valid", "mask sum")
    before = ""
    for told in field_objects(record, group):
        table.add_row(
            "" if told["stage"] == before else told["stage"],
            told["access"],
            told["field"],
            told["producer"] or "-",
            " ".join(told["consumers"]) or "-",
            told["dtype"],
            told["device"],
            f"{told['layout']} {told['shape'] or ''}".strip(),
            _numbers(told["lengths"]) if told["layout"] == "ragged" else "-",
            _numbers(told["valid_lengths"]),
            "-" if told["mask_sums"] is None else _numbers(told["mask_sums"]),
        )
        before = told["stage"]
    return table


def _spans_table(record: Record, group: GroupRow) -> Table:
    table = _table("track", "span", "name", "start s", "seconds", "outcome", "facts")
    for told in span_objects(record, [group]):
        track = "trainer" if told["uid"] is None else "group" if told["session_id"] is None else f"session {told['session_id']}"
        facts = "  ".join(f"{name} {value}" for name, value in told["facts"].items())
        seconds = told["end_s"] - told["start_s"]
        table.add_row(track, told["span"], told["name"], f"{told['start_s']:.3f}", f"{seconds:.3f}", told["outcome"], facts)
    return table


_WHOLE = ("trajectory", "stage", "access", "field", "producer", "dtype", "track", "name")
"""Columns that are never cut: where a terminal is narrow the others take more lines."""


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in _WHOLE)
    return table


def _numbers(values: Sequence[int]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]} x{len(values)}" if len(values) > 1 else str(values[0])
    if len(values) > _LISTED:
        return f"{min(values)}..{max(values)} of {len(values)}"
    return " ".join(map(str, values))
