"""When the disk says no: one error for everybody, nothing acknowledged is lost, the loop goes on, and what is there opens again."""

import asyncio
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.errors import JournalWriteError
from asyncrl.journal import reading, writer
from asyncrl.journal.entries import PutCounters, PutTurn, RemoveRows
from asyncrl.journal.sqlite import SqliteJournal, open_journal

OpenJournal = Callable[..., SqliteJournal]
LARGE = bytes(100_000)


async def fill(journal: SqliteJournal, make: SimpleNamespace) -> int:
    """Append until it fails, three at a time; returns how many were acknowledged. Checks what the failure does."""
    acknowledged = 0
    for first in range(1, 1 << 20, 3):
        futures = [journal.append(make.whole(number, LARGE)) for number in range(first, first + 3)]
        results = await asyncio.gather(*futures, return_exceptions=True)
        acknowledged += sum(result is None for result in results)
        if any(results):
            break
    assert journal.failure is not None
    assert all(isinstance(result, JournalWriteError) for result in results if result is not None)
    for _ in range(2):
        with pytest.raises(JournalWriteError, match=r"journal\.db cannot be written: .*; what was acknowledged is kept"):
            await journal.append(make.whole(1 << 30))
    return acknowledged


def check_kept(path: Path, acknowledged: int) -> None:
    journal = open_journal(path)
    rows = journal.load().rows
    journal.close()
    assert [*rows] == [*range(1, len(rows) + 1)]
    assert len(rows) >= acknowledged > 0
    assert all(held.cells["responses"][1] == LARGE for held in rows.values())


@pytest.mark.parametrize("sync", ["normal", "full"])
def test_a_full_file_system(sync: str, make: SimpleNamespace, tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", tmp_path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a file system can only be mounted by root")
    path = tmp_path / "journal.db"
    try:
        journal = open_journal(path, sync=sync)  # type: ignore[arg-type]
        acknowledged = asyncio.run(fill(journal, make))
        assert "SQLITE_FULL" in str(journal.failure)
        journal.close()
        subprocess.run(["mount", "-o", "remount,size=20m", tmp_path], check=True)
        check_kept(path, acknowledged)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_limit_on_file_sizes(path: Path, make: SimpleNamespace) -> None:
    """In a child, for the limit is of a whole process."""
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
            journal = open_journal(path)
            acknowledged = asyncio.run(fill(journal, make))
            assert "SQLITE_IOERR_WRITE" in str(journal.failure)
            journal.close()
            path.with_suffix(".count").write_text(str(acknowledged))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    check_kept(path, int(path.with_suffix(".count").read_text()))


@pytest.fixture
def limited(open_one: OpenJournal) -> SqliteJournal:
    """A journal whose file may not grow beyond 60 pages."""
    journal = open_one()
    journal._writer._connection.execute("PRAGMA max_page_count = 60")
    return journal


async def test_a_database_that_may_not_grow(limited: SqliteJournal, path: Path, make: SimpleNamespace) -> None:
    acknowledged = await fill(limited, make)
    assert "SQLITE_FULL" in str(limited.failure)
    await asyncio.to_thread(limited.close)
    await asyncio.to_thread(check_kept, path, acknowledged)


async def test_everybody_who_waits_gets_the_failure_as_an_error_of_its_own(limited: SqliteJournal, make: SimpleNamespace) -> None:
    futures = [limited.append(make.whole(number, LARGE)) for number in range(1, 400)]
    futures[0].cancel()
    results = await asyncio.gather(*futures[1:], return_exceptions=True)
    errors = [result for result in results if result is not None]
    assert errors
    assert len({id(error) for error in errors}) == len(errors)
    assert limited.stats()["journal_waiting"] == 0


@pytest.mark.parametrize("gone", ["journal.db", "journal.db-wal"])
async def test_a_file_removed_under_us_is_noticed_before_anything_more_is_acknowledged(
    gone: str, open_one: OpenJournal, path: Path, make: SimpleNamespace
) -> None:
    journal = open_one()
    await journal.append(make.whole(1))
    path.with_name(gone).unlink()
    with pytest.raises(JournalWriteError, match="removed or replaced while it was open"):
        await journal.append(make.whole(2))
    journal.close()


async def test_a_file_replaced_under_us_is_noticed(open_one: OpenJournal, path: Path, make: SimpleNamespace) -> None:
    journal = open_one()
    subprocess.run(["cp", path, f"{path}.copy"], check=True)  # noqa: ASYNC221  a moment
    os.replace(f"{path}.copy", path)
    with pytest.raises(JournalWriteError, match="removed or replaced"):
        await journal.append(make.whole(1))
    journal.close()


UNWRITABLE = {
    "a number that no journal holds": lambda make: [PutCounters({"cursor": 1 << 70})],
    "a tag that cannot be packed": lambda make: [make_row_with({"x": 1 << 70}, make)],
    "text that is none": lambda make: [PutCounters({"\ud800": 1})],
    "a turn out of order": lambda make: [PutTurn("u1", 0, 5, {})],
    "no operation": lambda make: ["put"],
}


def make_row_with(tag: dict[str, int], make: SimpleNamespace) -> object:
    [put, _] = make.whole(9)
    return type(put)([put.rows[0]._replace(tag=tag)])


@pytest.mark.parametrize("entry", UNWRITABLE.values(), ids=UNWRITABLE)
async def test_an_entry_that_cannot_be_written_is_the_end_and_is_told(
    entry: Callable[[SimpleNamespace], list[object]], open_one: OpenJournal, path: Path, make: SimpleNamespace
) -> None:
    journal = open_one()
    await journal.append(make.whole(1))
    with pytest.raises(JournalWriteError, match=r"journal\.db cannot be written: "):
        await journal.append([*make.whole(2), *entry(make)])  # type: ignore[list-item]
    with pytest.raises(JournalWriteError):
        await journal.append(make.whole(3))
    assert [*reading.load(path).rows] == [1]


async def test_a_failure_while_tidying_up_fails_the_next_entry(
    open_one: OpenJournal, path: Path, make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "IDLE_S", 0.0)
    journal = open_one()
    journal._writer._connection.execute(
        "CREATE TEMP TRIGGER no BEFORE DELETE ON row BEGIN SELECT RAISE(ABORT, 'it is broken'); END"
    )
    await make.write(journal, [make.whole(1), [RemoveRows([1])]])
    with pytest.raises(JournalWriteError, match="it is broken"):
        await append_for_ever(journal, make)
    await asyncio.to_thread(journal.close)
    assert 1 not in reading.load(path).rows


async def append_for_ever(journal: SqliteJournal, make: SimpleNamespace) -> None:
    for number in range(2, 1 << 20):
        await journal.append(make.whole(number))
