"""What a put gives for its fields, as blocks: every value copied, every message naming field and key.

puts -> [encode] -> Block -> partition

A tensor keeps its dtype, whatever it is. The catalogue decides what a list of values means for a field that it knows: ragged rows
or numbers of its dtype, or JSON. What cannot come back equal is refused.
"""

import array
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import torch
from tensordict import TensorDict

from asyncrl.errors import DtypeChangeError, FieldError, TagCountError
from asyncrl.fields import CATALOGUE, Axis, Field
from asyncrl.ports import Json
from asyncrl.protocol.ragged import is_ragged, values_of
from asyncrl.transfer_queue.columns import Block, Kind, Schema

ColumnValues = torch.Tensor | np.ndarray | Sequence[Any]
"""What a put gives for one field: a jagged or stacked tensor, an array, or one value a key."""
Fields = TensorDict | Mapping[str, ColumnValues]
"""What a put gives for all fields."""


def encode_fields(fields: Fields | None, keys: Sequence[str], *, step: int | None) -> dict[str, Block]:
    """One block a field, copied. Raises TagCountError, DtypeChangeError or FieldError; every message names field and key."""
    if fields is None:
        return {}
    columns = cast(Mapping[str, ColumnValues], fields)
    return {name: encode(name, columns[name], keys, step=step) for name in columns.keys()}  # noqa: SIM118  a TensorDict iterates over rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """What the catalogue says of a field: how its rows come back, and the dtype that lists of numbers are read as."""

    kind: Kind
    dtype: torch.dtype | None

    @classmethod
    def of(cls, entry: Field) -> "_Expected":
        if not entry.is_tensor:
            return cls(kind=Kind.OBJECT, dtype=None)
        return cls(kind=Kind.STACKED if entry.axis is Axis.NONE else Kind.RAGGED, dtype=getattr(torch, entry.dtype))


_EXPECTED = {name: _Expected.of(entry) for name, entry in CATALOGUE.items()}
_ARRAYS = (torch.Tensor, np.ndarray)


def encode(name: str, values: ColumnValues, keys: Sequence[str], *, step: int | None) -> Block:
    """values: as `ColumnValues`. The catalogue decides what a list of values means for a field that it knows."""
    if type(values) is list and len(values) == len(keys) == 1 and (block := _encode_one(name, values[0], keys, step)) is not None:
        return block
    try:
        return _encode(name, values if type(values) is list else _as_column(values), keys, step)
    except RuntimeError as error:  # torch's, of a tensor that is not plain memory: sparse, nested otherwise, without data
        raise FieldError(f"field {name!r} of key {keys[0]!r} cannot be stored: {error}") from error


def _encode(name: str, column: torch.Tensor | list[Any], keys: Sequence[str], step: int | None) -> Block:
    expected = _EXPECTED.get(name)
    _check_count(name, column.size(0) if isinstance(column, torch.Tensor) else len(column), keys)  # len() of a jagged one is slow
    if isinstance(column, torch.Tensor):
        if is_ragged(column):
            return _encode_jagged(name, column, keys, step)
        if expected is not None and expected.kind is Kind.RAGGED:
            raise FieldError(
                f"field {name!r} of key {keys[0]!r} came padded, shape {list(column.shape)}: give it jagged (protocol.ragged)"
            )
        return _encode_stacked(name, column, keys, step)
    if expected is None:
        if not all(isinstance(value, _ARRAYS) for value in column):
            return _encode_objects(name, column, keys, step)
        rows = [_as_tensor(name, value, None, key) for value, key in zip(column, keys, strict=True)]
        return _encode_rows(name, rows, keys, step, Kind.STACKED if rows[0].dim() == 0 else Kind.RAGGED)
    if expected.kind is Kind.OBJECT:
        return _encode_objects(name, column, keys, step)
    assert expected.dtype is not None, "only objects have none"
    if (block := _encode_plain(column, expected.kind, expected.dtype, keys, step)) is not None:
        return block
    rows = [_as_tensor(name, value, expected.dtype, key) for value, key in zip(column, keys, strict=True)]
    return _encode_rows(name, rows, keys, step, expected.kind)


def _encode_one(name: str, value: Any, keys: Sequence[str], step: int | None) -> Block | None:
    """The one value of a turn, or of a session that settles, on the shortest way; None for what is not plain numbers."""
    expected = _EXPECTED.get(name)
    if expected is None or expected.dtype is None:
        return None
    if expected.kind is Kind.STACKED:
        value = (value,) if type(value) in _PLAIN_NUMBERS else None
    packed = _packed(value, expected.dtype)
    if packed is None:
        return None
    values = np.frombuffer(packed, dtype=np.uint8)
    return Block(Schema.of(expected.kind, expected.dtype, ()), values, [0, len(values)], step, keys)


