"""Shadow: what the store must hold, by its entries alone; and what each entry changed.

Tap -> [Shadow.apply] -> Changes -> oracles

A second, plainer account of the store: it checks nothing, so that oracles see what was done, not what should have been.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.fields import TagValue
from asyncrl.journal.entries import (
    Entry,
    Header,
    LeaseEntry,
    PutColumn,
    PutCounters,
    PutLeases,
    PutRecord,
    PutRows,
    PutTurn,
    RemoveLeases,
    RemoveRecords,
    RemoveRows,
    RemoveTurns,
    RowEntry,
    Saved,
    StepRecord,
)

Cell = tuple[Header, memoryview | bytes]
ShadowTag = Mapping[str, TagValue]


@dataclass(slots=True)
class ShadowRow:
    """A row and its values; `entry`: as it was put last."""

    entry: RowEntry
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def is_prompt(self) -> bool:
        return self.entry.session_id is None

    @property
    def status(self) -> str:
        return str(self.entry.tag.get("status", ""))


@dataclass(frozen=True, slots=True)
class RowPut:
    """A row that was put; `lease`: the one in force at that moment, open or not; `tag_before` None: the row is new."""

    row: ShadowRow
    tag_before: ShadowTag | None
    lease: LeaseEntry | None


@dataclass(frozen=True, slots=True)
class Overwritten:
    """A value that was there was written again."""

    row: ShadowRow
    name: str
    before: Cell
    after: Cell


@dataclass(frozen=True, slots=True)
class TurnPut:
    """A turn that was kept; `lease`: of its session at that moment; `num_before`: turns that the session had."""

    put: PutTurn
    lease: LeaseEntry | None
    num_before: int


@dataclass(slots=True)
class Changes:
    """What one entry changed, in the order of its operations."""

    number: int
    put: list[RowPut] = field(default_factory=list)
    overwritten: list[Overwritten] = field(default_factory=list)
    removed: list[ShadowRow] = field(default_factory=list)
    leases: list[tuple[LeaseEntry | None, LeaseEntry]] = field(default_factory=list)
    """(before, after)."""
    ended: dict[str, dict[int | None, LeaseEntry]] = field(default_factory=dict)
    """Groups that have no lease any more: what their leases were."""
    turns: list[TurnPut] = field(default_factory=list)
    turns_removed: list[tuple[str, int]] = field(default_factory=list)
    """Sessions whose turns went."""
    records: list[tuple[StepRecord | None, StepRecord]] = field(default_factory=list)
    """(before, after)."""
    forgotten: list[StepRecord] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    """Counter -> how much it grew."""

    @property
    def recorded(self) -> list[StepRecord]:
        """Steps that were recorded for the first time."""
        return [after for before, after in self.records if before is None]

    @property
    def retired(self) -> list[StepRecord]:
        return [after for _, after in self.records if not after.tries]


class Shadow:
    """`rows`: by number, those of steps that are done included; `keys`: (partition, key) -> row, those that must be visible;
    `done`: recorded steps that the weights have seen."""

    def __init__(self, found: Saved, *, weights_step: int = 0) -> None:
        self.rows: dict[int, ShadowRow] = {}
        self.keys: dict[tuple[str, str], ShadowRow] = {}
        self.groups: dict[str, dict[str, ShadowRow]] = {}
        """uid -> key -> visible row."""
        self.leases: dict[str, dict[int | None, LeaseEntry]] = {}
        self.turns: dict[str, dict[int, int]] = {}
        """uid -> session -> how many."""
        self.records: dict[int, StepRecord] = dict(found.records)
        self.counters: dict[str, int] = dict(found.counters)
        self.done = {step for step in found.records if step <= weights_step}
        self.num_unrecorded = 0
        """Prompts of the trained partition that no record has."""
        self._recorded = {row_id for record in found.records.values() for row_id in record.row_ids}
        hidden = {row_id for step in self.done for row_id in found.records[step].row_ids}
        for row_id, saved in found.rows.items():
            row = ShadowRow(saved.row, dict(saved.cells))
            if row_id in hidden:
                self.rows[row_id] = row
            else:
                self._add(row_id, row)
        for lease in found.leases.values():
            self.leases.setdefault(lease.uid, {})[lease.session_id] = lease
        for (uid, session_id), turns in found.turns.items():
            self.turns.setdefault(uid, {})[session_id] = len(turns)

    # --- sight

    @property
    def num_recorded(self) -> int:
        return sum(len(record.uids) for record in self.records.values())

    @property
    def num_open(self) -> int:
        """By the counters: admitted, neither dropped nor purged."""
        dropped = sum(count for name, count in self.counters.items() if name.startswith("dropped/"))
        return self.counters.get("admitted", 0) - dropped - self.counters.get("purged_groups", 0)

    def prompt(self, uid: str) -> ShadowRow | None:
        row = self.groups.get(uid, {}).get(uid)
        return row if row is not None and row.is_prompt else None

    # --- act

    def apply(self, entry: Entry, number: int) -> Changes:
        changes = Changes(number)
        for op in entry:
            _ACTS[type(op)](self, op, changes)
        return changes

    def _put_rows(self, op: PutRows, changes: Changes) -> None:
        for entry in op.rows:
            row = self.rows.get(entry.row_id)
            lease = self.leases.get(entry.uid, {}).get(entry.session_id)
            tag = None if row is None else row.entry.tag
            if row is None:
                row = ShadowRow(entry)
                self._add(entry.row_id, row)
            row.entry = entry
            changes.put.append(RowPut(row, tag, lease))

    def _put_column(self, op: PutColumn, changes: Changes) -> None:
        values, bounds = op.values, op.bounds
        for position, row_id in enumerate(op.row_ids):
            row = self.rows[row_id]
            after = (op.header, values[bounds[position] : bounds[position + 1]])
            before = row.cells.get(op.field)
            if before is not None:
                changes.overwritten.append(Overwritten(row, op.field, before, after))
            row.cells[op.field] = after

    def _remove_rows(self, op: RemoveRows, changes: Changes) -> None:
        for row_id in op.row_ids:
            row = self.rows.pop(row_id, None)
            if row is None:
                continue
            if _is_group(row) and row_id not in self._recorded:
                self.num_unrecorded -= 1
            self._hide(row)
            changes.removed.append(row)
        self._recorded.difference_update(op.row_ids)

    def _put_leases(self, op: PutLeases, changes: Changes) -> None:
        for lease in op.leases:
            of_group = self.leases.setdefault(lease.uid, {})
            changes.leases.append((of_group.get(lease.session_id), lease))
            of_group[lease.session_id] = lease

    def _remove_leases(self, op: RemoveLeases, changes: Changes) -> None:
        for uid in op.uids:
            changes.ended[uid] = self.leases.pop(uid, {})

    def _put_turn(self, op: PutTurn, changes: Changes) -> None:
        turns = self.turns.setdefault(op.uid, {})
        lease = self.leases.get(op.uid, {}).get(op.session_id)
        changes.turns.append(TurnPut(op, lease, turns.get(op.session_id, 0)))
        turns[op.session_id] = op.turn + 1

    def _remove_turns(self, op: RemoveTurns, changes: Changes) -> None:
        for uid, session_id in op.sessions:
            sessions = self.turns.get(uid, {})
            changes.turns_removed += [(uid, number) for number in sessions if session_id in (None, number)]
            if session_id is not None:
                sessions.pop(session_id, None)
            if session_id is None or not sessions:
                self.turns.pop(uid, None)

    def _put_record(self, op: PutRecord, changes: Changes) -> None:
        record = op.record
        changes.records.append((self.records.get(record.step), record))
        new = [row_id for row_id in record.row_ids if row_id not in self._recorded]
        self.num_unrecorded -= sum(_is_group(self.rows[row_id]) for row_id in new if row_id in self.rows)
        self._recorded.update(new)
        self.records[record.step] = record
        if not record.tries:
            self.done.add(record.step)
            for row_id in record.row_ids:
                if row_id in self.rows:
                    self._hide(self.rows[row_id])

    def _remove_records(self, op: RemoveRecords, changes: Changes) -> None:
        changes.forgotten += [self.records.pop(step) for step in op.steps if step in self.records]
        self.done.difference_update(op.steps)

    def _put_counters(self, op: PutCounters, changes: Changes) -> None:
        for name, value in op.counters.items():
            changes.counted[name] = value - self.counters.get(name, 0)
            self.counters[name] = value

    # --- rows

    def _add(self, row_id: int, row: ShadowRow) -> None:
        self.rows[row_id] = row
        self.keys[row.entry.partition_id, row.entry.key] = row
        self.groups.setdefault(row.entry.uid, {})[row.entry.key] = row
        if _is_group(row) and row_id not in self._recorded:
            self.num_unrecorded += 1

    def _hide(self, row: ShadowRow) -> None:
        """Its key is gone, unless another row has it now."""
        where = row.entry.partition_id, row.entry.key
        if self.keys.get(where) is not row:
            return
        del self.keys[where]
        group = self.groups[row.entry.uid]
        del group[row.entry.key]
        if not group:
            del self.groups[row.entry.uid]


def _is_group(row: ShadowRow) -> bool:
    return row.entry.session_id is None and row.entry.partition_id == "train"


_ACTS: dict[type[Any], Any] = {
    PutRows: Shadow._put_rows,
    PutColumn: Shadow._put_column,
    RemoveRows: Shadow._remove_rows,
    PutLeases: Shadow._put_leases,
    RemoveLeases: Shadow._remove_leases,
    PutTurn: Shadow._put_turn,
    RemoveTurns: Shadow._remove_turns,
    PutRecord: Shadow._put_record,
    RemoveRecords: Shadow._remove_records,
    PutCounters: Shadow._put_counters,
}


def changed_groups(changes: Sequence[Changes]) -> dict[str, None]:
    """uids of everything that entries changed, each once."""
    found: dict[str, None] = {}
    for each in changes:
        found.update((put.row.entry.uid, None) for put in each.put)
        found.update((row.entry.uid, None) for row in each.removed)
        found.update((lease.uid, None) for _, lease in each.leases)
        found.update(dict.fromkeys(each.ended))
        found.update((uid, None) for _, record in each.records for uid in record.uids)
    return found
