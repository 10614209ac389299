"""Group commits, acknowledgements and what happens beside them."""

import asyncio
import functools
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.errors import JournalWriteError
from asyncrl.journal import reading, writer
from asyncrl.journal.entries import PutCounters, RemoveRows
from asyncrl.journal.sqlite import SqliteJournal, open_journal

OpenJournal = Callable[..., SqliteJournal]


async def test_many_entries_of_one_loop_turn_take_few_commits_and_keep_their_order(
    open_one: OpenJournal, make: SimpleNamespace
) -> None:
    journal = open_one()
    order: list[int] = []
    futures = [journal.append([PutCounters({"cursor": number})]) for number in range(500)]
    for number, future in enumerate(futures):
        future.add_done_callback(functools.partial(note, order, number))
    assert journal.stats()["journal_waiting"] > 0
    await asyncio.gather(*futures)
    await asyncio.sleep(0)
    assert order == [*range(500)]
    assert journal.stats()["journal_commits"] < 100
    assert journal.stats()["journal_waiting"] == 0
    journal.close()
    assert open_one().load().counters == {"cursor": 499}


def note(order: list[int], number: int, _: object) -> None:
    order.append(number)


async def test_who_stops_waiting_disturbs_nobody(open_one: OpenJournal, make: SimpleNamespace) -> None:
    journal = open_one()
    futures = [journal.append(make.whole(number)) for number in range(1, 21)]
    for future in futures[::2]:
        future.cancel()
    await asyncio.gather(*futures[1::2])
    waiter = asyncio.create_task(wait_for(journal, make.whole(21)))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await journal.append(make.whole(22))
    assert [*journal.load().rows] == [*range(1, 23)]


async def wait_for(journal: SqliteJournal, entry: object) -> None:
    await journal.append(entry)  # type: ignore[arg-type]


async def test_close_writes_what_is_queued(open_one: OpenJournal, make: SimpleNamespace, path: Path) -> None:
    journal = open_one()
    futures = [journal.append(make.whole(number)) for number in range(1, 200)]
    await asyncio.to_thread(journal.close)
    assert journal.stats()["journal_waiting"] == 0
    assert sorted(file.name for file in path.parent.iterdir()) == ["journal.db", "journal.lock"]
    await asyncio.gather(*futures)
    journal.close()
    with pytest.raises(JournalWriteError, match="closed"):
        await journal.append(make.whole(200))
    assert len(open_one().load().rows) == 199


def test_a_loop_that_is_gone_does_not_stop_the_journal(open_one: OpenJournal, make: SimpleNamespace) -> None:
    journal = open_one()

    async def leave() -> None:
        journal.append(make.whole(1))

    asyncio.run(leave())
    asyncio.run(make.write(journal, [make.whole(2)]))
    assert [*journal.load().rows] == [1, 2]


async def test_incarnations_are_counted_at_each_opening(open_one: OpenJournal) -> None:
    for count in range(3):
        journal = open_one()
        assert journal.load().incarnation == count
        journal.close()


