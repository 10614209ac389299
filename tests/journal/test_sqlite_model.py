"""Whatever is appended, what comes back is what the operations mean; and what a crash leaves is what a first part of them means."""

import asyncio
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.journal import opening, reading, tables
from asyncrl.journal.entries import Entry, Saved
from asyncrl.journal.model import MemoryJournal
from asyncrl.journal.sqlite import open_journal
from asyncrl.journal.tables import Tables

MakeHistory = Callable[[st.DataObject], Any]


@contextmanager
def journal_path() -> Iterator[Path]:
    """Under /dev/shm where there is one: hundreds of journals are made, and what a disk does is not the subject here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder) / "journal.db"


def meant(entries: Sequence[Entry], *, incarnation: int, weights_step: int = 0) -> Saved:
    """What a journal of these entries gives back."""
    saved = Saved(incarnation=incarnation)
    for entry in entries:
        saved.apply(entry)
    return MemoryJournal(saved=saved).load(weights_step)


@given(data=st.data(), sync=st.sampled_from(["normal", "full"]))
@settings(max_examples=60)
def test_what_comes_back_is_what_the_operations_mean(make_history: MakeHistory, data: st.DataObject, sync: Any) -> None:
    history = make_history(data)
    written: list[Entry] = []

    async def write(path: Path, entries: Sequence[Entry]) -> None:
        journal = await asyncio.to_thread(open_journal, path, sync=sync)
        weights_step = data.draw(st.integers(0, 5))
        found = meant(written, incarnation=opened, weights_step=weights_step)
        assert (journal.load(weights_step), journal.steps()) == (found, found.steps)
        acknowledged = [journal.append(entry, synced=data.draw(st.booleans())) for entry in entries]
        await asyncio.gather(*acknowledged)
        written.extend(entries)
        await asyncio.to_thread(journal.close)

    with journal_path() as path:
        for opened in range(data.draw(st.integers(2, 4))):  # noqa: B007  `write` reads it
            asyncio.run(write(path, [history.entry() for _ in range(data.draw(st.integers(0, 8)))]))


class Disk:
    """A journal written one entry a commit, with the deletion of removed rows at random moments, and its files after each.

    Written without the thread, so that which commit is which is known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._writing() as (connection, _):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def _writing(self) -> Iterator[tuple[Any, Tables]]:
        connection = opening.connect(self.path)
        yield connection, Tables(connection)
        connection.close()

    def write(self, entries: Sequence[Entry], data: st.DataObject) -> list[int]:
        """Size of the log after each entry. The files stay as a killed process leaves them, in folder `crashed`."""
        log = opening.side_file(self.path, "-wal")
        sizes = []
        with self._writing() as (connection, writer):
            for entry in entries:
                connection.execute("BEGIN")
                writer.apply([entry])
                connection.execute("COMMIT")
                sizes.append(log.stat().st_size)
                if data.draw(st.booleans()):
                    connection.execute("BEGIN")
                    writer.forget(5)
                    connection.execute("COMMIT")
            for file in (self.path, log):
                if file.exists():
                    shutil.copyfile(file, self.path.with_name(f"crashed-{file.name}"))
        return sizes

    def crash(self, log_bytes: int, flipped: int | None) -> Path:
        """The journal with the first `log_bytes` of its log, one byte of them changed."""
        image = self.path.with_name("image") / self.path.name
        shutil.rmtree(image.parent, ignore_errors=True)
        image.parent.mkdir()
        shutil.copyfile(self.path.with_name(f"crashed-{self.path.name}"), image)
        log = bytearray(self.path.with_name(f"crashed-{self.path.name}-wal").read_bytes()[:log_bytes])
        if flipped is not None and log:
            log[flipped % len(log)] ^= 1 << flipped % 8
        opening.side_file(image, "-wal").write_bytes(log)
        return image


FRAME = 24 + 32768
HEADER = 32


@given(data=st.data())
@settings(max_examples=40)
def test_a_log_cut_or_changed_anywhere_leaves_whole_entries_up_to_some_point(
    make_history: MakeHistory, data: st.DataObject
) -> None:
    history = make_history(data)
    entries = [history.entry() for _ in range(data.draw(st.integers(1, 6)))]
    with journal_path() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "CHUNK_ROWS", 5)  # so that many a removal is half done
        disk = Disk(path)
        sizes = disk.write(entries, data)
        whole = sizes[-1]
        cuts = st.one_of(st.integers(0, whole), st.integers(0, whole // FRAME).map(lambda n: min(whole, HEADER + n * FRAME)))
        for _ in range(4):
            cut, flipped = data.draw(cuts), data.draw(st.none() | st.integers(0, whole))
            image = disk.crash(cut, flipped)
            found = reading.load(image)
            journal = open_journal(image)
            assert journal.load() == found
            journal.close()
            states = [meant(entries[:count], incarnation=0) for count in range(len(entries) + 1)]
            assert found in states
            if flipped is None:
                kept = sum(size <= cut for size in sizes)
                assert found == states[kept]


def test_the_frames_of_the_log_are_as_long_as_assumed_here(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "journal.db")
    log = (tmp_path / "journal.db-wal").read_bytes()
    assert struct.unpack(">I", log[8:12])[0] + 24 == FRAME
    assert (len(log) - HEADER) % FRAME == 0
    journal.close()
