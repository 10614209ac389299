"""Every reason not to open or read a journal is one line that names the file and the reason; nothing that is there is touched."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.errors import JournalDamagedError, JournalError, JournalFormatError, JournalInUseError
from asyncrl.journal import reading
from asyncrl.journal.entries import Header, LeaseEntry, PutCounters, PutLeases, PutRecord, PutTurn, StepRecord
from asyncrl.journal.sqlite import SqliteJournal, open_journal

OpenJournal = Callable[..., SqliteJournal]


@pytest.fixture
def written(path: Path, make: SimpleNamespace) -> Path:
    """A closed journal with something in every table."""
    journal = open_journal(path)
    turn = {"responses": (Header(kind="ragged", dtype="int64"), memoryview(bytes(range(200))))}
    lease = LeaseEntry(uid="u1", session_id=None, attempt=0, incarnation=0, is_open=True)
    record = StepRecord(step=1, partition_id="train", uids=("u1",), keys=("u1_0_0",), row_ids=(1,))
    others = [[PutTurn("u1", 0, 0, turn)], [PutLeases([lease])], [PutRecord(record)], [PutCounters({"admitted": 1})]]
    rows = [make.whole(number, bytes([number]) * 999) for number in range(1, 100)]
    asyncio.run(make.write(journal, [*rows, *others]))
    journal.close()
    return path


def refusal(path: Path, kind: type[JournalError]) -> str:
    with pytest.raises(kind) as caught:
        open_journal(path)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert str(path) in message
    assert "\n" not in message
    return message


# --- the place --------------------------------------------------------------------------------------------------------------------


def test_a_second_opening_is_refused_in_this_process_and_in_another(written: Path, open_one: OpenJournal) -> None:
    journal = open_one()
    assert "in use" in refusal(written, JournalInUseError)
    code = f"from pathlib import Path; from asyncrl.journal.sqlite import open_journal; open_journal(Path({str(written)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "JournalInUseError" in done.stderr
    assert len(journal.load().rows) == 99
    journal.close()
    open_one()


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert f"{tmp_path / 'no'} does not exist" in refusal(tmp_path / "no" / "journal.db", JournalError)


def test_a_folder_in_the_file_s_place(path: Path) -> None:
    path.mkdir()
    assert "it is a folder" in refusal(path, JournalError)


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Root may write everything, so it becomes somebody else for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that another user can reach."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder
        folder.chmod(0o777)


def test_a_folder_that_may_not_be_written(public_folder: Path) -> None:
    public_folder.chmod(0o555)
    with as_nobody(public_folder):
        assert f"{public_folder} may not be written" in refusal(public_folder / "journal.db", JournalError)


def test_a_file_that_may_not_be_written(written: Path, public_folder: Path) -> None:
    path = public_folder / "journal.db"
    shutil.copyfile(written, path)
    path.chmod(0o444)
    with as_nobody(public_folder):
        assert f"{path} may not be written" in refusal(path, JournalError)


def test_a_disk_that_is_full_says_so(path: Path) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path; from asyncrl.journal.sqlite import open_journal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try: open_journal(Path(sys.argv[1]))\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{path} cannot be opened: ")
    assert done.stdout.endswith(", so the disk is full or fails, or a file would be too large\n")
    open_journal(path).close()


def test_a_left_over_journal_in_a_folder_that_may_not_be_written_can_be_read(
    path: Path, public_folder: Path, open_one: OpenJournal, make: SimpleNamespace
) -> None:
    journal = open_one()
    asyncio.run(make.write(journal, [make.whole(1), make.whole(2)]))
    for name in ("journal.db", "journal.db-wal"):
        subprocess.run(["cp", path.with_name(name), public_folder / name], check=True)
    public_folder.chmod(0o555)
    with as_nobody(public_folder):
        assert [*reading.load(public_folder / "journal.db").rows] == [1, 2]
    assert sorted(file.name for file in public_folder.iterdir()) == ["journal.db", "journal.db-wal"]


# --- the file ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"not a database, but a long enough text to be one" * 100, os.urandom(70000)])
def test_a_file_that_is_no_database(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    message = refusal(path, JournalFormatError)
    assert "not a journal of asyncrl" in message
    assert path.read_bytes() == content


def test_a_database_of_somebody_else(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    assert "a database, but not a journal of asyncrl" in refusal(path, JournalFormatError)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("version", "word"), [(3, "newer"), (1, "older")])
def test_a_journal_of_another_version(written: Path, version: int, word: str) -> None:
    with closing(sqlite3.connect(written)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    message = refusal(written, JournalFormatError)
    assert f"format {version}" in message
    assert "reads format 2" in message
    assert word in message


@pytest.mark.parametrize("size", [0, 1, 20, 100, 5000, 32768, 40000, 100000])
def test_a_truncated_file(written: Path, size: int) -> None:
    os.truncate(written, size)
    with pytest.raises((JournalDamagedError, JournalFormatError)) as caught:
        open_journal(written)
    assert str(written) in str(caught.value)
    assert written.stat().st_size == size


def test_a_missing_file_beside_its_log_is_not_made_anew(path: Path) -> None:
    path.with_name("journal.db-wal").write_bytes(b"x")
    assert "is missing" in refusal(path, JournalDamagedError)


def test_a_process_that_died_while_it_made_the_file_leaves_no_trace(path: Path, open_one: OpenJournal) -> None:
    for suffix in (".new", ".new-wal", ".new-journal"):
        path.with_name(f"journal.db{suffix}").write_bytes(b"half")
    assert open_one().load().rows == {}
    assert sorted(file.name for file in path.parent.iterdir() if ".new" in file.name) == []


# --- what it holds ----------------------------------------------------------------------------------------------------------------


def test_a_changed_value_is_named(written: Path) -> None:
    content = written.read_bytes()
    position = content.index(bytes([42]) * 999)
    written.write_bytes(content[: position + 500] + b"\x00" + content[position + 501 :])
    journal = open_journal(written)
    with pytest.raises(JournalDamagedError, match=r"journal\.db is damaged: the value of field 'responses' of key 'u42_0_0'"):
        journal.load()
    journal.close()


def test_a_page_that_lost_values_is_noticed_at_opening(written: Path) -> None:
    """One count in one page, and half of its values would be gone without a word."""
    content = bytearray(written.read_bytes())
    page = content.index(bytes([42]) * 999) // 32768 * 32768
    assert content[page] == 0x0D, "a leaf of a table"
    content[page + 3 : page + 5] = (int.from_bytes(content[page + 3 : page + 5]) // 2).to_bytes(2)
    written.write_bytes(content)
    assert "is damaged: " in refusal(written, JournalDamagedError)


CHANGES = {
    "a value moved": "UPDATE cell SET id = id + 1000000 WHERE id >> 12 = 99",
    "a value exchanged": "UPDATE cell SET data = (SELECT data FROM cell WHERE id >> 12 = 4) WHERE id >> 12 = 5",
    "a whole value elsewhere": "UPDATE cell SET (seal, data) = (SELECT seal, data FROM cell WHERE id >> 12 = 4) WHERE id >> 12 = 6",
    "a value as text": "UPDATE cell SET data = 'x' WHERE id >> 12 = 5",
    "a value's header": "UPDATE cell SET header = 7 WHERE id >> 12 = 5",
    "a row lost": "DELETE FROM row WHERE id = 5",
    "a row's key": "UPDATE row SET key = 'u6_0_0' WHERE id = 5",
    "a row's tag": "UPDATE row SET tag = (SELECT x'80') WHERE id = 5",
    "a row's number": "UPDATE row SET id = 500 WHERE id = 99",
    "text that is none": "UPDATE row SET uid = CAST(x'ff' AS TEXT) WHERE id = 5",
    "a field's name": "UPDATE name SET name = 'prompts'",
    "a header's dtype": "UPDATE header SET dtype = 'float64'",
    "a header's shape": "UPDATE header SET shape = '['",
    "a lease": "UPDATE lease SET attempt = 1",
    "a turn": "UPDATE turn SET turn = 1",
    "a turn's columns": "UPDATE turn SET columns = x'c1'",
    "a record": "UPDATE record SET tries = tries + 1",
    "a counter": "UPDATE counter SET value = 2",
    "the incarnation": "UPDATE meta SET value = 9 WHERE name = 'incarnation'",
    "a removal": "INSERT INTO removal VALUES (1, x'0500000000000000', 1)",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_line_that_is_not_what_was_written_is_refused(written: Path, change: str) -> None:
    with closing(sqlite3.connect(written)) as connection:
        connection.execute(change)
        connection.commit()
    with pytest.raises(JournalDamagedError, match="is damaged: "):
        reading.load(written)
    with pytest.raises(JournalDamagedError, match="is damaged: "), opened(written) as journal:
        journal.load()


@contextmanager
def opened(path: Path) -> Iterator[SqliteJournal]:
    journal = open_journal(path)
    try:
        yield journal
    finally:
        journal.close()


def test_any_changed_byte_of_the_file_is_refused_or_changes_nothing(written: Path, memory_folder: Path) -> None:
    """One byte at a time, some hundred of them: never an error of another kind, and never other data."""
    content, expected = written.read_bytes(), reading.load(written)
    path = memory_folder / "journal.db"
    found: dict[str, int] = {}
    for position in range(0, len(content), 1009):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x41]) + content[position + 1 :])
        try:
            with opened(path) as journal:
                saved = journal.load()
            saved.incarnation = expected.incarnation
            assert saved == expected
            found["same"] = found.get("same", 0) + 1
        except (JournalDamagedError, JournalFormatError) as error:
            found[type(error).__name__] = found.get(type(error).__name__, 0) + 1
    assert found["JournalDamagedError"] > 50