def _encode_plain(column: list[Any], kind: Kind, dtype: torch.dtype, keys: Sequence[str], step: int | None) -> Block | None:
    """What agents write: lists of plain numbers, or a plain number a row; None for anything else. Nobody else has the memory."""
    schema = Schema.of(kind, dtype, ())
    size = schema.item_bytes
    if kind is Kind.STACKED:
        numbers = _packed(column, dtype) if _PLAIN_NUMBERS.issuperset(map(type, column)) else None
        if numbers is None:
            return None
        return Block(schema, np.frombuffer(numbers, dtype=np.uint8), [*range(0, len(column) * size + 1, size)], step, keys)
    rows = [packed for row in column if (packed := _packed(row, dtype)) is not None]
    if len(rows) < len(column):
        return None
    values = np.frombuffer(rows[0] if len(rows) == 1 else b"".join(rows), dtype=np.uint8)
    return Block(schema, values, [*itertools.accumulate((len(row) * size for row in rows), initial=0)], step, keys)


def _as_column(values: ColumnValues) -> torch.Tensor | list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        raise RuntimeError(f"a {type(values).__name__} is one value; give one a key")
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, np.ndarray):
        return _of_array(values)
    to_list: Callable[[], list[Any]] | None = getattr(values, "tolist", None)  # NonTensorStack
    return list(values) if to_list is None else to_list()


def _of_array(array: np.ndarray) -> torch.Tensor | list[Any]:
    """Numbers become a tensor; texts and objects stay one value a key."""
    if array.dtype.kind not in "biufc" or array.dtype.char in "gG":  # the last two are long doubles, which torch has not
        rows: list[Any] = array.tolist()
        return rows
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


_PLAIN_NUMBERS = frozenset({bool, int, float})
_CODES = {torch.int64: "q", torch.int32: "i", torch.float32: "f"}


def _packed(value: Any, dtype: torch.dtype) -> "array.array[Any] | bytearray | None":
    """The memory of a list of plain numbers, in a fraction of torch's time; None for what is more, or less, than that. An array is
    stricter than torch: no text, no None and no fraction becomes a whole number."""
    if type(value) not in (list, tuple) or not value:
        return None
    try:
        if (code := _CODES.get(dtype)) is not None:
            return array.array(code, value)
        if dtype is torch.bool and not (bits := bytearray(value)).translate(None, b"\0\1"):
            return bits
    except (TypeError, ValueError, OverflowError):
        return None
    return None


