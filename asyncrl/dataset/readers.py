"""Reads files to rows, each with the place it came from. Shared by the reinforcement-learning dataset and the warm start.

JSON is strict (no NaN, no comments, UTF-8 only); a byte order mark, CRLF and blank lines are accepted. Of a key that an object
has twice the last wins. jsonl is decoded line by line, so a date-like string stays a string and an error has its line.
"""

import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from asyncrl.dataset.files import find_files
from asyncrl.errors import DataError
from asyncrl.ports import Json
from asyncrl.wording import kind_of, message_of

MAX_DEPTH = 100
"""Objects and lists inside one another in a row. Python copies, compares and prints nested values by recursion (limit 1000, with
up to three frames a level), so a deeper row would be an error in the middle of the run rather than here."""

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row as its file has it. `place` is "file, line 3" for jsonl and "file, row 3" otherwise, counted from 1."""

    place: str
    values: dict[str, Json]
    file: Path


def read_table(files: Sequence[str], *, key: str, max_rows: int = 0) -> list[SourceRow]:
    """All rows of `files` (see `find_files`), or the first `max_rows` when that is not 0; what comes after those is not looked at.

    `key` is the configuration key that named the files. Raises DataError with one line naming file and row.
    """
    rows: list[SourceRow] = []
    with gc_paused():
        for path in find_files(files, key=key):
            before = len(rows)
            rows.extend(islice(_read_file(path, key), max_rows - before if max_rows else None))
            if len(rows) == before:
                raise DataError(f"{key}: {path}: the file has no rows")
            if len(rows) == max_rows:
                break
    return rows


@contextmanager
def gc_paused() -> Iterator[None]:
    """No cycle collection inside. JSON has no cycles, and collecting again and again over ever more new dicts takes 3.5 times
    as long as the decoding itself (100,000 rows: 0.67 against 0.18 CPU seconds)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_file(path: Path, key: str) -> Iterator[SourceRow]:
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{key}: {path}: the file is empty")
        match path.suffix.lower():
            case ".jsonl":
                yield from _read_jsonl(path)
            case ".json":
                yield from _read_json(path)
            case _:
                # Here, because pyarrow takes 0.2 s to import and most commands read no parquet.
                from asyncrl.dataset.parquet import read_parquet

                yield from read_parquet(path)
    except OSError as error:
        raise DataError(f"{key}: {path}: cannot be read ({error.strerror or message_of(error)})") from error


def _read_jsonl(path: Path) -> Iterator[SourceRow]:
    decoder = msgspec.json.Decoder(dict[str, Json])
    with path.open("rb") as lines:
        for number, line in enumerate(_without_bom(lines), start=1):
            if line.isspace() or not line:
                continue
            place = f"{path}, line {number}"
            try:
                values = decoder.decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                raise DataError(f"{place}: {_explain(line, error)}") from None
            if line.count(b"{") + line.count(b"[") > MAX_DEPTH:
                _check_depth(values, place)
            yield SourceRow(place, values, path)


def _without_bom(lines: Iterable[bytes]) -> Iterator[bytes]:
    iterator = iter(lines)
    for first in iterator:
        yield first.removeprefix(_BOM)
        yield from iterator


def _read_json(path: Path) -> Iterator[SourceRow]:
    data = path.read_bytes().removeprefix(_BOM)
    try:
        rows = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"{_line_of(error, data, path)}: {_explain(data, error)}; a .json file is one array of objects") from None
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected an array of objects, got {kind_of(rows)}; one object a line is .jsonl")
    for number, values in enumerate(rows, start=1):
        place = f"{path}, row {number}"
        if not isinstance(values, dict):
            raise DataError(f"{place}: expected an object, got {kind_of(values)}")
        _check_depth(values, place)
        yield SourceRow(place, values, path)


def _line_of(error: Exception, data: bytes, path: Path) -> str:
    found = re.search(r"\(byte (\d+)\)", str(error))
    return f"{path}, line {data.count(10, 0, int(found[1])) + 1}" if found else str(path)


def _explain(data: bytes, error: Exception) -> str:
    """What is wrong with the text, in one line. Bytes are counted from 0, as msgspec does."""
    try:
        data.decode()
    except UnicodeDecodeError as broken:
        return f"not valid UTF-8 (byte {broken.start}: 0x{data[broken.start]:02x})"
    if isinstance(error, RecursionError):
        return f"nested deeper than {MAX_DEPTH} levels"
    if isinstance(error, msgspec.ValidationError):
        return _explain_value(data)
    return f"malformed JSON: {message_of(error).removeprefix('JSON is malformed: ')}"


def _explain_value(data: bytes) -> str:
    """The line is JSON, but no object; or a number in it is beyond a float."""
    try:
        return f"expected an object, got {kind_of(msgspec.json.decode(data))}"
    except (msgspec.DecodeError, RecursionError):
        return "a number in it is out of range"


def _check_depth(values: dict[str, Json], place: str) -> None:
    level: list[Json] = [values]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise DataError(f"{place}: nested deeper than {MAX_DEPTH} levels")


def _children(value: Json) -> Iterable[Json]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