async def test_removed_rows_are_deleted_while_nothing_else_is_to_do(
    open_one: OpenJournal, make: SimpleNamespace, path: Path
) -> None:
    journal = open_one()
    await make.write(journal, [make.whole(number) for number in range(1, 200)])
    await journal.append([RemoveRows(range(1, 190))])
    deadline = time.monotonic() + 30
    while count(path, "removal"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert count(path, "row") == count(path, "cell") == 10
    assert journal.load().next_row_id == 200


def count(path: Path, table: str) -> int:
    with reading.open_reader(path) as reader:
        number: int = reader.query(table, f"SELECT COUNT(*) FROM {table}")[0][0]
        return number


async def test_the_highest_row_number_is_kept_after_all_rows_are_gone(
    open_one: OpenJournal, make: SimpleNamespace, path: Path
) -> None:
    journal = open_one()
    await make.write(journal, [make.whole(7), [RemoveRows([7])]])
    journal.close()
    for _ in range(2):
        journal = open_one()
        assert journal.load().next_row_id == 8
        journal.close()


async def test_the_file_and_its_log_stay_flat(
    open_one: OpenJournal, make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one moment of rest, and with small limits: what is due is done between the commits."""
    monkeypatch.setattr(writer, "CHECKPOINT_BYTES", 1 << 20)
    monkeypatch.setattr(writer, "MOST_REMOVED_ROWS", 64)
    monkeypatch.setattr(writer, "IDLE_S", 60.0)
    journal = open_one()
    sizes = []
    for step in range(60):
        numbers = range(1 + 16 * step, 17 + 16 * step)
        await make.write(journal, [make.whole(number, bytes(4000)) for number in numbers])
        await journal.append([RemoveRows(numbers)])
        sizes.append(journal.stats()["journal_bytes"])
    assert max(sizes[20:]) <= 1.05 * max(sizes[:20])


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """commits(): each commit since the call before, and each change of how the following ones are synced, in order."""
    lines: list[str] = []
    watched = sqlite3.connect

    def connect(*args: object, **kwargs: object) -> sqlite3.Connection:
        connection = watched(*args, **kwargs)  # type: ignore[call-overload]
        connection.set_trace_callback(lines.append)
        return connection  # type: ignore[no-any-return]

    def taken() -> list[str]:
        told = [line for line in lines if line == "COMMIT" or line.startswith("PRAGMA synchronous")]
        lines.clear()
        return told

    monkeypatch.setattr(sqlite3, "connect", connect)
    return taken


NORMAL, FULL = "PRAGMA synchronous = NORMAL", "PRAGMA synchronous = FULL"


@pytest.mark.parametrize("sync", ["normal", "full"])
async def test_a_synced_entry_is_committed_with_a_sync_and_others_as_configured(
    sync: str, commits: Callable[[], list[str]], open_one: OpenJournal, make: SimpleNamespace
) -> None:
    journal = open_one(sync)
    commits()
    for is_synced in (False, True, False):
        await journal.append(make.whole(1), synced=is_synced)
    journal.close()
    expected = [NORMAL, "COMMIT", FULL, "COMMIT", NORMAL, "COMMIT"] if sync == "normal" else [FULL, "COMMIT", "COMMIT", "COMMIT"]
    assert commits() == expected


async def test_what_is_not_synced_is_synced_now_and_then_so_that_it_does_not_pile_up(
    commits: Callable[[], list[str]], open_one: OpenJournal, make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_one()
    await journal.append(make.whole(1, bytes(9000)), synced=True)
    monkeypatch.setattr(writer, "SYNC_BYTES", 20_000)
    commits()
    for number in range(2, 8):
        await journal.append(make.whole(number, bytes(9000)))
    journal.close()
    told = commits()
    assert told.count(FULL) == told.count(NORMAL) >= 1
    assert told[:2] == [NORMAL, "COMMIT"]


def test_a_forked_child_neither_writes_nor_disturbs(open_one: OpenJournal, make: SimpleNamespace, path: Path) -> None:
    journal = open_one()
    asyncio.run(make.write(journal, [make.whole(1)]))
    child = os.fork()
    if not child:
        code = 1
        try:
            with pytest.raises(JournalWriteError, match="this is a fork"):
                asyncio.run(make.write(journal, [make.whole(2)]))
            journal.close()
            journal._writer._connection.close()  # what the interpreter does at its end
            journal._lock.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    asyncio.run(make.write(journal, [make.whole(3)]))
    assert path.with_name("journal.db-wal").exists()
    assert opened_elsewhere(path) == "JournalInUseError"
    assert [*journal.load().rows] == [1, 3]


def opened_elsewhere(path: Path) -> str:
    """What another process sees that opens the journal: the name of the error, or nothing."""
    reader, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            open_journal(path)
            os.write(sender, b"opened")
        except BaseException as error:
            os.write(sender, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(sender)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


def test_it_is_read_by_others_while_it_is_written_and_after_a_kill(path: Path, make: SimpleNamespace) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            journal = open_journal(path)
            asyncio.run(make.write(journal, [make.whole(number) for number in range(1, 6)]))
            os.write(tell, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.read(ready, 1)
    assert [*reading.load(path).rows] == [1, 2, 3, 4, 5]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert path.with_name("journal.db-wal").stat().st_size > 0
    assert [*reading.load(path).rows] == [1, 2, 3, 4, 5]
    journal = open_journal(path)
    assert [*journal.load().rows] == [1, 2, 3, 4, 5]
    journal.close()


def test_kill_at_any_moment_keeps_every_acknowledged_entry_whole(path: Path, make: SimpleNamespace) -> None:
    """The child tells each acknowledged number through a pipe; it is killed after some of them. Ten times over the same journal."""
    kept = 0
    for cycle in range(10):
        reader, sender = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            try:
                asyncio.run(fill(path, kept, sender, make))
            finally:
                os._exit(1)
        os.close(sender)
        told = b""
        while len(told) < 4 * (3 + 5 * cycle):
            told += os.read(reader, 4096)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            told += pipe.read()
        acknowledged = int.from_bytes(told[-4:], "little")
        saved = reading.load(path)
        assert [*saved.rows] == [*range(1, saved.next_row_id)]
        assert all(held.cells["responses"][1] == bytes([number % 251]) * 3000 for number, held in saved.rows.items())
        assert saved.counters["cursor"] == len(saved.rows) >= acknowledged
        kept = len(saved.rows)
    assert kept > 100


async def fill(path: Path, kept: int, sender: int, make: SimpleNamespace) -> None:
    journal = open_journal(path)
    assert len(journal.load().rows) == kept

    async def put(number: int) -> None:
        await journal.append([*make.whole(number, bytes([number % 251]) * 3000), PutCounters({"cursor": number})])
        os.write(sender, number.to_bytes(4, "little"))

    for first in range(kept + 1, 1 << 20, 3):
        await asyncio.gather(*[put(number) for number in range(first, first + 3)])
