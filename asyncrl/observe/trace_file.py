"""trace.jsonl: one record a step, made of a `step` line and the `field` and `span` lines behind it; and reading it back.

lineage -> [TraceLog] -> trace.jsonl -> [read] -> trace_view, perfetto

A record is appended in one write. It counts only when it is whole: the step line says how many lines follow. Of two records of a
step (a resumed run does a step again) the last whole one counts. So neither a torn last line nor a torn record breaks reading.
"""

from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec

from asyncrl.errors import DataError
from asyncrl.observe.json_lines import cut_unfinished_line
from asyncrl.ports import Json, SpanKind, Topology

T = TypeVar("T")

Status = Literal["trained", "dropped"]


class TrajectoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a traced group: its key, its tag at sample, and `response_mask.sum()` of what the store held then."""

    key: str
    prompt_len: int
    response_len: int
    seq_len: int
    policy_len: int
    global_steps: int
    min_global_steps: int
    max_global_steps: int
    is_padding: bool
    mask_sum: int | None


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A traced group. number: it is the number-th prompt of the run. A dropped one has no trajectories."""

    uid: str
    number: int
    status: Status
    admitted_s: float
    rows: tuple[TrajectoryRow, ...] = ()


class TopologyRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a topology, the data-parallel one among them."""

    world: int
    dp: int
    sp: int
    tp: int
    pp: int
    cp: int
    replicas: int = 1
    dynamic_cp: bool = False
    backend: str = "fsdp"

    @classmethod
    def of(cls, topology: Topology) -> "TopologyRow":
        return cls(**{name: getattr(topology, name) for name in cls.__struct_fields__})


class StepLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """Head of a record. version: the actor's weights in the step. wall_time: seconds since 1970 at second 0 of the record."""

    step: int
    incarnation: int
    version: int
    wall_time: float
    num_lines: int
    actor: TopologyRow
    rollout: TopologyRow
    groups: tuple[GroupRow, ...]


class FieldLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="field"):
    """A field at one box of the way; `lengths` and `mask_sums` follow the rows of the group."""

    step: int
    incarnation: int
    uid: str
    stage: str
    access: str
    field: str
    dtype: str
    device: str
    layout: str
    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    mask_sums: tuple[int, ...] | None


class SpanLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="span"):
    """A stretch of time. uid and session_id: None for the trainer's own."""

    step: int
    incarnation: int
    uid: str | None
    session_id: int | None
    span: SpanKind
    name: str
    start_s: float
    end_s: float
    outcome: str
    facts: dict[str, Json]


_ENCODER = msgspec.json.Encoder()
_STEP = msgspec.json.Decoder(StepLine)
_BODY = msgspec.json.Decoder(FieldLine | SpanLine)
_HEAD = b'{"kind":"step"'


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is recorded of a step, in order."""

    head: StepLine
    lines: tuple[FieldLine | SpanLine, ...]


class TraceLog:
    """Appends records to a file. One writer a file. Blocking: call it through `world.offload`."""

    def __init__(self, path: Path) -> None:
        cut_unfinished_line(path)
        self._path = path

    def append(self, record: Record) -> None:
        """Write a record and give it to the system."""
        with self._path.open("ab") as file:
            file.write(b"".join(_ENCODER.encode(line) + b"\n" for line in (record.head, *record.lines)))


class TraceFile:
    """The whole records of a trace.jsonl, the last of each step. `heads`: their step lines, by rising step.

    Raises DataError when the file is not there, or a record in it is no record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                found = _heads(file, path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        self._places = {head.step: place for head, place in found}
        last = {head.step: head for head, _ in found}
        self.heads = [last[step] for step in sorted(last)]

    def read(self, step: int) -> Record:
        """The record of one of `heads`."""
        with self.path.open("rb") as file:
            file.seek(self._places[step])
            head = self._next(_STEP, file)
            return Record(head=head, lines=tuple(self._next(_BODY, file) for _ in range(head.num_lines)))

    def _next(self, decoder: "msgspec.json.Decoder[T]", file: BinaryIO) -> T:
        at = file.tell()
        return _decoded(decoder, file.readline(), self.path, at)


def _heads(file: BinaryIO, path: Path) -> list[tuple[StepLine, int]]:
    """Step lines of whole records in the order of the file, and where they begin."""
    found: list[tuple[StepLine, int]] = []
    head, begins, missing, position = None, 0, 0, 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        if line.startswith(_HEAD):
            head, begins = _decoded(_STEP, line, path, position), position
            missing = head.num_lines
        else:
            missing -= 1
        if head is not None and missing == 0:
            found.append((head, begins))
        position += len(line)
    return found


def _decoded(decoder: "msgspec.json.Decoder[T]", line: bytes, path: Path, at: int) -> T:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        told = "another version of asyncrl wrote it, or it is damaged; take it out of the file"
        raise DataError(f"{path}: the line at byte {at} is not that of a trace ({error}): {told}") from error