def _of_anything(value: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """As torch reads it, except that torch would turn 0.5 into 0 and 2 into True without a word. Raises ValueError for those."""
    tensor = torch.as_tensor(value, dtype=dtype)
    if dtype is not None and not dtype.is_floating_point:
        given = torch.as_tensor(value, dtype=torch.float64)
        for lost in (tensor.double() != given).nonzero()[:1]:
            raise ValueError(f"{given[tuple(lost)].item():g} would become {tensor[tuple(lost)].item()}")
    return tensor


def _as_tensor(name: str, value: Any, default: torch.dtype | None, key: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if default is not None and (packed := _packed(value, default)) is not None:
        return torch.frombuffer(packed, dtype=default)
    try:
        return _of_anything(value, None if isinstance(value, np.ndarray) else default)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FieldError(f"field {name!r} of key {key!r}: {type(value).__name__} is not a tensor ({error})") from None


def _check_count(name: str, count: int, keys: Sequence[str]) -> None:
    if count != len(keys):
        where = f"none for {keys[count]!r}" if count < len(keys) else f"the last key is {keys[-1]!r}"
        raise TagCountError(f"field {name!r} has {count} values for {len(keys)} keys: {where}")


def _encode_jagged(name: str, column: torch.Tensor, keys: Sequence[str], step: int | None) -> Block:
    values = values_of(column)
    if not _is_one_after_the_other(column, values):
        return _encode_rows(name, list(column.unbind()), keys, step, Kind.RAGGED)
    offsets: list[int] = column.offsets().tolist()  # type: ignore[attr-defined]  # the stubs know no nested tensors
    values = values[offsets[0] : offsets[-1]]
    schema = _schema(name, Kind.RAGGED, values.dtype, values.shape[1:], keys)
    size, first = schema.item_bytes, offsets[0]
    return Block(schema, _bytes(values).copy(), [(offset - first) * size for offset in offsets], step, keys)


def _is_one_after_the_other(column: torch.Tensor, values: torch.Tensor) -> bool:
    """Not so when it was narrowed, which leaves holes, or transposed: its second dimension is the ragged one only by default.
    (`column.is_contiguous()` misses the latter for entries of one number, and takes 20 us.)"""
    has_lengths = column.lengths() is not None  # type: ignore[attr-defined]  # the stubs know no nested tensors
    return not has_lengths and not isinstance(column.size(1), int) and values.is_contiguous()


def _encode_stacked(name: str, column: torch.Tensor, keys: Sequence[str], step: int | None) -> Block:
    schema = _schema(name, Kind.STACKED, column.dtype, column.shape[1:], keys)
    return Block(schema, _bytes(column).copy(), [row * schema.item_bytes for row in range(len(keys) + 1)], step, keys)


def _encode_rows(name: str, rows: list[torch.Tensor], keys: Sequence[str], step: int | None, kind: Kind) -> Block:
    first = rows[0]
    if kind is Kind.RAGGED and first.dim() == 0:
        raise FieldError(f"field {name!r} of key {keys[0]!r} is one number; it needs one entry a token")
    shape = first.shape[1:] if kind is Kind.RAGGED else first.shape
    schema = _schema(name, kind, first.dtype, shape, keys)
    if len(rows) == 1:
        values = _bytes(first).copy()
        return Block(schema, values, [0, len(values)], step, keys)
    for row, key in zip(rows, keys, strict=True):
        if row.dtype != schema.dtype or (row.shape[1:] if kind is Kind.RAGGED else row.shape) != shape:
            raise DtypeChangeError(
                f"field {name!r} of key {key!r} is {row.dtype} {list(row.shape)}, beside {schema} of {keys[0]!r} in one put"
            )
    parts = [_bytes(row) for row in rows]
    return Block(schema, np.concatenate(parts), [*itertools.accumulate(map(len, parts), initial=0)], step, keys)


def _schema(name: str, kind: Kind, dtype: torch.dtype, shape: Sequence[int], keys: Sequence[str]) -> Schema:
    schema = Schema.of(kind, dtype, tuple(shape))
    if schema.item_bytes == 0:
        raise FieldError(f"field {name!r} of key {keys[0]!r} has entries of shape {list(shape)}, which hold nothing")
    return schema


_PLAIN = frozenset({torch.int64, torch.int32, torch.float32, torch.bool})


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as uint8 [N]: a view where it is contiguous on the CPU."""
    if _is_plain(tensor):
        plain: np.ndarray = tensor.numpy()  # what agents write, in a third of the general way's time
        return plain.reshape(-1).view(np.uint8)
    if tensor.is_quantized:
        raise RuntimeError(f"{tensor.dtype} has a scale beside its values; give both as columns")
    dense = tensor.detach().cpu().contiguous().resolve_neg()
    if dense.dtype.is_complex:
        dense = dense.resolve_conj()
    array: np.ndarray = dense.view(-1).view(torch.uint8).numpy()
    return array


def _is_plain(tensor: torch.Tensor) -> bool:
    """Its memory is its values, in order, and nothing of autograd hangs on it."""
    if tensor.dim() > 1 or tensor.dtype not in _PLAIN or tensor.requires_grad or tensor.is_neg():
        return False
    return tensor.is_cpu and tensor.is_contiguous()


_ENCODER = msgspec.msgpack.Encoder()
_OBJECTS = Schema(kind=Kind.OBJECT)


def _encode_objects(name: str, values: list[Json], keys: Sequence[str], step: int | None) -> Block:
    parts = [_pack(name, value, key) for value, key in zip(values, keys, strict=True)]
    joined = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return Block(_OBJECTS, joined, [*itertools.accumulate(map(len, parts), initial=0)], step, keys)


def _pack(name: str, value: Json, key: str) -> bytes:
    try:
        _refuse_non_json(value)
        return _ENCODER.encode(value)
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise FieldError(f"field {name!r} of key {key!r} cannot be stored: {error}") from None


_SCALARS = frozenset({type(None), bool, int, float, str})


def _refuse_non_json(value: Json) -> None:
    """Only what comes back equal goes in (a tuple as a list); the encoder alone would turn sets, dates and classes into others."""
    if type(value) in _SCALARS:
        return
    if isinstance(value, dict):
        for name, entry in value.items():
            if type(name) is not str:
                raise TypeError(f"a dict with the key {name!r}, which is no str")
            if type(entry) not in _SCALARS:  # most are: half of the calls
                _refuse_non_json(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            if type(entry) not in _SCALARS:
                _refuse_non_json(entry)
    else:
        raise TypeError(f"{type(value).__name__} is not a JSON value")
