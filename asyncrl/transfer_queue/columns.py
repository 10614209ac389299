"""Values of the TransferQueue as bytes: one block a (put, field), rows side by side, and the copies out.

put -> encoding -> [Block] ... [gather] -> get

A block is a header (`Schema`) and raw bytes plus row bounds, whatever the dtype: nothing here does arithmetic, so every dtype that
torch has goes through unchanged, and objects are JSON values in msgpack. Invariants:
1. A block owns its bytes: `encode` copies in, `gather` copies out, nobody outside ever sees a view.
2. A block whose rows are more than half gone is rewritten by `compact`, so a row holds at most twice its own bytes alive.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch.nested._internal.nested_tensor import NestedTensor


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

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape))  # the kind is an enum, whose own hash takes three times as long

    def __str__(self) -> str:
        if self.dtype is None:
            return "objects"
        return f"{self.kind} {str(self.dtype).removeprefix('torch.')}{list(self.shape) if self.shape else ''}"


class Block:
    """Rows of one field from one put: row i is `values[bounds[i]:bounds[i + 1]]`, uint8.

    `owners[i]` is the key that still needs row i, None once it was cleared, retired or overwritten. `step` is the training step
    whose stage wrote the block, None for what agents wrote.
    """

    __slots__ = ("bounds", "live_bytes", "num_owned", "owners", "schema", "size_bytes", "step", "values")

    def __init__(self, schema: Schema, values: np.ndarray, bounds: list[int], step: int | None, owners: Sequence[str]) -> None:
        self.schema = schema
        self.values = values
        self.bounds = bounds
        self.step = step
        self.owners: list[str | None] = list(owners)
        self.size_bytes = self.live_bytes = bounds[-1]
        self.num_owned = len(self.owners)

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


# --- out ------------------------------------------------------------------------------------------------------------------------

_DECODER = msgspec.msgpack.Decoder()


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
        return _jagged(values, self._offsets_of(tuple([len(part) // schema.item_bytes for part in parts])))

    def _offsets_of(self, lengths: tuple[int, ...]) -> torch.Tensor:
        offsets = self._offsets.get(lengths)
        if offsets is None:
            offsets = self._offsets[lengths] = torch.tensor([*itertools.accumulate(lengths, initial=0)])
        return offsets


def _jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """What `ragged.from_values` makes, without a node of autograd, which nobody asks of a copy: half the time of a get. Every
    operation on a jagged tensor makes its result in this way."""
    column: torch.Tensor = NestedTensor(values, offsets)
    return column


def _join(parts: list[np.ndarray], schema: Schema) -> torch.Tensor:
    assert schema.dtype is not None
    joined = torch.empty(sum(map(len, parts)), dtype=torch.uint8)
    np.concatenate(parts, out=joined.numpy())
    return joined.view(schema.dtype).view(-1, *schema.shape)
