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
from asyncrl.errors import DataError
from asyncrl.ports import Json
from asyncrl.wording import message_of, names_shown, shown

_BATCH_ROWS = 4096
"""Rows converted together: enough to hide the cost of a call, few enough that `max_rows` reads little more than it keeps."""

_KWARGS = ("tools_kwargs", "interaction_kwargs")

_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)

_Reshape = Callable[[Json], Json]


def read_parquet(path: Path) -> Iterator[SourceRow]:
    """Rows in file order. Raises DataError for a file that is no parquet, truncated or damaged, or has a column name twice."""
    number = 0
    for batch in _batches(path):
        for values in _to_rows(batch, path, number):
            number += 1
            yield SourceRow(f"{path}, row {number}", values, path)


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    # pyarrow meets foreign bytes here and raises whatever its layers raise (Arrow's tree, OSError, ValueError, MemoryError);
    # all of it means that the file cannot be used. What our own code does with a batch is not inside: a generator does not see
    # the errors of the loop that it feeds.
    try:
        with pa.OSFile(str(path), "rb") as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            _check_names(file.schema_arrow, path)
            yield from file.iter_batches(_BATCH_ROWS)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: not a readable parquet file (truncated or damaged?): {message_of(error)}") from error


def _check_names(schema: pa.Schema, path: Path) -> None:
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise DataError(f"{path}: the column {shown(twice[0])} is there twice; columns: {names_shown(schema.names)}")


def _to_rows(batch: pa.RecordBatch, path: Path, rows_before: int) -> list[dict[str, Json]]:
    try:
        return _convert(batch)
    except Exception as error:  # values that Python's types cannot hold, or damaged text
        place = _place_of_failure(batch, path, rows_before)
        raise DataError(f"{place} cannot be read as a Python value: {message_of(error)}") from error


def _place_of_failure(batch: pa.RecordBatch, path: Path, rows_before: int) -> str:
    for row in range(batch.num_rows):
        for name in batch.schema.names:
            try:
                _convert(batch.select([name]).slice(row, 1))
            except Exception:  # the same failure again; the caller raises it with this place
                return f"{path}, row {rows_before + row + 1}: column {shown(name)}"
    return f"{path}, rows {rows_before + 1} to {rows_before + batch.num_rows}:"


def _convert(batch: pa.RecordBatch) -> list[dict[str, Json]]:
    rows = batch.to_pylist()  # its own maps_as_pydicts makes it ten times slower, for batches without a map too
    for name, reshape in _column_reshapes(batch.schema):
        for values in rows:
            values[name] = reshape(values[name])
    return rows


# --- maps, and nulls that nobody wrote ------------------------------------------------------------------------------------------


def _column_reshapes(schema: pa.Schema) -> list[tuple[str, _Reshape]]:
    """The columns whose values need another form; most have none, and cost nothing."""
    return [(field.name, reshape) for field in schema if (reshape := _column_reshape(field))]


def _column_reshape(field: "pa.Field[pa.DataType]") -> _Reshape | None:
    if field.name == "extra_info" and isinstance(field.type, pa.StructType):
        return _in_struct(
            {member.name: _reshape(member.type, drop_nulls=member.name in _KWARGS) for member in field.type}, drop_nulls=False
        )
    return _reshape(field.type, drop_nulls=field.name in _KWARGS or _is_message_list(field.type))


def _is_message_list(kind: pa.DataType) -> bool:
    return isinstance(kind, _LISTS) and isinstance(kind.value_type, pa.StructType) and "role" in kind.value_type.names


def _reshape(kind: pa.DataType, *, drop_nulls: bool) -> _Reshape | None:
    """A function that gives a value of this type its form; None when it has it already."""
    if isinstance(kind, pa.StructType):
        return _in_struct({member.name: _reshape(member.type, drop_nulls=drop_nulls) for member in kind}, drop_nulls=drop_nulls)
    if isinstance(kind, pa.MapType):
        return _in_map(_reshape(kind.item_type, drop_nulls=drop_nulls))
    if isinstance(kind, _LISTS):
        return _in_list(_reshape(kind.value_type, drop_nulls=drop_nulls))
    return None


def _in_struct(members: dict[str, _Reshape | None], *, drop_nulls: bool) -> _Reshape | None:
    inner = [(name, reshape) for name, reshape in members.items() if reshape]
    if not inner and not drop_nulls:
        return None

    def reshape_struct(value: Json) -> Json:
        if value is None:
            return None
        present = {name: child for name, child in value.items() if child is not None} if drop_nulls else value
        for name, reshape in inner:
            if name in present:
                present[name] = reshape(present[name])
        return present

    return reshape_struct


def _in_map(inside: _Reshape | None) -> _Reshape:
    def reshape_map(pairs: Json) -> Json:
        if pairs is None:
            return None
        value = dict(pairs)
        if len(value) < len(pairs):
            raise ValueError("a map has a key twice")
        return {key: inside(child) for key, child in value.items()} if inside else value

    return reshape_map


def _in_list(inside: _Reshape | None) -> _Reshape | None:
    if inside is None:
        return None
    return lambda value: None if value is None else [inside(child) for child in value]
