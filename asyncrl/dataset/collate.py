"""collate_fn: rows to the columns of a batch."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asyncrl.errors import FieldError
from asyncrl.ports import Json

if TYPE_CHECKING:
    import numpy as np
    import torch


def collate_fn(rows: Sequence[Mapping[str, Json]]) -> "dict[str, torch.Tensor | np.ndarray]":
    """Columns of B rows: tensors stacked to [B, ...]; everything else a 1-D object array of B values, equal-length lists included.

    A column that only some rows have is None in the others, when it holds no tensors. Besides, `dummy_tensor`, uint8 zeros [B, 1],
    which keeps a batch without any tensor countable.
    Raises FieldError without rows, and when the tensors of a column differ in shape or dtype or are missing in some rows.
    """
    import torch  # here, so that reading data does not load it

    if not rows:
        raise FieldError("collate_fn was given no rows")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _column(name, [row.get(name) for row in rows]) for name in names}
    return {**columns, "dummy_tensor": torch.zeros((len(rows), 1), dtype=torch.uint8)}


def _column(name: str, values: list[Json]) -> "torch.Tensor | np.ndarray":
    import torch

    from asyncrl.protocol.data_proto import object_array

    if not any(isinstance(value, torch.Tensor) for value in values):
        return object_array(values)
    kinds = {(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value) for value in values}
    if len(kinds) > 1:
        raise FieldError(f"column {name!r} cannot be stacked: its rows hold {', '.join(sorted(map(str, kinds)))}")
    return torch.stack(values)
