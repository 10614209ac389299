"""What a stage read and wrote, as the lineage tells it: of the traced rows alone, from the very columns, never the payload.

run_stage -> [reports] -> StageResult -> observe
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from tensordict import TensorDict

from asyncrl.ports import Access, FieldReport
from asyncrl.protocol.ragged import is_ragged, lengths_of, rows_of

Rows = Sequence[int]
"""Positions of the traced rows in the batch."""


class _Schema(TypedDict):
    dtype: str
    device: str
    layout: str
    shape: tuple[int, ...]
    lengths: tuple[int, ...]


def mask_sums(columns: TensorDict, rows: Rows) -> tuple[int, ...] | None:
    """`response_mask.sum()` of each of the rows; None when the stage was not given the mask."""
    mask = columns.get("response_mask", None)
    return None if mask is None or not rows else tuple(int(row.sum()) for row in _chosen(rows_of(mask), rows))


def reports_of(
    stage: str, access: Access, columns: Mapping[str, torch.Tensor] | TensorDict, rows: Rows, sums: tuple[int, ...] | None
) -> tuple[FieldReport, ...]:
    """One report a column, by name. Nothing is looked at when no row is traced."""
    if not rows:
        return ()
    return tuple(
        FieldReport(stage=stage, access=access, field=name, mask_sums=sums, **_schema(columns.get(name), rows))
        for name in sorted(map(str, columns.keys()))
    )


def _schema(column: Any, rows: Rows) -> _Schema:
    """column: ragged, [B, ...], or the objects of a NonTensorStack."""
    if not isinstance(column, torch.Tensor):
        return {"dtype": "object", "device": "cpu", "layout": "object", "shape": (), "lengths": (1,) * len(rows)}
    dtype, device = str(column.dtype).removeprefix("torch."), str(column.device)
    if is_ragged(column):
        lengths = tuple(_chosen(lengths_of(column).tolist(), rows))
        return {"dtype": dtype, "device": device, "layout": "ragged", "shape": tuple(column.values().shape[1:]), "lengths": lengths}
    return {"dtype": dtype, "device": device, "layout": "stacked", "shape": tuple(column.shape[1:]), "lengths": (1,) * len(rows)}


def _chosen(values: Sequence[Any], rows: Rows) -> Iterable[Any]:
    return (values[row] for row in rows)
