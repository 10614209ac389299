"""Parquet: no invented keys, Python values, and damage in one line."""

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.dataset.readers import read_table
from asyncrl.errors import DataError
from asyncrl.ports import Json

WriteRows = Callable[[str, list[Json]], str]
WriteBytes = Callable[[str, bytes], str]


def values_of(path: str | Path) -> list[dict[str, Json]]:
    return [row.values for row in read_table([str(path)], key="data.train_files")]


def failure(path: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        values_of(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


def call(name: str, arguments: Json) -> Json:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def test_structs_invent_no_keys_in_messages_and_tool_arguments(write_rows: WriteRows) -> None:
    rows: list[Json] = [
        {"prompt": [{"role": "user", "content": "weather?"}, call("weather", {"city": "Oslo", "where": {"lat": 59.9}})]},
        {"prompt": [{"role": "user", "content": "sum?", "name": "ann"}, call("sum", {"numbers": [1, None, 3]})]},
    ]
    path = write_rows("x.parquet", rows)
    assert pq.read_table(path).to_pylist() != rows  # the nulls are in the file
    assert values_of(path) == rows


def test_the_column_of_the_messages_may_have_any_name(write_rows: WriteRows) -> None:
    rows: list[Json] = [{"talk": [{"role": "user", "content": "a"}]}, {"talk": [{"role": "user", "content": "b", "name": "x"}]}]
    assert values_of(write_rows("x.parquet", rows)) == rows


def test_structs_invent_no_tools_kwargs_and_the_rest_of_extra_info_is_untouched(write_rows: WriteRows) -> None:
    rows: list[Json] = [
        {
            "extra_info": {"index": None, "tools_kwargs": {"search": {"k": 3}}, "interaction_kwargs": {"name": "a"}},
            "tools_kwargs": {"a": 1},
        },
        {
            "extra_info": {"index": 1, "tools_kwargs": {"sum": {"digits": 2}}, "interaction_kwargs": {"mode": "b"}},
            "tools_kwargs": {"b": 2},
        },
    ]
    assert values_of(write_rows("x.parquet", rows)) == rows


def test_other_columns_pass_untouched_with_their_nulls(write_rows: WriteRows) -> None:
    rows: list[Json] = [
        {"meta": {"a": 1, "b": None}, "note": None, "extra_info": {"split": None, "index": 1}, "pairs": [{"x": 1, "y": None}]},
        {"meta": None, "note": "2024-01-01", "extra_info": {"split": "train", "index": 2}, "pairs": []},
    ]
    assert values_of(write_rows("x.parquet", rows)) == rows


def test_maps_are_dicts_and_keep_their_nulls(tmp_path: Path) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("arguments", pa.map_(pa.string(), pa.int64()))])
    rows = [{"prompt": [{"role": "user", "content": "x", "arguments": [("a", 1), ("b", None)]}], "other": [("k", [1, None])]}]
    schema = pa.schema([("prompt", pa.list_(message)), ("other", pa.map_(pa.string(), pa.list_(pa.int8())))])
    pq.write_table(pa.Table.from_pylist([*rows, {"prompt": None, "other": None}], schema=schema), tmp_path / "x.parquet")
    assert values_of(tmp_path / "x.parquet") == [
        {"prompt": [{"role": "user", "content": "x", "arguments": {"a": 1, "b": None}}], "other": {"k": [1, None]}},
        {"prompt": None, "other": None},
    ]


def test_a_map_with_a_key_twice_is_named(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64()), ("m", pa.map_(pa.string(), pa.int64()))])
    rows = [{"a": 1, "m": [("x", 1)]}, {"a": 2, "m": [("x", 1), ("x", 2)]}]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "x.parquet")
    assert failure(tmp_path / "x.parquet") == "FILE, row 2: column 'm' cannot be read as a Python value: a map has a key twice"


def test_dates_decimals_and_binary_pass_as_python_values(tmp_path: Path) -> None:
    row = {
        "day": date(2024, 2, 29),
        "at": datetime(2024, 2, 29, 12, tzinfo=UTC),
        "price": Decimal("1.10"),
        "blob": b"\x00\xff",
        "word": "ä",
        "half": 0.5,
    }
    table = pa.Table.from_pylist([row])
    table = table.set_column(4, "word", table["word"].dictionary_encode())
    pq.write_table(table, tmp_path / "x.parquet")
    assert values_of(tmp_path / "x.parquet") == [row]


def test_a_timestamp_that_python_cannot_hold_is_named(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2, 3], "at": pa.array([0, 1, 2**62], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "x.parquet")
    assert failure(tmp_path / "x.parquet").startswith("FILE, row 3: column 'at' cannot be read as a Python value: ")


def test_broken_text_is_named(tmp_path: Path) -> None:
    broken = pa.array([b"good", b"\xff\xfe"]).view(pa.string())
    pq.write_table(pa.table({"a": [1, 2], "t": broken}), tmp_path / "x.parquet")
    assert failure(tmp_path / "x.parquet").startswith("FILE, row 2: column 't' cannot be read as a Python value: 'utf-8' codec")


def test_row_numbers_run_over_row_groups_and_batches(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(10_000))}), tmp_path / "x.parquet", row_group_size=3000)
    rows = read_table([str(tmp_path / "x.parquet")], key="k")
    assert [row.place for row in rows] == [f"{tmp_path}/x.parquet, row {number}" for number in range(1, 10_001)]
    assert [row.values["a"] for row in rows] == list(range(10_000))


def test_a_column_name_twice_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "x.parquet")
    assert failure(tmp_path / "x.parquet") == "FILE: the column 'a' is there twice; columns: 'a', 'a'"


@pytest.mark.parametrize("data", [b"PAR1", b"PAR1PAR1", b"not parquet at all", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_what_is_no_parquet_is_said_in_one_line(write_bytes: WriteBytes, data: bytes) -> None:
    assert failure(write_bytes("x.parquet", data)).startswith("FILE: not a readable parquet file (truncated or damaged?): ")


def test_a_truncated_file_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": list(range(1000))}), path)
    path.write_bytes(path.read_bytes()[:-100])
    assert failure(path).startswith("FILE: not a readable parquet file (truncated or damaged?): ")


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "x.parquet")
    assert failure(tmp_path / "x.parquet") == "data.train_files: FILE: the file has no rows"
