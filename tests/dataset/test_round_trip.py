"""The same rows come out that went in, whatever the format; and damaged bytes give a DataError, whatever the damage."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import DataConfig
from asyncrl.dataset import RLHFDataset, read_table
from asyncrl.errors import DataError
from asyncrl.ports import Json

_TRICKY = ["", "2024-01-01", "2024-01-01T00:00:00Z", "12:30", "1e5", "null", "NaN", "\u2028\x85\r", "\x00", "𝔘é"]
texts = st.sampled_from(_TRICKY) | st.text()
int64s = st.integers(min_value=-(2**63), max_value=2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)


def optional(**keys: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional=keys)


# In message lists keys come and go from row to row, and none is null.
arguments = optional(
    city=texts, expression=texts, numbers=st.lists(st.none() | int64s, max_size=3), deep=optional(x=floats, y=texts)
)
calls = st.lists(st.fixed_dictionaries({"name": texts, "arguments": arguments}), min_size=1, max_size=2)
message = st.fixed_dictionaries({"role": texts, "content": texts}, optional={"tool_calls": calls})
# Elsewhere structs keep their nulls, so every row has every key.
reward_model = st.fixed_dictionaries({"ground_truth": st.none() | texts, "style": texts})
extra_info = st.fixed_dictionaries({"index": st.none() | int64s, "notes": st.lists(st.none() | texts, max_size=2)})
row = st.fixed_dictionaries(
    {
        "prompt": st.lists(message, max_size=3),
        "data_source": texts,
        "reward_model": reward_model,
        "extra_info": st.none() | extra_info,
        "number": st.none() | floats,
        "flag": st.none() | st.booleans(),
    }
)
tables = st.lists(row, min_size=1, max_size=5)

_TEXT, _INT = pa.string(), pa.int64()
_ARGUMENTS = pa.struct(
    [("city", _TEXT), ("expression", _TEXT), ("numbers", pa.list_(_INT)), ("deep", pa.struct([("x", pa.float64()), ("y", _TEXT)]))]
)
_CALLS = pa.list_(pa.struct([("name", _TEXT), ("arguments", _ARGUMENTS)]))
SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(pa.struct([("role", _TEXT), ("content", _TEXT), ("tool_calls", _CALLS)]))),
        ("data_source", _TEXT),
        ("reward_model", pa.struct([("ground_truth", _TEXT), ("style", _TEXT)])),
        ("extra_info", pa.struct([("index", _INT), ("notes", pa.list_(_TEXT))])),
        ("number", pa.float64()),
        ("flag", pa.bool_()),
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("round_trip")


def write_all(folder: Path, rows: list[Json]) -> list[Path]:
    """The rows as jsonl with raw unicode, as json with escapes, and as parquet."""
    paths = [folder / "x.jsonl", folder / "x.json", folder / "x.parquet"]
    paths[0].write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    paths[1].write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), paths[2])
    return paths


def values_of(path: Path) -> list[Json]:
    return [row.values for row in read_table([str(path)], key="data.train_files")]


@given(rows=tables)
def test_the_same_rows_come_out_of_all_three_formats(folder: Path, rows: list[Json]) -> None:
    for path in write_all(folder, rows):
        assert values_of(path) == rows


json_values = st.recursive(
    st.none() | st.booleans() | int64s | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


@given(rows=st.lists(st.dictionaries(texts, json_values, max_size=4), min_size=1, max_size=4))
def test_any_json_comes_out_of_json_and_jsonl(folder: Path, rows: list[Json]) -> None:
    (folder / "y.jsonl").write_text("\r\n".join(json.dumps(row) for row in rows))
    (folder / "y.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    assert values_of(folder / "y.jsonl") == values_of(folder / "y.json") == rows


# --- damage -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(folder: Path) -> dict[str, bytes]:
    """A sound file of each format, by extension."""
    call = {"name": "sum", "arguments": {"numbers": [1, None], "deep": {"x": 0.5}}}
    first = {
        "prompt": [{"role": "user", "content": "ä 2024-01-01"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        "data_source": "sums",
        "reward_model": {"ground_truth": "1", "style": "rule"},
        "extra_info": {"index": 1, "notes": ["a", None]},
        "number": 1.5,
        "flag": None,
    }
    return {path.suffix: path.read_bytes() for path in write_all(folder, [{**first, "number": number / 2} for number in range(40)])}


def read_damaged(path: Path, data: bytes) -> None:
    """Reads rows, or raises DataError in one line that names the file. Anything else is the test's failure."""
    path.write_bytes(data)
    try:
        RLHFDataset([str(path)], DataConfig())
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017  both outcomes are right
        assert "\n" not in str(error)  # noqa: PT017


@settings(max_examples=150)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@given(data=st.data())
def test_damaged_files_give_only_data_errors(folder: Path, intact: dict[str, bytes], suffix: str, data: st.DataObject) -> None:
    damaged = bytearray(intact[suffix])
    places = st.integers(0, len(damaged) - 1) | st.integers(max(0, len(damaged) - 1500), len(damaged) - 1)
    for place in data.draw(st.lists(places, max_size=6)):
        damaged[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del damaged[data.draw(places) :]
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(damaged)))
        damaged[place:place] = data.draw(st.binary(max_size=20))
    read_damaged(folder / f"damaged{suffix}", bytes(damaged))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@given(data=st.binary(max_size=200))
def test_random_bytes_give_only_data_errors(folder: Path, suffix: str, data: bytes) -> None:
    read_damaged(folder / f"random{suffix}", data)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_cut_anywhere_is_noticed_or_leaves_whole_rows(folder: Path, intact: dict[str, bytes], suffix: str) -> None:
    whole = values_of(folder / f"x{suffix}") if (folder / f"x{suffix}").write_bytes(intact[suffix]) else []
    path = folder / f"cut{suffix}"
    for end in range(0, len(intact[suffix]) - 1, 97):
        path.write_bytes(intact[suffix][:end])
        try:
            rows = values_of(path)
        except DataError:
            continue
        assert suffix == ".jsonl"  # only a cut between two lines can pass
        assert rows == whole[: len(rows)]


json_rows = st.dictionaries(
    st.sampled_from(["prompt", "raw_prompt", "data_source", "reward_model", "extra_info", "tools_kwargs", "images", "x"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | texts,
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["role", "content", "tool_calls", "type", "text", "index", "tools_kwargs"]), inner, max_size=3
            )
        ),
        max_leaves=8,
    ),
)


@settings(max_examples=200)
@given(values=json_rows)
def test_rows_of_wrong_types_give_only_data_errors(folder: Path, values: Json) -> None:
    read_damaged(folder / "typed.jsonl", json.dumps(values).encode())
