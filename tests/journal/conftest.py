"""Entries to write, random histories of them, and a journal in a folder of its own."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import strategies as st

from asyncrl.journal.entries import (
    Entry,
    Header,
    LeaseEntry,
    Op,
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
from asyncrl.journal.sqlite import SqliteJournal, open_journal

OpenJournal = Callable[..., SqliteJournal]
INT64 = Header(kind="ragged", dtype="int64")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """In memory where that can be: for hundreds of journals, when what a disk does is not the subject."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def open_one(path: Path) -> Iterator[OpenJournal]:
    """`open_one()` opens the journal at `path`; what is still open at the end is closed."""
    opened: list[SqliteJournal] = []

    def start(sync: Literal["normal", "full"] = "normal") -> SqliteJournal:
        opened.append(open_journal(path, sync=sync))
        return opened[-1]

    yield start
    for journal in opened:
        journal.close()


def row(row_id: int, *, tag: str = "finished") -> RowEntry:
    return RowEntry(
        row_id=row_id,
        partition_id="train",
        key=f"u{row_id}_0_0",
        uid=f"u{row_id}",
        session_id=0,
        attempt=0,
        incarnation=1,
        tag={"status": tag},
    )


def column(field: str, values: dict[int, bytes], header: Header = INT64) -> PutColumn:
    """row id -> bytes"""
    bounds = [0]
    for value in values.values():
        bounds.append(bounds[-1] + len(value))
    return PutColumn(field, header, [*values], memoryview(b"".join(values.values())), bounds)


def whole(row_id: int, value: bytes | None = None) -> list[Op]:
    """An entry that puts one row with one value, told by its number."""
    return [PutRows([row(row_id)]), column("responses", {row_id: value or row_id.to_bytes(8, "little") * 4})]


