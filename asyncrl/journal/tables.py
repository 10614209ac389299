"""The tables of a journal on disk, and how its operations change them. Runs in the writer's thread.

entries -> [tables] -> journal.db

All operations of one group commit go in together: rows and values are gathered first (the last one of an id wins) and written in
the order of their ids, 64 to a statement, because each statement gives the interpreter lock away and waits for it again.

Invariants:
1. A row's id is its number in the store; a value's id is `row number << 12 | number of its field's name`.
2. `seal` is the CRC-32 of everything else in the line, id included: a line that was damaged, or stands in another's place, shows.
3. Rows are removed by one small line in `removal`, which every reader honours. `forget` deletes them later, a few at a time.
4. A row number that was ever in use is below `next_row_id` in `meta`, or still in `row`.
"""

import itertools
import operator
import sqlite3
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.errors import JournalError
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
    StepRecord,
)

APPLICATION_ID = 0x61524A31
"""`aRJ1`: marks the file as ours, for us and for `file`."""
FORMAT = 2
"""Kept as SQLite's user_version. To be raised when a table changes."""
PAGE_BYTES = 32768
"""Measured for 256 rows of 4 columns: 5.6 ms with 4 KB pages, 3.0 ms with these; one row costs the same with both."""
NAME_BITS = 12
GROUP_SESSION = -1
"""`session_id` of a group's own lease: a part of a primary key cannot be NULL."""
CHUNK_ROWS = 64
"""Rows that `forget` deletes at once (about 0.3 ms), since an entry that comes meanwhile has to wait."""

_CRC_BYTES = 5 << 10
"""zlib gives the interpreter lock away for more, and would wait for it again at every value."""

SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
CREATE TABLE meta (name TEXT PRIMARY KEY, value, seal INTEGER) WITHOUT ROWID;
CREATE TABLE name (id INTEGER PRIMARY KEY, name TEXT, seal INTEGER);
CREATE TABLE header (id INTEGER PRIMARY KEY, kind TEXT, dtype TEXT, shape TEXT, seal INTEGER);
CREATE TABLE row (
    id INTEGER PRIMARY KEY, partition_id TEXT, key TEXT, uid TEXT, session_id INTEGER, attempt INTEGER, incarnation INTEGER,
    tag BLOB, seal INTEGER
);
CREATE TABLE cell (id INTEGER PRIMARY KEY, header INTEGER, seal INTEGER, data BLOB);
CREATE TABLE removal (id INTEGER PRIMARY KEY, row_ids BLOB, seal INTEGER);
CREATE TABLE lease (
    uid TEXT, session_id INTEGER, attempt INTEGER, incarnation INTEGER, is_open INTEGER, seal INTEGER, PRIMARY KEY (uid, session_id)
) WITHOUT ROWID;
CREATE TABLE turn (id INTEGER PRIMARY KEY, uid TEXT, session_id INTEGER, turn INTEGER, columns BLOB, seal INTEGER);
CREATE TABLE record (step INTEGER PRIMARY KEY, partition_id TEXT, tries INTEGER, content BLOB, seal INTEGER);
CREATE TABLE counter (name TEXT PRIMARY KEY, value INTEGER, seal INTEGER) WITHOUT ROWID;
"""

pack = msgspec.msgpack.Encoder().encode


def seal_of(*values: object) -> int:
    """CRC-32 of a line's other columns. They are strings, integers, floats, bytes or None."""
    return zlib.crc32(pack(values))


def seal_of_cell(cell_id: int, header: int, data: bytes | memoryview) -> int:
    """As `seal_of`, without a copy of the data: the ids are where the CRC starts."""
    seal = (cell_id * 31 + header) & 0xFFFFFFFF
    if len(data) <= _CRC_BYTES:
        return zlib.crc32(data, seal)
    for start in range(0, len(data), _CRC_BYTES):
        seal = zlib.crc32(data[start : start + _CRC_BYTES], seal)
    return seal


def write_meta(connection: sqlite3.Connection, name: str, value: int | str) -> None:
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (name, value, seal_of(name, value)))


def runs_of(numbers: Iterable[int], longest: int | None = None) -> Iterator[tuple[int, int]]:
    """The half-open ranges that sorted numbers make up: 1 2 3 7 -> (1, 4), (7, 8)."""
    first = stop = None
    for number in numbers:
        if first is not None and number == stop and (longest is None or number - first < longest):
            stop = number + 1
            continue
        if first is not None and stop is not None:
            yield first, stop
        first, stop = number, number + 1
    if first is not None and stop is not None:
        yield first, stop


