"""Values of the TransferQueue as bytes: one block a (put, field), rows side by side, and the copies in and out.

[put] -> encode -> Block ... gather -> [get]

A block is a header (`Schema`) and raw bytes plus row bounds, whatever the dtype: nothing here does arithmetic, so every dtype that
torch has goes through unchanged, and objects are JSON values in msgpack. Invariants:
1. A block owns its bytes: `encode` copies in, `gather` copies out, nobody outside ever sees a view.
2. A block whose rows are more than half gone is rewritten by `compact`, so a row holds at most twice its own bytes alive.
"""

import array
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import msgspec
import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from asyncrl.errors import DtypeChangeError, FieldError, TagCountError
from asyncrl.fields import CATALOGUE, Axis, Field
from asyncrl.ports import Json
from asyncrl.protocol.ragged import from_values, is_ragged

ColumnValues = torch.Tensor | np.ndarray | Sequence[Any]
"""What a put gives for one field: a jagged or stacked tensor, an array, or one value a key."""
Fields = TensorDict | Mapping[str, ColumnValues]
"""What a put gives for all fields."""


class Kind(StrEnum):
    """How the rows of a column come back from a get."""

    RAGGED = "ragged"  # a jagged tensor: rows differ in length
    STACKED = "stacked"  # a tensor [B, ...]: rows have one shape
    OBJECT = "object"  # a NonTensorStack of JSON values


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """Header of a column. `shape` is that of one entry along the ragged axis, or of one stacked row; objects have neither."""

    kind: Kind
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    item_bytes: int = field(init=False, compare=False)
    """Bytes of one entry: a ragged row holds length x item_bytes, a stacked row exactly item_bytes."""

    def __post_init__(self) -> None:
        size = 1 if self.dtype is None else self.dtype.itemsize
        object.__setattr__(self, "item_bytes", size * math.prod(self.shape))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(kind: Kind, dtype: torch.dtype, shape: tuple[int, ...]) -> "Schema":
        """The schema, and the same object for the same header: a put of one row makes four, and compares them."""
        return Schema(kind=kind, dtype=dtype, shape=shape)

    def __str__(self) -> str:
        if self.dtype is None:
            return "objects"
        return f"{self.kind} {str(self.dtype).removeprefix('torch.')}{list(self.shape) if self.shape else ''}"


class Block:
    """Rows of one field from one put: row i is `values[bounds[i]:bounds[i + 1]]`, uint8.

    `owners[i]` is the key that still needs row i, None once it was cleared, retired or overwritten. `step` is the training step
    whose stage wrote the block, None for what agents wrote.
    """

    __slots__ = ("bounds", "live_bytes", "num_owned", "owners", "schema", "step", "values")

    def __init__(self, schema: Schema, values: np.ndarray, bounds: list[int], step: int | None, owners: Sequence[str]) -> None:
        self.schema = schema
        self.values = values
        self.bounds = bounds
        self.step = step
        self.owners: list[str | None] = list(owners)
        self.live_bytes = self.size_bytes
        self.num_owned = len(self.owners)

    @property
    def size_bytes(self) -> int:
        return self.bounds[-1]

    @property
    def is_wasteful(self) -> bool:
        return self.live_bytes * 2 < self.size_bytes

    def release(self, position: int) -> None:
        """Row `position` has no owner any more."""
        self.owners[position] = None
        self.num_owned -= 1
        self.live_bytes -= self.bounds[position + 1] - self.bounds[position]


Cell = tuple[Block, int]
"""Where one value lies: a block and the row in it."""


def compact(block: Block) -> Block:
    """The rows that still have an owner, in order, in a block of their own."""
    kept = [position for position, owner in enumerate(block.owners) if owner is not None]
    bounds = [*itertools.accumulate((block.bounds[i + 1] - block.bounds[i] for i in kept), initial=0)]
    values = np.empty(bounds[-1], dtype=np.uint8)
    np.concatenate([_row(block, position) for position in kept], out=values)
    return Block(block.schema, values, bounds, block.step, [owner for owner in block.owners if owner is not None])


def _row(block: Block, position: int) -> np.ndarray:
    return block.values[block.bounds[position] : block.bounds[position + 1]]


# --- in -------------------------------------------------------------------------------------------------------------------------


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
    try:
        return _encode(name, _as_column(values), keys, step)
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
    rows = [_as_tensor(name, value, expected.dtype, key) for value, key in zip(column, keys, strict=True)]
    return _encode_rows(name, rows, keys, step, expected.kind)


def _as_column(values: ColumnValues) -> torch.Tensor | list[Any]:
    if type(values) is list:
        return values
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


_CODES = {torch.int64: ("q", np.int64), torch.int32: ("i", np.int32), torch.float32: ("f", np.float32)}


