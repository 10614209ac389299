"""What a journal entry is made of, and what comes back from one: plain data, no torch, no SQL.

transfer_queue -> [entries] -> journal on disk -> [Saved] -> transfer_queue at the next start

An entry is a tuple of operations, applied whole or not at all. Every operation says what is so from now on (never "one more"), and
names rows by a number that is never given twice, so an entry needs nothing but itself. `Saved.apply` is what the operations mean:
the journal in memory (`model.py`) is made of it, and the one on disk must come back equal to it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.errors import CheckpointError, JournalError
from asyncrl.fields import TagValue

# --- what is said of a thing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Of a column: `kind` ragged, stacked or object; a torch dtype's name without `torch.` ("" for objects); the shape of one entry
    along the ragged axis, or of one stacked row. With the bytes it is all that a value needs."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


class RowEntry(NamedTuple):
    """One key: where it is, who wrote it last, its whole tag. `session_id` None: a prompt. (A tuple: hundreds are made a put.)"""

    row_id: int
    partition_id: str
    key: str
    uid: str
    session_id: int | None
    attempt: int
    incarnation: int
    tag: Mapping[str, TagValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEntry:
    """The lease of an open group (`session_id` None), or the latest of one of its sessions. `is_open` False: it has settled."""

    uid: str
    session_id: int | None
    attempt: int
    incarnation: int
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What step `step` trains on: groups in admission order, trajectory keys in order, and the rows of both and of the prompts.

    `tries`: how often the step was begun since it was last done; 0: it was done once. Whether its rows are seen follows from the
    step and the weights of the run that looks, and is written nowhere: a step up to the weights is in them.
    """

    step: int
    partition_id: str
    uids: tuple[str, ...]
    keys: tuple[str, ...]
    row_ids: tuple[int, ...]
    tries: int = 1


# --- operations -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutRows:
    """These rows are so from now on."""

    rows: Sequence[RowEntry]


class PutColumn(NamedTuple):
    """The value of `field` in row `row_ids[i]` is `values[bounds[i]:bounds[i + 1]]`. Nobody writes into `values` any more."""

    field: str
    header: Header
    row_ids: Sequence[int]
    values: memoryview
    bounds: Sequence[int]


@dataclass(frozen=True, slots=True)
class RemoveRows:
    """These rows and their values are gone for good."""

    row_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class PutLeases:
    """These leases are so from now on."""

    leases: Sequence[LeaseEntry]


@dataclass(frozen=True, slots=True)
class RemoveLeases:
    """These groups have no lease any more, nor have their sessions."""

    uids: Sequence[str]


@dataclass(frozen=True, slots=True)
class PutTurn:
    """Turn `turn` of a session, counted from 0, with its columns: field -> header and bytes."""

    uid: str
    session_id: int
    turn: int
    columns: Mapping[str, tuple[Header, memoryview]]


@dataclass(frozen=True, slots=True)
class RemoveTurns:
    """The turns of these sessions are gone: (uid, session_id), or (uid, None) for all of a group."""

    sessions: Sequence[tuple[str, int | None]]


@dataclass(frozen=True, slots=True)
class PutRecord:
    """The record of a step, or the same one with another number of tries."""

    record: StepRecord


@dataclass(frozen=True, slots=True)
class RemoveRecords:
    """These steps will never be asked for again. Their rows go by a RemoveRows beside it."""

    steps: Sequence[int]


@dataclass(frozen=True, slots=True)
class PutCounters:
    """These counters have these values: `cursor`, `admitted`, `dropped/<reason>`, `failed_row/<dataset row>`, `purged_step`,
    `purged_groups`, `evaluated`."""

    counters: Mapping[str, int]


Op = PutRows | PutColumn | RemoveRows | PutLeases | RemoveLeases | PutTurn | RemoveTurns | PutRecord | RemoveRecords | PutCounters
Entry = Sequence[Op]


# --- the steps of a journal -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSteps:
    """`purged`: the last step whose record and rows are gone, 0: none is. `last`: the last that was recorded. Weights of a step
    from `purged` to `last` can be gone on from: every step after theirs has its record."""

    purged: int
    last: int

    def newest_of(self, whole: Collection[int]) -> int:
        """The step of the newest weights in `whole` that can be gone on from; 0: the initial ones. Raises CheckpointError."""
        newest = max(whole)
        if newest > self.last:
            raise CheckpointError(
                f"the journal ends with step {self.last}, the newest whole checkpoint is of step {newest}: the steps between were "
                "trained without this journal; put theirs in its place, or remove the checkpoint to go on from an older one"
            )
        if newest < self.purged:
            raise CheckpointError(
                f"the journal begins after step {self.purged}, the newest whole checkpoint is of step {newest}"
                f"{'' if newest else ' (there is none)'}; put the newer checkpoint back, or start a new run without --resume"
            )
        return newest


