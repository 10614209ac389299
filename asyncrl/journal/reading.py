"""From a journal on disk to what it keeps. Works beside the writer, from any process, on a left-over journal and on a copy.

journal.db -> [reading] -> Saved -> transfer_queue
"""

import contextlib
import shutil
import sqlite3
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import JournalDamagedError, JournalError
from asyncrl.journal.entries import Cells, Header, KeptSteps, LeaseEntry, RowEntry, Saved, SavedRow, StepRecord, kept_steps
from asyncrl.journal.opening import NEXT_MOVE, check_format, side_file
from asyncrl.journal.tables import GROUP_SESSION, NAME_BITS, runs_of, seal_of, seal_of_cell

_unpack = msgspec.msgpack.decode
_LAST_ROW = 1 << 50


@contextlib.contextmanager
def open_reader(path: Path) -> "Iterator[Reader]":
    """A reader that sees one state of the journal in all that it reads. Raises JournalError.

    Where the folder cannot be written SQLite cannot read beside a writer's log, so the files are copied first.
    """
    with contextlib.ExitStack() as stack:
        try:
            try:
                connection = stack.enter_context(contextlib.closing(_connect(path)))
                _begin(connection, path)
            except sqlite3.OperationalError as error:
                if not error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
                    raise
                copy = _copy(path, Path(stack.enter_context(tempfile.TemporaryDirectory())))
                connection = stack.enter_context(contextlib.closing(_connect(copy)))
                _begin(connection, path)
        except sqlite3.OperationalError as error:
            raise JournalError(f"{path} cannot be read: {error} ({error.sqlite_errorname})") from error
        except OSError as error:
            raise JournalError(f"{path} cannot be read: {error.strerror}") from error
        yield Reader(connection, path)


def _begin(connection: sqlite3.Connection, path: Path) -> None:
    """The first query decides on the state that all see."""
    connection.execute("BEGIN")
    check_format(connection, path)


def _copy(path: Path, folder: Path) -> Path:
    for file in (path, side_file(path, "-wal")):
        if file.exists():
            shutil.copyfile(file, folder / file.name)
    return folder / path.name


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=10)


def load(path: Path, weights_step: int = 0) -> Saved:
    """Everything that the journal keeps, without the rows of steps up to `weights_step`; `incarnation` as it stands in the file.

    Raises JournalDamagedError, which names what is damaged.
    """
    with open_reader(path) as reader:
        return reader.saved(weights_step)


def read_steps(path: Path) -> KeptSteps:
    """Which weights may go on from the journal. Raises as `load`."""
    with open_reader(path) as reader:
        return kept_steps(reader.guarded("step records", reader.read_records), reader.read_counters())


