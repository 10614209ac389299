"""The journal on disk: SQLite with a write-ahead log, behind one writer thread.

transfer_queue -> append -> [sqlite] -> run folder / journal.db

Covered: the end of the process at any moment; with `synced`, or sync = "full", that of the machine too (with "normal" a consistent
earlier state is left, never older than the last synced entry). Not covered: a disk that lies about having synced, network folders.
"""

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import Literal

from asyncrl.errors import JournalError, JournalWriteError
from asyncrl.journal import opening, reading
from asyncrl.journal.entries import Entry, KeptSteps, Saved
from asyncrl.journal.tables import Tables, write_meta
from asyncrl.journal.writer import Pending, Writer, settle


class SqliteJournal:
    """A journal that this process has open; `open_journal` makes it. See `port.Journal` for what it promises."""

    def __init__(self, path: Path, lock: sqlite3.Connection, writer: Writer) -> None:
        self._path = path
        self._lock = lock
        self._writer = writer
        self._owner = os.getpid()
        self._num_appended = 0
        self._is_closed = False

    @property
    def failure(self) -> JournalWriteError | None:
        return self._writer.failure

    def steps(self) -> KeptSteps:
        """Which weights this process may begin with. Blocking. Raises JournalDamagedError."""
        return reading.read_steps(self._path)

    def load(self, weights_step: int = 0) -> Saved:
        """Raises JournalDamagedError, naming file, key and field."""
        saved = reading.load(self._path, weights_step)
        saved.incarnation -= 1
        return saved

    def append(self, entry: Entry, *, synced: bool = False) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        failure = self.failure or self._refusal()
        if failure is not None:
            settle([future], failure)
        else:
            self._num_appended += 1
            self._writer.put(Pending(entry, synced, future))
        return future

    def _refusal(self) -> JournalWriteError | None:
        if self._is_closed:
            return JournalWriteError(f"{self._path} cannot be written: it has been closed")
        if os.getpid() != self._owner:
            return JournalWriteError(f"{self._path} cannot be written: process {self._owner} has it open, and this is a fork of it")
        return None

    def stats(self) -> dict[str, float]:
        writer = self._writer
        return {
            "journal_bytes": writer.size_bytes,
            "journal_commits": writer.num_commits,
            "journal_waiting": self._num_appended - writer.num_done,
        }

    def close(self) -> None:
        """Does nothing the second time, and in a forked child."""
        if self._is_closed or os.getpid() != self._owner:
            return
        self._is_closed = True
        self._writer.stop()
        self._lock.close()


def open_journal(path: Path, *, sync: Literal["normal", "full"] = "normal") -> SqliteJournal:
    """Open the journal at `path`, or make one, for this process alone. Blocking: checks the file's structure, reading all of it.

    Raises JournalInUseError, JournalFormatError, JournalDamagedError, or JournalError where the files cannot be opened.
    """
    lock = opening.lock(path)
    try:
        connection = opening.connect(path)
        try:
            writer = _start(connection, path, sync)
        except BaseException:
            connection.close()
            raise
    except BaseException:
        lock.close()
        raise
    return SqliteJournal(path, lock, writer)


def _start(connection: sqlite3.Connection, path: Path, sync: Literal["normal", "full"]) -> Writer:
    """Count the incarnation in a synced transaction, before anything else is written."""
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        incarnation = reading.Reader(connection, path).incarnation
        tables = Tables(connection)
        while tables.forget():
            """All that an earlier process left to do."""
        write_meta(connection, "incarnation", incarnation + 1)
        write_meta(connection, "sync", sync)
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise JournalError(f"{path} cannot be written: {opening.reason_of(path, error)}") from error
    writer = Writer(connection, path, tables, is_full_sync=sync == "full")
    writer.start()
    return writer
