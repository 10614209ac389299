"""Columns of a batch as flat tensors for shared memory, and back.

stage -> [flat_columns] -> arena.place ... rank.arena.open -> [columns_of] -> actor, critic, reference

A ragged column is its values and its offsets. Columns of one axis share their offsets, there and here: so they can be combined.
"""

from collections.abc import Mapping

import torch
from tensordict import TensorDict

from asyncrl.protocol.ragged import from_values, is_ragged, values_of

_MARK = "|"
"""`name|2`: values of a ragged column, whose offsets are `|2`; `name|`: a column with one tensor a row. No field's name has it."""


def flat_columns(columns: TensorDict) -> dict[str, torch.Tensor]:
    """Views, nothing is copied."""
    flat: dict[str, torch.Tensor] = {}
    axes: list[torch.Tensor] = []
    for name, column in columns.items():
        assert isinstance(name, str)
        assert isinstance(column, torch.Tensor), "stages see flat columns of tensors"
        if is_ragged(column):
            flat[f"{name}{_MARK}{_number_of(offsets_in(column), axes)}"] = values_of(column)
        else:
            flat[f"{name}{_MARK}"] = column
    return {**flat, **{f"{_MARK}{number}": offsets for number, offsets in enumerate(axes)}}


def offsets_in(column: torch.Tensor) -> torch.Tensor:
    """int64 [B + 1] of a ragged column."""
    offsets: torch.Tensor = column.offsets()  # type: ignore[attr-defined]  # the stubs know no nested tensors
    return offsets


def _number_of(offsets: torch.Tensor, axes: list[torch.Tensor]) -> int:
    """Place among `axes`, to which new ones are added."""
    for number, known in enumerate(axes):
        if known is offsets or torch.equal(known, offsets):
            return number
    axes.append(offsets)
    return len(axes) - 1


def columns_of(flat: Mapping[str, torch.Tensor], num_rows: int) -> TensorDict:
    """The columns of `flat_columns`, on the memory of `flat`; what else is in it is left out."""
    columns = {}
    for key, tensor in flat.items():
        name, mark, axis = key.partition(_MARK)
        if name and mark:
            columns[name] = from_values(tensor, flat[f"{_MARK}{axis}"]) if axis else tensor
    return TensorDict(columns, batch_size=[num_rows])
