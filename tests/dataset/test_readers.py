"""json and jsonl: strict, line by line, and errors that name the line."""

import gc
from collections.abc import Callable

import pytest

from asyncrl.dataset.readers import MAX_DEPTH, SourceRow, gc_paused, read_table
from asyncrl.errors import DataError
from asyncrl.ports import Json

KEY = "data.train_files"
WriteRows = Callable[[str, list[Json]], str]
WriteBytes = Callable[[str, bytes], str]


def read(path: str, max_rows: int = 0) -> list[SourceRow]:
    return read_table([path], key=KEY, max_rows=max_rows)


def failure(path: str) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert path in message
    assert "\n" not in message
    return message.replace(path, "FILE")


def test_bom_crlf_and_blank_lines_keep_line_numbers(write_bytes: WriteBytes) -> None:
    path = write_bytes("x.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\r\n  {"a": 2}  \r\n{"a": 3}\n\n \n')
    assert [(row.place.removeprefix(path), row.values) for row in read(path)] == [
        (", line 1", {"a": 1}),
        (", line 3", {"a": 2}),
        (", line 4", {"a": 3}),
    ]


def test_date_like_strings_and_nulls_stay_what_they_are(write_bytes: WriteBytes) -> None:
    row = b'{"day": "2024-01-01", "time": "2024-01-01T00:00:00Z", "args": {"a": null}, "n": 123456789012345678901}'
    expected = {"day": "2024-01-01", "time": "2024-01-01T00:00:00Z", "args": {"a": None}, "n": 123456789012345678901}
    assert read(write_bytes("x.jsonl", row))[0].values == expected
    assert read(write_bytes("x.json", b"\xef\xbb\xbf[" + row + b"]"))[0].values == expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"a": 1', "FILE, line 2: malformed JSON: Input data was truncated"),
        (b"{'a': 1}", "FILE, line 2: malformed JSON: object keys must be strings (byte 1)"),
        (b'{"a": NaN}', "FILE, line 2: malformed JSON: invalid character (byte 6)"),
        (b'{"a": 1} {"a": 2}', "FILE, line 2: malformed JSON: trailing characters (byte 10)"),
        (b"[1, 2]", "FILE, line 2: expected an object, got a list"),
        (b'{"a": 1e999}', "FILE, line 2: a number in it is out of range"),
        (b"null", "FILE, line 2: expected an object, got null"),
        (b'"text"', "FILE, line 2: expected an object, got a text"),
        (b'{"a": "\xff"}', "FILE, line 2: not valid UTF-8 (byte 7: 0xff)"),
        (b'{"a": "\xed\xa0\x80"}', "FILE, line 2: not valid UTF-8 (byte 7: 0xed)"),
        (b"\xff\xfe{\x00}\x00", "FILE, line 2: not valid UTF-8 (byte 0: 0xff)"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", f"FILE, line 2: nested deeper than {MAX_DEPTH} levels"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", f"FILE, line 2: nested deeper than {MAX_DEPTH} levels"),
    ],
)
def test_a_bad_line_is_named(write_bytes: WriteBytes, line: bytes, says: str) -> None:
    assert failure(write_bytes("x.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 3}\n')) == says


def test_depth_at_the_limit_and_many_siblings_are_fine(write_bytes: WriteBytes) -> None:
    deep = b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}\n"
    wide = b'{"a": [' + b"[]," * 500 + b"[]]}\n"
    assert len(read(write_bytes("x.jsonl", deep + wide))) == 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": 1}', "FILE: expected an array of objects, got an object; one object a line is .jsonl"),
        (
            b'{"a": 1}\n{"a": 2}\n',
            "FILE, line 2: malformed JSON: trailing characters (byte 10); a .json file is one array of objects",
        ),
        (b'[{"a": 1}, 2]', "FILE, row 2: expected an object, got a number"),
        (b'[{"a": 1}, null]', "FILE, row 2: expected an object, got null"),
        (b'[{"a": 1}, {"a"', "FILE: malformed JSON: Input data was truncated; a .json file is one array of objects"),
        (b'["\xff"]', "FILE: not valid UTF-8 (byte 2: 0xff); a .json file is one array of objects"),
        (b"[" * 100_000, f"FILE: nested deeper than {MAX_DEPTH} levels; a .json file is one array of objects"),
        (b"[{}, " + b'{"a": ' * 200 + b"1" + b"}" * 200 + b"]", f"FILE, row 2: nested deeper than {MAX_DEPTH} levels"),
        (b"[]", "data.train_files: FILE: the file has no rows"),
        (b"", "data.train_files: FILE: the file is empty"),
    ],
)
def test_a_bad_json_file_is_explained(write_bytes: WriteBytes, data: bytes, says: str) -> None:
    assert failure(write_bytes("x.json", data)) == says


@pytest.mark.parametrize(
    ("data", "says"), [(b"", "the file is empty"), (b"\n \n", "has no rows"), (b"\xef\xbb\xbf", "has no rows")]
)
def test_a_jsonl_file_without_rows_is_refused(write_bytes: WriteBytes, data: bytes, says: str) -> None:
    assert says in failure(write_bytes("x.jsonl", data))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_max_rows_takes_the_first_and_looks_no_further(write_rows: WriteRows, name: str) -> None:
    path = write_rows(name, [{"a": number} for number in range(5)])
    assert [row.values["a"] for row in read(path, max_rows=3)] == [0, 1, 2]
    assert len(read_table([path, path], key=KEY, max_rows=7)) == 7
    assert len(read_table([path, f"{path}/../bad.jsonl"][:1], key=KEY, max_rows=50)) == 5


def test_several_files_are_read_in_order(write_rows: WriteRows) -> None:
    paths = [write_rows("b.jsonl", [{"a": 1}]), write_rows("a.parquet", [{"a": 2}, {"a": 3}]), write_rows("c.json", [{"a": 4}])]
    rows = read_table(paths, key=KEY)
    assert [row.values["a"] for row in rows] == [1, 2, 3, 4]
    assert [row.place.rpartition("/")[2] for row in rows] == [
        "b.jsonl, line 1",
        "a.parquet, row 1",
        "a.parquet, row 2",
        "c.json, row 1",
    ]


def test_an_empty_file_among_others_is_refused(write_rows: WriteRows, write_bytes: WriteBytes) -> None:
    good, empty = write_rows("a.jsonl", [{"a": 1}]), write_bytes("b.jsonl", b"")
    with pytest.raises(DataError, match=r"b.jsonl: the file is empty"):
        read_table([good, empty], key=KEY)


def test_garbage_collection_is_off_while_reading_and_on_again_after_an_error(write_bytes: WriteBytes) -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
    failure(write_bytes("x.jsonl", b"{"))
    assert gc.isenabled()