def _of_numbers(value: Sequence[Any], dtype: torch.dtype | None) -> torch.Tensor | None:
    """A list of plain numbers in a third of torch's time; None for what is more, or less, than that. An array is as strict as
    torch: no text and no None becomes a number."""
    code, kind = _CODES.get(dtype, (None, None)) if dtype is not None else (None, None)
    try:
        if value and code is not None:
            return torch.from_numpy(np.frombuffer(array.array(code, value), dtype=kind))
        if value and dtype is torch.bool:
            return torch.from_numpy(np.frombuffer(bytearray(value), dtype=np.uint8) != 0)
    except (TypeError, ValueError, OverflowError):
        return None
    return None


def _as_tensor(name: str, value: Any, default: torch.dtype | None, key: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if type(value) in (list, tuple) and (numbers := _of_numbers(value, default)) is not None:
        return numbers
    try:
        return torch.as_tensor(value, dtype=None if isinstance(value, np.ndarray) else default)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FieldError(f"field {name!r} of key {key!r}: {type(value).__name__} is not a tensor ({error})") from None


def _check_count(name: str, count: int, keys: Sequence[str]) -> None:
    if count != len(keys):
        where = f"none for {keys[count]!r}" if count < len(keys) else f"the last key is {keys[-1]!r}"
        raise TagCountError(f"field {name!r} has {count} values for {len(keys)} keys: {where}")


def _encode_jagged(name: str, column: torch.Tensor, keys: Sequence[str], step: int | None) -> Block:
    if not column.is_contiguous():  # transposed, or narrowed so that its values have holes
        return _encode_rows(name, list(column.unbind()), keys, step, Kind.RAGGED)
    offsets: list[int] = column.offsets().tolist()  # type: ignore[attr-defined]  # the stubs know no nested tensors
    values = column.values()[offsets[0] : offsets[-1]]
    schema = _schema(name, Kind.RAGGED, values.dtype, values.shape[1:], keys)
    size, first = schema.item_bytes, offsets[0]
    return Block(schema, _bytes(values).copy(), [(offset - first) * size for offset in offsets], step, keys)


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
        plain: np.ndarray = tensor.view(torch.uint8).numpy()  # what agents write, in half of the general way's time
        return plain
    if tensor.is_quantized:
        raise RuntimeError(f"{tensor.dtype} has a scale beside its values; give both as columns")
    dense = tensor.detach().cpu().contiguous().resolve_neg()
    if dense.dtype.is_complex:
        dense = dense.resolve_conj()
    array: np.ndarray = dense.view(-1).view(torch.uint8).numpy()
    return array


def _is_plain(tensor: torch.Tensor) -> bool:
    """Its memory is its values, in order, and nothing of autograd hangs on it."""
    if tensor.dim() != 1 or tensor.dtype not in _PLAIN or tensor.requires_grad or tensor.is_neg():
        return False
    return tensor.is_cpu and tensor.is_contiguous()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder()


def _encode_objects(name: str, values: list[Json], keys: Sequence[str], step: int | None) -> Block:
    parts = [_pack(name, value, key) for value, key in zip(values, keys, strict=True)]
    joined = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return Block(Schema(kind=Kind.OBJECT), joined, [*itertools.accumulate(map(len, parts), initial=0)], step, keys)


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
            _refuse_non_json(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _refuse_non_json(entry)
    else:
        raise TypeError(f"{type(value).__name__} is not a JSON value")


# --- out ------------------------------------------------------------------------------------------------------------------------


class Gatherer:
    """The columns of one get. Ragged columns of equal lengths share one offsets tensor, which lets torch combine them."""

    def __init__(self) -> None:
        self._offsets: dict[tuple[int, ...], torch.Tensor] = {}

    def batch(self, cells: Mapping[str, Sequence[Cell]], size: int) -> TensorDict:
        """The columns of `size` rows."""
        return TensorDict({name: self.gather(column) for name, column in cells.items()}, batch_size=[size])

    def gather(self, cells: Sequence[Cell]) -> torch.Tensor | NonTensorStack:
        """The values at `cells`, in order, in memory that the caller owns. All cells have one schema."""
        schema = cells[0][0].schema
        if schema.kind is Kind.OBJECT:
            return NonTensorStack(*[_DECODER.decode(_row(*cell).data) for cell in cells])
        parts = [_row(*cell) for cell in cells]
        values = _join(parts, schema)
        if schema.kind is Kind.STACKED:
            return values
        return from_values(values, self._offsets_of(tuple([len(part) // schema.item_bytes for part in parts])))

    def _offsets_of(self, lengths: tuple[int, ...]) -> torch.Tensor:
        offsets = self._offsets.get(lengths)
        if offsets is None:
            offsets = self._offsets[lengths] = torch.tensor([*itertools.accumulate(lengths, initial=0)])
        return offsets


def _join(parts: list[np.ndarray], schema: Schema) -> torch.Tensor:
    assert schema.dtype is not None
    joined = torch.empty(sum(map(len, parts)), dtype=torch.uint8)
    np.concatenate(parts, out=joined.numpy())
    return joined.view(schema.dtype).view(-1, *schema.shape)
