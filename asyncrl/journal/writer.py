"""The one thread that writes a journal: takes all that is queued, commits it as one transaction, then acknowledges it.

append -> queue -> [writer] -> commit -> one call into each event loop

Invariants:
1. An entry is acknowledged after its commit, and after the files were seen to be still in their place.
2. The first error is the last write: it becomes `failure`, and every waiting and later entry fails with it.
3. What can wait does: deleting removed rows and moving the log into the file happen while nothing is queued, until too much is due.
"""

import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import JournalWriteError
from asyncrl.journal.entries import Entry
from asyncrl.journal.opening import side_file
from asyncrl.journal.tables import Tables

if TYPE_CHECKING:
    import asyncio

CHECKPOINT_BYTES = 8 << 20
"""Bytes in the log from which on it is moved into the file when there is time; at four times as many it is, time or not. A log that
is written over costs half of one that grows."""
IDLE_S = 0.005
"""Seconds without an entry that count as time: whoever was just acknowledged goes first, and often comes back at once."""
GATHER_S = 0.005
"""Seconds to wait for more after a commit that several waited for: many sessions need a fraction of the commits, and of the loop's
turns. One who writes alone, an entry after the other, never waits for this. (PostgreSQL: commit_delay, commit_siblings.)"""
SYNC_BYTES = 2 << 20
"""Bytes in the log that no commit has synced, from which on the next commit does, whoever asked for it: an entry that must be
synced pays for all that was written before it. With a sync now and then the record of a step takes 1 ms, and else 5."""
MOST_REMOVED_ROWS = 2048
"""Removed rows that may wait for their deletion while entries keep coming."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An entry that is not acknowledged yet."""

    entry: Entry
    synced: bool
    future: "asyncio.Future[None]"