class Reader:
    """Reads the tables through one connection, and checks every seal."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        self._path = path
        self.meta: dict[str, int | str] = self.guarded("meta", lambda: dict(self.lines("meta")))
        if missing := {"asyncrl", "incarnation"} - self.meta.keys():
            raise self._damaged(f"its meta lacks {min(missing)!r}")
        self.names: dict[int, str] = self.guarded("field names", lambda: dict(self.lines("name")))
        self._headers = self.guarded("headers", self._read_headers)
        self.removed: frozenset[int] = self.guarded("removed rows", self._read_removed)

    @property
    def incarnation(self) -> int:
        """How often the journal has been opened."""
        return int(self.meta["incarnation"])

    def saved(self, weights_step: int = 0) -> Saved:
        records = self.guarded("step records", self.read_records)
        hidden = Saved(records=records).hidden(weights_step) | self.removed
        rows = self.guarded("rows", lambda: self._read_rows(hidden))
        self.guarded("values", lambda: self._read_cells(rows, _gaps(hidden)))
        highest = self.guarded("rows", lambda: self.connection.execute("SELECT IFNULL(MAX(id), 0) FROM row").fetchone()[0])
        return Saved(
            incarnation=self.incarnation,
            rows=rows,
            leases=self.guarded("leases", self.read_leases),
            turns=self.guarded("turns", self._read_turns),
            records=records,
            counters=self.read_counters(),
            next_row_id=max(int(self.meta.get("next_row_id", 1)), highest + 1),
        )

    # --- tables

    def lines(self, table: str, where: str = "") -> Iterator[tuple[Any, ...]]:
        """The lines of a table without their seals, which are checked."""
        for *line, seal in self.connection.execute(f"SELECT * FROM {table} {where}"):
            if seal_of(*line) != seal:
                raise self._damaged(f"a line of table {table!r} is not what was written: {_short(line)}")
            yield tuple(line)

    def _read_headers(self) -> dict[int, Header]:
        lines = self.lines("header")
        return {n: Header(kind=kind, dtype=dtype, shape=tuple(msgspec.json.decode(shape))) for n, kind, dtype, shape in lines}

    def _read_removed(self) -> frozenset[int]:
        return frozenset(row_id for _, row_ids in self.lines("removal") for row_id in array("q", row_ids))

    def read_records(self) -> dict[int, StepRecord]:
        return {line[0]: _record(line) for line in self.lines("record", "ORDER BY step")}

    def read_counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.guarded("counters", lambda: dict(self.lines("counter")))
        return counters

    def _read_rows(self, hidden: set[int]) -> dict[int, SavedRow]:
        return {line[0]: SavedRow(row=_row(line)) for line in self.lines("row", "ORDER BY id") if line[0] not in hidden}

    def _read_cells(self, rows: Mapping[int, SavedRow], runs: Iterable[tuple[int, int]]) -> None:
        query = "SELECT id, header, seal, data FROM cell WHERE id >= ? AND id < ? ORDER BY id"
        for first, stop in runs:
            for cell_id, header, seal, data in self.connection.execute(query, (first << NAME_BITS, stop << NAME_BITS)):
                row = rows.get(cell_id >> NAME_BITS)
                name = self.names.get(cell_id & (1 << NAME_BITS) - 1)
                if row is None or name is None:
                    raise self._damaged(f"a value of field {name!r} belongs to row {cell_id >> NAME_BITS}, which is missing")
                is_whole = isinstance(data, bytes) and header in self._headers and seal_of_cell(cell_id, header, data) == seal
                if not is_whole:
                    raise self._damaged(f"the value of field {name!r} of key {row.row.key!r} is not what was written")
                row.cells[name] = self._headers[header], data

    def query(self, what: str, query: str) -> list[tuple[Any, ...]]:
        """The answer to any query; no seals are checked."""
        lines: list[tuple[Any, ...]] = self.guarded(what, lambda: self.connection.execute(query).fetchall())
        return lines

    def read_leases(self) -> dict[tuple[str, int | None], LeaseEntry]:
        leases = [_lease(line) for line in self.lines("lease")]
        return {(lease.uid, lease.session_id): lease for lease in leases}

    def _read_turns(self) -> dict[tuple[str, int], list[Cells]]:
        turns: dict[tuple[str, int], list[Cells]] = {}
        for _, uid, session_id, turn, columns in self.lines("turn", "ORDER BY id"):
            of_session = turns.setdefault((uid, session_id), [])
            if turn != len(of_session):
                raise self._damaged(f"turn {len(of_session)} of session {uid}_{session_id} is missing")
            of_session.append({name: _cell(content) for name, content in _unpack(columns).items()})
        return turns

    # --- errors

    def guarded(self, what: str, read: Callable[[], Any]) -> Any:
        """A file that SQLite cannot follow, or text and blobs that are none, are damage; the message says of what."""
        try:
            return read()
        except (sqlite3.DatabaseError, msgspec.DecodeError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, JournalDamagedError):
                raise
            raise self._damaged(f"its {what} cannot be read ({error})") from error

    def _damaged(self, what: str) -> JournalDamagedError:
        return JournalDamagedError(f"{self._path} is damaged: {what}; {NEXT_MOVE}")


def _gaps(hidden: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The ranges of row numbers between the hidden ones."""
    start = 0
    for first, stop in runs_of(sorted(hidden)):
        if first > start:
            yield start, first
        start = stop
    yield start, _LAST_ROW


def _row(line: tuple[Any, ...]) -> RowEntry:
    row_id, partition_id, key, uid, session_id, attempt, incarnation, tag = line
    return RowEntry(
        row_id=row_id,
        partition_id=partition_id,
        key=key,
        uid=uid,
        session_id=session_id,
        attempt=attempt,
        incarnation=incarnation,
        tag=_unpack(tag),
    )


def _lease(line: tuple[Any, ...]) -> LeaseEntry:
    uid, session_id, attempt, incarnation, is_open = line
    session = None if session_id == GROUP_SESSION else session_id
    return LeaseEntry(uid=uid, session_id=session, attempt=attempt, incarnation=incarnation, is_open=bool(is_open))


def _record(line: tuple[Any, ...]) -> StepRecord:
    step, partition_id, tries, content = line
    listed = {name: tuple(entries) for name, entries in _unpack(content).items()}
    return StepRecord(step=step, partition_id=partition_id, tries=tries, **listed)


def _cell(content: list[Any]) -> tuple[Header, bytes]:
    kind, dtype, shape, data = content
    return Header(kind=kind, dtype=dtype, shape=tuple(shape)), data


def _short(line: list[Any]) -> str:
    shown = ", ".join(f"{len(value)} bytes" if isinstance(value, bytes) else repr(value) for value in line)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."