class Tables:
    """The tables as the writer keeps them up to date. It alone changes them, so what it has read once it may remember."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._names: dict[str, int] = {name: number for number, name in connection.execute("SELECT id, name FROM name")}
        self._headers = {
            Header(kind=kind, dtype=dtype, shape=tuple(msgspec.json.decode(shape))): number
            for number, kind, dtype, shape in connection.execute("SELECT id, kind, dtype, shape FROM header")
        }
        self._turns: dict[str, dict[int, list[int]]] = {}
        for number, uid, session_id in connection.execute("SELECT id, uid, session_id FROM turn ORDER BY id"):
            self._turns.setdefault(uid, {}).setdefault(session_id, []).append(number)
        self._next_turn_id = self._first("SELECT IFNULL(MAX(id), 0) + 1 FROM turn")
        self._removed: deque[tuple[int, int, int | None]] = deque()
        self.num_removed_rows = 0
        """Rows that are removed and not yet deleted."""
        for number, row_ids in connection.execute("SELECT id, row_ids FROM removal ORDER BY id"):
            self._plan_removal(number, array("q", row_ids))
        self._next_removal_id = self._first("SELECT IFNULL(MAX(id), 0) + 1 FROM removal")
        self._kept_row_id = self._first("SELECT IFNULL((SELECT value FROM meta WHERE name = 'next_row_id'), 1)")
        self._next_row_id = max(self._kept_row_id, self._first("SELECT IFNULL(MAX(id), 0) + 1 FROM row"))

    def _first(self, query: str) -> int:
        number: int = self._connection.execute(query).fetchone()[0]
        return number

    def apply(self, entries: Iterable[Entry]) -> int:
        """Write entries, in order, into the open transaction. Returns about how many bytes they change."""
        rows: dict[int, RowEntry] = {}
        columns: list[PutColumn] = []
        counters: dict[str, int] = {}
        size = 0
        for entry in entries:
            for op in entry:
                match op:
                    case PutRows():
                        rows.update({row.row_id: row for row in op.rows})
                    case PutColumn():
                        columns.append(op)
                    case PutCounters():
                        counters.update(op.counters)
                    case PutTurn():
                        size += self._put_turn(op)
                    case _:
                        self._apply_small(op)
                        size += PAGE_BYTES
        if rows:
            self._put_rows([*rows.values()])
        if columns:
            size += self._put_cells(columns)
        if counters:
            self._insert("counter", [(name, value, seal_of(name, value)) for name, value in counters.items()])
        return size + size // 4 + 2 * PAGE_BYTES

    def _apply_small(self, op: object) -> None:
        match op:
            case RemoveRows():
                self._remove_rows(op.row_ids)
            case PutLeases():
                self._insert("lease", [_lease_line(lease) for lease in op.leases])
            case RemoveLeases():
                self._connection.executemany("DELETE FROM lease WHERE uid = ?", [(uid,) for uid in op.uids])
            case RemoveTurns():
                self._remove_turns(op.sessions)
            case PutRecord():
                self._insert("record", [_record_line(op.record)])
            case RemoveRecords():
                self._connection.executemany("DELETE FROM record WHERE step = ?", [(step,) for step in op.steps])
            case _:
                raise TypeError(f"{type(op).__name__} is no operation of a journal")

    # --- rows and values

    def _put_rows(self, rows: list[RowEntry]) -> None:
        self._insert("row", [_row_line(row) for row in rows])
        self._next_row_id = max(self._next_row_id, 1 + max(row.row_id for row in rows))

    def _put_cells(self, columns: Sequence[PutColumn]) -> int:
        cells: list[tuple[int, int, int, bytes | memoryview]] = []
        for column in columns:
            name, header, values = self._name_id(column.field), self._header_id(column.header), column.values
            start = column.bounds[0]
            for row_id, stop in zip(column.row_ids, column.bounds[1:], strict=True):
                cell_id = row_id << NAME_BITS | name
                # An empty view may have no address, and SQLite would take it for NULL.
                data = values[start:stop] if stop > start else b""
                cells.append((cell_id, header, seal_of_cell(cell_id, header, data), data))
                start = stop
        cells.sort(key=operator.itemgetter(0))  # of two for one id the later one stays behind, and wins
        self._insert("cell", cells)
        return sum(column.bounds[-1] - column.bounds[0] for column in columns)

    def _insert(self, table: str, lines: Sequence[Sequence[object]]) -> None:
        """Insert or replace whole lines, in as few statements as can be."""
        width = len(lines[0]) if lines else 0
        position = 0
        for count in (64, 8, 1):
            statement = _insertion(table, width, count)
            while len(lines) - position >= count:
                values = [*itertools.chain.from_iterable(lines[position : position + count])]
                self._connection.execute(statement, values)
                position += count

    def _name_id(self, name: str) -> int:
        number = self._names.get(name)
        if number is None:
            number = len(self._names)
            if number >> NAME_BITS:
                raise JournalError(f"field {name!r} is one more than the {1 << NAME_BITS} that a journal can hold")
            self._connection.execute("INSERT INTO name VALUES (?, ?, ?)", (number, name, seal_of(number, name)))
            self._names[name] = number
        return number

    def _header_id(self, header: Header) -> int:
        number = self._headers.get(header)
        if number is None:
            number = len(self._headers)
            line = (number, header.kind, header.dtype, msgspec.json.encode(header.shape).decode())
            self._connection.execute("INSERT INTO header VALUES (?, ?, ?, ?, ?)", (*line, seal_of(*line)))
            self._headers[header] = number
        return number

    # --- removal

    def _remove_rows(self, row_ids: Sequence[int]) -> None:
        if not row_ids:
            return
        numbers = array("q", row_ids)
        removal = self._next_removal_id
        content = numbers.tobytes()
        self._connection.execute("INSERT INTO removal VALUES (?, ?, ?)", (removal, content, seal_of(removal, content)))
        self._next_removal_id += 1
        self._plan_removal(removal, numbers)

    def _plan_removal(self, removal: int, numbers: Iterable[int]) -> None:
        """Queue the deletions of a removal; the last one names it, because then its line can go too."""
        runs = [*runs_of(sorted(set(numbers)), CHUNK_ROWS)]
        for first, stop in runs:
            self._removed.append((first, stop, removal if (first, stop) == runs[-1] else None))
            self.num_removed_rows += stop - first

    def forget(self, most_rows: int = CHUNK_ROWS) -> int:
        """Delete some removed rows in the open transaction. Returns about how many bytes it changes; 0: nothing was left."""
        if not self._removed:
            return 0
        num_rows = 0
        while self._removed and num_rows < most_rows:
            first, stop, removal = self._removed.popleft()
            self._connection.execute("DELETE FROM row WHERE id >= ? AND id < ?", (first, stop))
            self._connection.execute("DELETE FROM cell WHERE id >= ? AND id < ?", (first << NAME_BITS, stop << NAME_BITS))
            if removal is not None:
                self._connection.execute("DELETE FROM removal WHERE id = ?", (removal,))
            num_rows += stop - first
        self.num_removed_rows -= num_rows
        if self._kept_row_id < self._next_row_id:
            write_meta(self._connection, "next_row_id", self._next_row_id)
            self._kept_row_id = self._next_row_id
        return 8 * PAGE_BYTES

    # --- turns

    def _put_turn(self, op: PutTurn) -> int:
        turns = self._turns.setdefault(op.uid, {}).setdefault(op.session_id, [])
        if op.turn != len(turns):
            raise JournalError(f"turn {op.turn} of session {op.uid}_{op.session_id} after {len(turns)} turns")
        columns = {name: (header.kind, header.dtype, header.shape, data) for name, (header, data) in op.columns.items()}
        content = pack(columns)
        line = (self._next_turn_id, op.uid, op.session_id, op.turn, content)
        self._connection.execute("INSERT INTO turn VALUES (?, ?, ?, ?, ?, ?)", (*line, seal_of(*line)))
        turns.append(self._next_turn_id)
        self._next_turn_id += 1
        return len(content)

    def _remove_turns(self, sessions: Sequence[tuple[str, int | None]]) -> None:
        gone: list[int] = []
        for uid, session_id in sessions:
            of_group = self._turns.get(uid, {})
            for number in [*of_group] if session_id is None else [session_id]:
                gone += of_group.pop(number, [])
            if not of_group:
                self._turns.pop(uid, None)
        self._connection.executemany("DELETE FROM turn WHERE id >= ? AND id < ?", runs_of(sorted(gone)))


def _insertion(table: str, width: int, count: int) -> str:
    line = f"({', '.join('?' * width)})"
    return f"INSERT OR REPLACE INTO {table} VALUES {', '.join([line] * count)}"


def _row_line(row: RowEntry) -> tuple[Any, ...]:
    line = (*row[:-1], pack(dict(row.tag)))
    return (*line, seal_of(*line))


def _lease_line(lease: LeaseEntry) -> tuple[Any, ...]:
    session_id = GROUP_SESSION if lease.session_id is None else lease.session_id
    line = (lease.uid, session_id, lease.attempt, lease.incarnation, int(lease.is_open))
    return (*line, seal_of(*line))


def _record_line(record: StepRecord) -> tuple[Any, ...]:
    content: Mapping[str, Sequence[str | int]] = {"uids": record.uids, "keys": record.keys, "row_ids": record.row_ids}
    line = (record.step, record.partition_id, record.tries, pack(content))
    return (*line, seal_of(*line))
