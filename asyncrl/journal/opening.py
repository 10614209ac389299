"""Opening a journal's files: one process at a time, made whole or not at all, and every reason not to in one line.

run folder -> [opening] -> journal.db, locked and checked -> sqlite

`journal.lock` is a database of its own, held by an exclusive transaction: its lock ends with the process, is not inherited by a
fork, and leaves the journal itself readable. In a process that has the journal open nothing but SQLite may open these files: POSIX
drops all of a process's locks on a file when it closes any one descriptor of it, and only SQLite keeps account of that.
"""

import contextlib
import os
import sqlite3
from pathlib import Path

from asyncrl import __version__
from asyncrl.errors import JournalDamagedError, JournalError, JournalFormatError, JournalInUseError
from asyncrl.journal.tables import APPLICATION_ID, FORMAT, PAGE_BYTES, SCHEMA, write_meta

BUSY_S = 10.0
"""Seconds to wait for a reader that is just opening; nobody else ever holds the journal."""

NEXT_MOVE = "start a new run, or put a copy of the file in its place"
"""Ends every message about damage."""


def side_file(path: Path, suffix: str) -> Path:
    """`journal.db` -> `journal.db-wal`, `journal.db-shm`."""
    return path.with_name(path.name + suffix)


def lock(path: Path) -> sqlite3.Connection:
    """Take the journal for this process. Raises JournalInUseError, or JournalError where there is no place for it."""
    _check_place(path)
    file = path.with_suffix(".lock")
    connection = None
    try:
        connection = sqlite3.connect(file, isolation_level=None, timeout=0, check_same_thread=False)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        if error.sqlite_errorname == "SQLITE_BUSY":
            raise JournalInUseError(
                f"{path} is in use: another process runs in this folder; wait for it, or end it (`asyncrl inspect` may look at it)"
            ) from None
        raise JournalError(f"{path} cannot be opened: {reason_of(file, error)}") from error
    return connection


def _check_place(path: Path) -> None:
    if not path.parent.is_dir():
        raise JournalError(f"{path} cannot be opened: the folder {path.parent} does not exist")
    if path.is_dir():
        raise JournalError(f"{path} cannot be opened: it is a folder, and should be a file")


def reason_of(file: Path, error: sqlite3.Error) -> str:
    """SQLite says "unable to open database file" and no more; the system says why. Only for a file that could not be opened."""
    if error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")):
        for place in (file.parent, file):
            if place.exists() and not os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
                return f"{place} may not be written"
        with contextlib.suppress(FileNotFoundError):
            try:
                os.close(os.open(file, os.O_RDWR))
            except FileNotFoundError:
                raise
            except OSError as found:
                return f"{file}: {found.strerror}"
    is_disk = error.sqlite_errorname.startswith(("SQLITE_IOERR", "SQLITE_FULL"))
    return f"{error} ({error.sqlite_errorname})" + (
        ", so the disk is full or fails, or a file would be too large" if is_disk else ""
    )


def connect(path: Path) -> sqlite3.Connection:
    """The writer's connection, to a journal that is made when there is none. The lock must be held. Raises JournalError."""
    try:
        if not path.exists():
            _create(path)
        connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S, check_same_thread=False, cached_statements=256)
    except sqlite3.Error as error:
        raise JournalError(f"{path} cannot be opened: {reason_of(path, error)}") from error
    except OSError as error:
        raise JournalError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        check_format(connection, path)
        check_structure(connection, path)
        _prepare(connection)
    except sqlite3.Error as error:
        connection.close()
        raise JournalError(f"{path} cannot be opened: {reason_of(path, error)}") from error
    except JournalError:
        connection.close()
        raise
    return connection


def _create(path: Path) -> None:
    """A whole, empty journal under another name first: what is called `journal.db` always has its tables."""
    log = side_file(path, "-wal")
    if log.exists() and log.stat().st_size:
        raise JournalDamagedError(f"{path} is missing, but its log {log.name} is there: put the file back, or start a new run")
    draft = side_file(path, ".new")
    for file in (draft, side_file(draft, "-wal"), side_file(draft, "-shm"), side_file(draft, "-journal")):
        file.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        write_meta(connection, "asyncrl", __version__)
        write_meta(connection, "incarnation", 0)
        connection.execute("PRAGMA journal_mode = WAL")
    os.rename(draft, path)
    for folder in (path.parent, path.parent.parent):
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """A new file survives a power loss when its folder is on disk as well."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA cache_size = -65536")
    # One transaction fits into memory; written half-way, its pages would go to disk twice.
    connection.execute("PRAGMA cache_spill = OFF")
    # Some builds overwrite deleted pages with zeros, which makes a removal three times as long.
    connection.execute("PRAGMA secure_delete = OFF")


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raises JournalFormatError for a file that is no journal or one of another version, JournalDamagedError for a part of one."""
    try:
        application, version, tables = (
            connection.execute(query).fetchone()[0]
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT COUNT(*) FROM sqlite_schema")
        )
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname == "SQLITE_NOTADB":
            raise JournalFormatError(f"{path} is not a journal of asyncrl; remove it, or name another folder") from None
        raise JournalDamagedError(f"{path} is damaged: {error}; {NEXT_MOVE}") from error
    if not tables and not application:
        raise JournalDamagedError(f"{path} is damaged: it is empty or cut short; {NEXT_MOVE}")
    if application != APPLICATION_ID:
        raise JournalFormatError(f"{path} is a database, but not a journal of asyncrl; remove it, or name another folder")
    if version != FORMAT:
        raise JournalFormatError(
            f"{path} has journal format {version}, this asyncrl ({__version__}) reads format {FORMAT}: go on with the"
            f" {'newer' if version > FORMAT else 'older'} version that wrote it, or start a new run"
        )


def check_structure(connection: sqlite3.Connection, path: Path) -> None:
    """Raises JournalDamagedError when the file's pages do not make up its tables. Reads the whole file."""
    try:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        told = " ".join(found.split())
        raise JournalDamagedError(f"{path} is damaged: {told}; {NEXT_MOVE}")
