"""From what the user wrote (a file, a directory, a glob, or several) to the list of files to read."""

import glob
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import DataError

EXTENSIONS = (".parquet", ".json", ".jsonl")
_ALLOWED = "allowed are " + ", ".join(EXTENSIONS)


def find_files(files: Sequence[str], *, key: str) -> list[Path]:
    """The files to read, in order: as named; those of a directory (not of its subdirectories) or of a glob sorted by name.

    A directory gives its files with a known extension and leaves the rest (README, LICENSE) alone; a file or glob that names
    another extension is an error. A file named twice is read twice. `key` is the configuration key for messages.
    Raises DataError when nothing is named, found or usable.
    """
    if not files:
        raise DataError(f"{key} is empty: name a file, a directory or a glob")
    return [path for name in files for path in _find(name, key)]


def _find(name: str, key: str) -> list[Path]:
    if not name.strip():
        raise DataError(f"{key} has an empty path: name a file, a directory or a glob")
    path = Path(name).expanduser()
    try:
        # First as it is spelled: a file may have brackets in its name.
        if path.is_dir():
            return _usable_files(path, key)
        if path.exists():
            return [_checked(path, key)]
        if glob.has_magic(name):
            return _matches(str(path), key)
    except OSError as error:
        raise DataError(f"{key}: {name}: cannot be read ({error.strerror})") from error
    raise DataError(f"{key}: {name}: no such file or directory")


def _usable_files(directory: Path, key: str) -> list[Path]:
    found = sorted(path for path in directory.iterdir() if _extension(path) in EXTENSIONS and path.name[0] not in "._")
    found = [path for path in found if path.is_file()]
    if not found:
        raise DataError(f"{key}: {directory}: the directory has no file to read; {_ALLOWED}")
    return found


def _matches(pattern: str, key: str) -> list[Path]:
    found = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
    found = [_checked(path, key) for path in found if not path.is_dir()]
    if not found:
        raise DataError(f"{key}: {pattern}: no file matches the glob")
    return found


def _checked(path: Path, key: str) -> Path:
    if _extension(path) not in EXTENSIONS:
        raise DataError(f"{key}: {path}: unknown file extension {path.suffix!r}; {_ALLOWED}")
    if not path.is_file():
        raise DataError(f"{key}: {path}: not a regular file")
    return path


def _extension(path: Path) -> str:
    return path.suffix.lower()