class Writer:
    """Owns the connection from `start` on. `num_commits`, `num_done` and `size_bytes` may be read by anybody."""

    def __init__(self, connection: sqlite3.Connection, path: Path, tables: Tables, *, is_full_sync: bool) -> None:
        self._connection = connection
        self._path = path
        self._tables = tables
        self._is_full_sync = is_full_sync
        self._synchronous = ""
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._log_bytes = 0
        self._unsynced_bytes = 0
        self._log_size = 0
        self._log_floor = 0
        self._has_company = False
        self._pause = threading.Event()  # never set
        self._identities = self._identify()
        self.failure: JournalWriteError | None = None
        self.num_commits = 0
        self.num_done = 0
        self._thread = threading.Thread(target=self._run, name="asyncrl-journal", daemon=True)

    def start(self) -> None:
        """Daemon, so that a disk that hangs does not keep the process from ending; `stop` waits for it where that is wanted."""
        self._thread.start()

    def put(self, pending: Pending) -> None:
        self._queue.put(pending)

    def stop(self) -> None:
        """Write what is queued, tidy up, close the connection. Blocking."""
        self._queue.put(None)
        self._thread.join()

    # --- the thread

    def _run(self) -> None:
        is_open = True
        while is_open:
            group, is_open = self._next_group()
            if group:
                self._commit(group)
        self._finish()

    def _next_group(self) -> tuple[list[Pending], bool]:
        """All that is queued, and whether more may come. Waits for the first entry, and tidies up until it comes."""
        group: list[Pending] = []
        found = self._wait()
        if self._has_company and found is not None:
            self._pause.wait(GATHER_S)
        while found is not None:
            group.append(found)
            try:
                found = self._queue.get_nowait()
            except queue.Empty:
                return group, True
        return group, False

    def _wait(self) -> Pending | None:
        patience_s = IDLE_S
        while (step := self._due(is_urgent=False)) is not None:
            try:
                return self._queue.get(timeout=patience_s)
            except queue.Empty:
                self._guarded(step)
                patience_s = 0.0
        return self._queue.get()

    def _commit(self, group: Sequence[Pending]) -> None:
        self._has_company = len(group) > 1
        if self.failure is None:
            is_synced = self._is_full_sync or any(pending.synced for pending in group)
            self._guarded(lambda: self._write(group, is_synced=is_synced))
        failure = self.failure
        self.num_done += len(group)
        _tell([pending.future for pending in group], failure)
        while (step := self._due(is_urgent=True)) is not None:
            self._guarded(step)

    def _write(self, group: Sequence[Pending], *, is_synced: bool) -> None:
        self._transact(lambda: self._tables.apply(pending.entry for pending in group), is_synced=is_synced)
        self.num_commits += 1
        self._check_in_place()

    def _transact(self, act: Callable[[], int], *, is_synced: bool) -> int:
        """Run `act`, which returns about how many bytes it wrote, in a transaction."""
        is_synced = is_synced or self._unsynced_bytes > SYNC_BYTES
        synchronous = "FULL" if is_synced else "NORMAL"
        if synchronous != self._synchronous:
            self._connection.execute(f"PRAGMA synchronous = {synchronous}")
            self._synchronous = synchronous
        self._connection.execute("BEGIN IMMEDIATE")
        size = act()
        self._connection.execute("COMMIT")
        self._log_bytes += size
        self._unsynced_bytes = 0 if is_synced else self._unsynced_bytes + size
        return size

    def _guarded(self, act: Callable[[], object]) -> None:
        """Whatever goes wrong in the thread is the end of writing, and is told to everybody who waits."""
        try:
            act()
        except BaseException as error:  # raised where somebody waits for it
            self.failure = JournalWriteError(_message(self._path, error))
            self.failure.__cause__ = error
            with contextlib.suppress(sqlite3.Error):
                self._connection.rollback()

    # --- what can wait

    def _due(self, *, is_urgent: bool) -> Callable[[], object] | None:
        """The next step of what has to be done, if any."""
        most_rows, most_bytes = (MOST_REMOVED_ROWS, 4 * CHECKPOINT_BYTES) if is_urgent else (0, CHECKPOINT_BYTES)
        if self.failure is not None:
            return None
        if self._log_bytes > most_bytes:
            return self._checkpoint
        return self._forget if self._tables.num_removed_rows > most_rows else None

    def _forget(self) -> None:
        self._transact(self._tables.forget, is_synced=False)

    def _checkpoint(self) -> None:
        _, in_log, moved = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        # A reader keeps the log from being written over; what came before is then no reason to try again.
        self._log_floor = 0 if in_log == moved else self._log_size
        self._log_bytes = 0

    def _finish(self) -> None:
        while self.failure is None and self._tables.num_removed_rows:
            self._guarded(self._forget)
        if self.failure is None:
            self._guarded(lambda: self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    # --- files

    def _identify(self) -> list[tuple[int, int]]:
        """Device and inode of both files; their sizes are noted. A log that has grown was written up to its end."""
        found = [os.stat(file) for file in (self._path, side_file(self._path, "-wal"))]
        log_size = found[1].st_size
        if log_size != self._log_size:
            self._log_size = log_size
            self._log_bytes = log_size - self._log_floor
        self.size_bytes = found[0].st_size + log_size
        return [(entry.st_dev, entry.st_ino) for entry in found]

    def _check_in_place(self) -> None:
        """A file that was removed can still be written, and is gone at the end: SQLite would not notice."""
        try:
            is_same = self._identify() == self._identities
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise FileNotFoundError("it was removed or replaced while it was open")


def _message(path: Path, error: BaseException) -> str:
    code = getattr(error, "sqlite_errorname", "")
    reason = f"{error} ({code})" if code else str(error) or type(error).__name__
    return f"{path} cannot be written: {reason}; what was acknowledged is kept, and nothing more will be"


def _tell(futures: Sequence["asyncio.Future[None]"], failure: JournalWriteError | None) -> None:
    """One call into each loop that waits. A loop that has been closed waits for nothing any more."""
    loops = {id(future.get_loop()): future.get_loop() for future in futures}
    for loop in loops.values():
        theirs = [future for future in futures if future.get_loop() is loop]
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, theirs, failure)


def settle(futures: Sequence["asyncio.Future[None]"], failure: JournalWriteError | None) -> None:
    """In the loop's thread. Who gave up waiting is left alone. Each gets an error of its own, which keeps its own traceback."""
    for future in futures:
        if future.done():
            continue
        if failure is None:
            future.set_result(None)
        else:
            error = JournalWriteError(str(failure))
            error.__cause__ = failure.__cause__
            future.set_exception(error)