def kept_steps(records: Iterable[int], counters: Mapping[str, int]) -> KeptSteps:
    """records: steps that have one."""
    purged = counters.get("purged_step", 0)
    return KeptSteps(purged=purged, last=max(records, default=purged))


def counted_by(counters: Mapping[str, int], what: str) -> dict[str, int]:
    """Of the counters `<what>/<name>`: name -> number, sorted by name."""
    found = ((name.partition("/"), number) for name, number in sorted(counters.items()))
    return {name: number for (kind, _, name), number in found if kind == what}


# --- what comes back --------------------------------------------------------------------------------------------------------------

Cells = dict[str, tuple[Header, bytes]]
"""Field -> header and bytes, of one row or one turn."""


@dataclass(slots=True, kw_only=True)
class SavedRow:
    """One row with its values."""

    row: RowEntry
    cells: Cells = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Saved:
    """Everything that a journal keeps. Rows in the order of their numbers, which is the order in which the keys came.

    `incarnation`: how often the journal has been opened before, this time not counted.
    """

    incarnation: int = 0
    rows: dict[int, SavedRow] = field(default_factory=dict)
    leases: dict[tuple[str, int | None], LeaseEntry] = field(default_factory=dict)
    turns: dict[tuple[str, int], list[Cells]] = field(default_factory=dict)
    records: dict[int, StepRecord] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    next_row_id: int = 1

    @property
    def steps(self) -> KeptSteps:
        """The steps that it can go on from."""
        return kept_steps(self.records, self.counters)

    def hidden(self, weights_step: int) -> set[int]:
        """Numbers of the rows that weights of `weights_step` have trained on already."""
        return {row_id for record in self.records.values() if record.step <= weights_step for row_id in record.row_ids}

    def copy(self) -> "Saved":
        """One that changes apart from this. Values are bytes, which nobody changes."""
        return Saved(
            incarnation=self.incarnation,
            rows={row_id: SavedRow(row=saved.row, cells=dict(saved.cells)) for row_id, saved in self.rows.items()},
            leases=dict(self.leases),
            turns={key: [dict(turn) for turn in turns] for key, turns in self.turns.items()},
            records=dict(self.records),
            counters=dict(self.counters),
            next_row_id=self.next_row_id,
        )

    def apply(self, entry: Entry) -> None:
        """Raises JournalError for an operation that cannot follow what is there."""
        for op in entry:
            self._apply(op)

    def _apply(self, op: Op) -> None:
        match op:
            case PutRows():
                self._put_rows(op.rows)
            case PutColumn():
                self._put_column(op)
            case RemoveRows():
                for row_id in op.row_ids:
                    self.rows.pop(row_id, None)
            case PutLeases():
                self.leases.update({(lease.uid, lease.session_id): lease for lease in op.leases})
            case RemoveLeases():
                self.leases = {key: lease for key, lease in self.leases.items() if key[0] not in op.uids}
            case PutTurn():
                self._put_turn(op)
            case RemoveTurns():
                gone = [key for key in self.turns if key in op.sessions or (key[0], None) in op.sessions]
                for key in gone:
                    del self.turns[key]
            case PutRecord():
                self.records[op.record.step] = op.record
            case RemoveRecords():
                for step in op.steps:
                    self.records.pop(step, None)
            case PutCounters():
                self.counters.update(op.counters)

    def _put_rows(self, rows: Sequence[RowEntry]) -> None:
        for row in (row._replace(tag=dict(row.tag)) for row in rows):
            if (held := self.rows.get(row.row_id)) is not None:
                held.row = row
            else:
                self.rows[row.row_id] = SavedRow(row=row)
            self.next_row_id = max(self.next_row_id, row.row_id + 1)

    def _put_column(self, op: PutColumn) -> None:
        for position, row_id in enumerate(op.row_ids):
            if row_id not in self.rows:
                raise JournalError(f"a value of field {op.field!r} for row {row_id}, which does not exist")
            self.rows[row_id].cells[op.field] = op.header, bytes(op.values[op.bounds[position] : op.bounds[position + 1]])

    def _put_turn(self, op: PutTurn) -> None:
        turns = self.turns.setdefault((op.uid, op.session_id), [])
        if op.turn != len(turns):
            raise JournalError(f"turn {op.turn} of session {op.uid}_{op.session_id} after {len(turns)} turns")
        turns.append({name: (header, bytes(data)) for name, (header, data) in op.columns.items()})