async def write(journal: SqliteJournal, entries: Sequence[Entry]) -> None:
    """All at once, acknowledged."""
    await asyncio.gather(*[journal.append(entry) for entry in entries])


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The functions above: `make.row(1)`, `make.whole(1)`, `await make.write(journal, entries)`."""
    return SimpleNamespace(row=row, column=column, whole=whole, write=write)


# --- random histories -------------------------------------------------------------------------------------------------------------


DTYPES = [
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
]
HEADERS = st.one_of(
    st.just(Header(kind="object")),
    st.builds(
        Header,
        kind=st.sampled_from(["ragged", "stacked"]),
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    ),
)
TAGS = st.dictionaries(
    st.text(max_size=4),
    st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(max_size=5)),
    max_size=3,
)
UIDS = st.sampled_from(["a", "b", "ü_/"])
SESSIONS = st.integers(0, 2)
FIELDS = st.sampled_from(["responses", "response_mask", "extra"])
VALUES = st.one_of(st.just(b""), st.binary(max_size=20), st.integers(1, 60000).map(lambda size: bytes([size % 251]) * size))
SMALL = st.integers(0, 3)


@dataclass
class History:
    """Draws entries that a store could append; knows which rows live and how many turns a session has."""

    data: st.DataObject
    next_row_id: int = 1
    rows: list[int] = field(default_factory=list)
    turns: dict[tuple[str, int], int] = field(default_factory=dict)
    steps: int = 0

    def entry(self) -> Entry:
        return [self._op() for _ in range(self.data.draw(st.integers(1, 4)))]

    def _op(self) -> Op:
        kinds = [self._rows, self._rows, self._leases, self._no_leases, self._turn, self._no_turns, self._record, self._no_records]
        kinds += [self._counters]
        if self.rows:
            kinds += [self._column, self._column, self._removal, self._again]
        return self.data.draw(st.sampled_from(kinds))()

    def _row(self, row_id: int) -> RowEntry:
        draw = self.data.draw
        session_id = draw(st.none() | SESSIONS)
        return RowEntry(
            row_id=row_id,
            partition_id=draw(st.sampled_from(["train", "val"])),
            key=draw(st.text(max_size=4)),
            uid=draw(UIDS),
            session_id=session_id,
            attempt=draw(SMALL),
            incarnation=draw(SMALL),
            tag=draw(TAGS),
        )

    def _rows(self) -> Op:
        first = self.next_row_id + self.data.draw(st.integers(0, 2))  # numbers may be left out
        row_ids = range(first, first + self.data.draw(st.integers(1, 90)))
        self.next_row_id = row_ids.stop
        self.rows += row_ids
        told = self._row(first)
        return PutRows([told._replace(row_id=number) for number in row_ids])

    def _again(self) -> Op:
        return PutRows([self._row(self.data.draw(st.sampled_from(self.rows)))])

    def _some(self, most: int) -> list[int]:
        first = self.data.draw(st.integers(0, len(self.rows) - 1))
        return self.rows[first : first + self.data.draw(st.integers(1, most))]

    def _column(self) -> Op:
        row_ids = self._some(80)
        value, other = self.data.draw(VALUES), self.data.draw(VALUES)
        parts = [other if position % 2 else value for position in range(len(row_ids))]
        bounds = [0]
        for part in parts:
            bounds.append(bounds[-1] + len(part))
        return PutColumn(self.data.draw(FIELDS), self.data.draw(HEADERS), row_ids, memoryview(b"".join(parts)), bounds)

    def _removal(self) -> Op:
        gone = self._some(100)
        self.rows = [row_id for row_id in self.rows if row_id not in gone]
        return RemoveRows([*reversed(gone), *self.data.draw(st.sampled_from([[], [gone[0]]]))])

    def _leases(self) -> Op:
        draw = self.data.draw
        return PutLeases(
            [
                LeaseEntry(
                    uid=draw(UIDS),
                    session_id=draw(st.none() | SESSIONS),
                    attempt=draw(SMALL),
                    incarnation=draw(SMALL),
                    is_open=draw(st.booleans()),
                )
                for _ in range(draw(st.integers(0, 3)))
            ]
        )

    def _no_leases(self) -> Op:
        return RemoveLeases(self.data.draw(st.lists(UIDS, max_size=2)))

    def _turn(self) -> Op:
        session = self.data.draw(UIDS), self.data.draw(SESSIONS)
        turn = self.turns.get(session, 0)
        self.turns[session] = turn + 1
        columns = self.data.draw(
            st.dictionaries(FIELDS, st.tuples(HEADERS, VALUES.map(lambda value: memoryview(value))), max_size=3)
        )
        return PutTurn(*session, turn, columns)

    def _no_turns(self) -> Op:
        sessions = self.data.draw(st.lists(st.tuples(UIDS, st.none() | SESSIONS), max_size=2))
        for uid, session_id in sessions:
            for key in [key for key in self.turns if key[0] == uid and session_id in (None, key[1])]:
                del self.turns[key]
        return RemoveTurns(sessions)

    def _record(self) -> Op:
        draw = self.data.draw
        self.steps += 1
        return PutRecord(
            StepRecord(
                step=draw(st.integers(max(1, self.steps - 3), self.steps)),
                partition_id="train",
                uids=tuple(draw(st.lists(UIDS, max_size=2))),
                keys=tuple(draw(st.lists(st.text(max_size=3), max_size=2))),
                row_ids=tuple(self._some(30)) if self.rows else (),
                tries=draw(SMALL),
            )
        )

    def _no_records(self) -> Op:
        return RemoveRecords(self.data.draw(st.lists(st.integers(1, self.steps + 1), max_size=2)))

    def _counters(self) -> Op:
        names = st.sampled_from(["cursor", "admitted", "dropped/no_signal", "purged_step"])
        return PutCounters(self.data.draw(st.dictionaries(names, st.integers(0, 2**62), max_size=2)))


@pytest.fixture(scope="session")
def make_history() -> Callable[[st.DataObject], Any]:
    return History
