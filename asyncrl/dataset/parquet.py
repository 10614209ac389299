"""Parquet to rows, without the null keys that its structs invent.

A parquet struct has the same members in every row. Written from JSON-like rows it is the union of their keys, and a key that a
row did not have reads back as null, exactly like a null that was written. So a chat template would show the model
`{"city": "Oslo", "expression": null}`, and a tool would be called with arguments of another tool.

1. In message lists (columns of `list<struct<role, ...>>`, whatever their name), at every depth, tool-call arguments included, and
   in `tools_kwargs` and `interaction_kwargs` (as columns, or inside `extra_info`), a struct member that is null is left out. A null
   that was meant there is lost; write such arguments as a JSON string, as jsonl, or as a map.
2. Nulls that nobody invents stay: list elements, and values of maps, whose keys belong to the row.
3. All other columns pass untouched, nulls included.

Dates, times, decimals and binary pass as Python's date, datetime, Decimal and bytes; maps as dicts. A value that Python cannot
hold (nanoseconds, a year after 9999, a map with a key twice) is an error that names row and column.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.dataset.readers import SourceRow
from asyncrl.dataset.wording import names_shown, one_line
from asyncrl.errors import DataError
from asyncrl.ports import Json

_BATCH_ROWS = 4096
"""Rows converted together: enough to hide the cost of a call, few enough that `max_rows` reads little more than it keeps."""

_KWARGS = ("tools_kwargs", "interaction_kwargs")

_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)

_Reshape = Callable[[Json], Json]


def read_parquet(path: Path) -> Iterator[SourceRow]:
    """Rows in file order. Raises DataError for a file that is no parquet, truncated or damaged, or has a column name twice."""
    number = 0
    for batch in _batches(path):
        reshapes = _reshapes(batch.schema)
        for values in _to_rows(batch, path, number):
            number += 1
            for name, reshape in reshapes.items():
                values[name] = reshape(values[name])
            yield SourceRow(f"{path}, row {number}", values, path)


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    # pyarrow meets foreign bytes here and raises whatever its layers raise (Arrow's tree, OSError, ValueError, MemoryError);
    # all of it means that the file cannot be used. What our own code does with a batch is not inside: a generator does not see
    # the errors of the loop that it feeds.
    try:
        with pa.OSFile(str(path), "rb") as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            _check_names(file.schema_arrow, path)
            batches = file.iter_batches(_BATCH_ROWS)
            while (batch := next(batches, None)) is not None:
                yield batch
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: not a readable parquet file (truncated or damaged?): {one_line(error)}") from error


def _check_names(schema: pa.Schema, path: Path) -> None:
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise DataError(f"{path}: the column {twice[0]!r} is there twice; columns are {names_shown(schema.names)}")


def _to_rows(batch: pa.RecordBatch, path: Path, rows_before: int) -> list[dict[str, Json]]:
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except Exception as error:
        place = _place_of_failure(batch, path, rows_before)
        raise DataError(f"{place} cannot be read as a Python value: {one_line(error)}") from error


def _place_of_failure(batch: pa.RecordBatch, path: Path, rows_before: int) -> str:
    for row in range(batch.num_rows):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.slice(row, 1).to_pylist(maps_as_pydicts="strict")
            except Exception:  # the same failure again; the caller raises it with this place
                return f"{path}, row {rows_before + row + 1}: column {name!r}"
    return f"{path}, rows {rows_before + 1} to {rows_before + batch.num_rows}:"


# --- invented nulls ---------------------------------------------------------------------------------------------------------------


def _reshapes(schema: pa.Schema) -> dict[str, _Reshape]:
    found = {field.name: _column_reshape(field) for field in schema}
    return {name: reshape for name, reshape in found.items() if reshape}


def _column_reshape(field: "pa.Field[pa.DataType]") -> _Reshape | None:
    if field.name in _KWARGS or _is_message_list(field.type):
        return _without_nulls(field.type)
    if field.name == "extra_info" and isinstance(field.type, pa.StructType):
        members = {member.name: _without_nulls(member.type) for member in field.type if member.name in _KWARGS}
        return _in_members({name: reshape for name, reshape in members.items() if reshape})
    return None


def _is_message_list(kind: pa.DataType) -> bool:
    return isinstance(kind, _LISTS) and isinstance(kind.value_type, pa.StructType) and "role" in kind.value_type.names


def _without_nulls(kind: pa.DataType) -> _Reshape | None:
    """A function that leaves null members out of the structs of a value of this type; None when the type has no struct."""
    if isinstance(kind, pa.StructType):
        return _struct_without_nulls({field.name: _without_nulls(field.type) for field in kind})
    if isinstance(kind, pa.MapType):
        inside = _without_nulls(kind.item_type)
        return inside and _in_map(inside)
    if isinstance(kind, _LISTS):
        inside = _without_nulls(kind.value_type)
        return inside and _in_list(inside)
    return None


def _struct_without_nulls(members: dict[str, _Reshape | None]) -> _Reshape:
    def reshape(value: Json) -> Json:
        if value is None:
            return None
        present = [(name, child, members[name]) for name, child in value.items() if child is not None]
        return {name: inner(child) if inner else child for name, child, inner in present}

    return reshape


def _in_members(members: dict[str, _Reshape]) -> _Reshape:
    def reshape(value: Json) -> Json:
        return value and {name: members[name](child) if name in members else child for name, child in value.items()}

    return reshape


def _in_map(inside: _Reshape) -> _Reshape:
    return lambda value: value and {key: inside(child) for key, child in value.items()}


def _in_list(inside: _Reshape) -> _Reshape:
    return lambda value: value and [inside(child) for child in value]
