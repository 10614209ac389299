"""Ragged columns (jagged nested tensors) and their way to padded tensors and back. The round trip is the identity.

Legend: B rows, N = sum of lengths, L longest row. A ragged column is a torch jagged nested tensor of shape [B, *]; it is values [N]
plus offsets [B + 1]. Works for every dtype that a plain tensor can have, float8 and uint16 included: never arithmetic on values.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from asyncrl.errors import FieldError

Side = Literal["left", "right"]

_WRITTEN_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64} | dict.fromkeys(
    (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu), torch.uint8
)
"""torch cannot write these through a mask (float8: not a single value); the same bits under another name it can."""


def ragged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of shape [length, ...] (zero lengths allowed) as one jagged tensor that owns its memory.

    Raises FieldError for no rows, and for rows of several dtypes (torch would promote them silently).
    """
    if not rows:
        raise FieldError("a ragged column needs at least one row")
    if len(dtypes := {row.dtype for row in rows}) > 1:
        raise FieldError(f"rows of one column have dtypes {sorted(map(str, dtypes))}")
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    return from_values(torch.cat(list(rows)), offsets_of(lengths))


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """lengths: int64 [B]. Returns offsets, int64 [B + 1]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def from_values(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """values [N, ...], offsets int64 [B + 1]; columns that share one `offsets` object can be combined arithmetically."""
    if values.requires_grad or values.dim() == 0 or offsets.dim() != 1:
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    column: torch.Tensor = NestedTensor(values, offsets)  # the same, without a node of autograd: a tenth of the time
    return column


def is_ragged(column: torch.Tensor) -> bool:
    return isinstance(column, NestedTensor) or column.is_nested  # the latter alone takes ten times as long


def values_of(column: torch.Tensor) -> torch.Tensor:
    """The entries of all rows one after the other, [N, ...]: the column's own memory. As `column.values()`, which makes a node of
    autograd, at twenty times the time, where nobody can ask for a gradient."""
    if isinstance(column, NestedTensor) and not column.requires_grad:
        values: torch.Tensor = column._values
        return values
    return column.values()


def lengths_of(column: torch.Tensor) -> torch.Tensor:
    """int64 [B]."""
    offsets: torch.Tensor = column.offsets()  # type: ignore[attr-defined]  # the stubs know no nested tensors
    return offsets.diff()


def rows_of(column: torch.Tensor) -> list[torch.Tensor]:
    """One tensor a row, each a view."""
    return list(torch.split(values_of(column), lengths_of(column).tolist()))


def to_padded(column: torch.Tensor, *, padding: float = 0, side: Side = "right", length: int | None = None) -> torch.Tensor:
    """[B, L, ...] of the column's dtype, rows flush with the side opposite to the padding.

    `side` is where the padding goes. Raises FieldError when a row is longer than `length`.
    """
    values, lengths = values_of(column), lengths_of(column)
    longest = int(lengths.max())
    width = longest if length is None else length
    if longest > width:
        raise FieldError(f"row {int(lengths.argmax())} has {longest} entries but the padded length is {width}")
    padded = torch.full((len(lengths), width, *values.shape[1:]), padding, dtype=values.dtype, device=values.device)
    return fill(padded, mask_of(lengths, width, side=side), values)


def to_ragged(padded: torch.Tensor, lengths: torch.Tensor, *, side: Side = "right") -> torch.Tensor:
    """Inverse of `to_padded`. padded [B, L, ...], lengths int64 [B]. Raises FieldError when a length exceeds L."""
    longest = int(lengths.max())
    if longest > padded.shape[1]:
        raise FieldError(f"row {int(lengths.argmax())} has length {longest} but the padded length is {padded.shape[1]}")
    return from_values(padded[mask_of(lengths, padded.shape[1], side=side)], offsets_of(lengths))


def fill(padded: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write values [N, ...] in order to the N places of `padded` [B, L, ...] where `mask` [B, L] is True; returns `padded`."""
    if bits := _WRITTEN_AS.get(values.dtype):
        padded.view(bits)[mask] = values.view(bits)
    else:
        padded[mask] = values
    return padded


def mask_of(lengths: torch.Tensor, width: int, *, side: Side = "right") -> torch.Tensor:
    """bool [B, width], True on real entries; `side` is where the padding goes."""
    positions = torch.arange(width, device=lengths.device)
    if side == "right":
        return positions < lengths[:, None]
    return positions >= width - lengths[:, None]
