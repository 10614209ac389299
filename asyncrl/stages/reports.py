"""What a stage read and wrote, as the lineage tells it: of the traced rows alone, from the very columns, never the payload.

run_stage -> [reports] -> StageResult -> observe
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from asyncrl.ports import Access, FieldReport
from asyncrl.protocol.ragged import is_ragged, values_of

Rows = Sequence[int]
"""Positions of the traced rows in the batch."""


def mask_sums(columns: TensorDict, rows: Rows) -> tuple[int, ...] | None:
    """`response_mask.sum()` of each of the rows; None when the stage was not given the mask."""
    mask = columns.get("response_mask", None) if rows else None
    if mask is None:
        return None
    values, bounds = values_of(mask), mask.offsets().tolist()
    return tuple(int(values[bounds[row] : bounds[row + 1]].sum()) for row in rows)


def reports_of(
    stage: str, access: Access, columns: Mapping[str, torch.Tensor] | TensorDict, rows: Rows, sums: tuple[int, ...] | None
) -> tuple[FieldReport, ...]:
    """One report a column, by name. Nothing is looked at when no row is traced."""
    if not rows:
        return ()
    lengths = _Lengths(rows)
    names = sorted(map(str, columns.keys()))
    return tuple(_report(stage, access, name, columns.get(name), lengths, sums) for name in names)


class _Lengths:
    """Lengths of the rows in one ragged column after the other; columns that share their offsets are looked at once."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._known: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = {}  # with its offsets, so that the id stays theirs

    def of(self, column: torch.Tensor) -> tuple[int, ...]:
        offsets: torch.Tensor = column.offsets()  # type: ignore[attr-defined]  # the stubs know no nested tensors
        if id(offsets) not in self._known:
            bounds = offsets.tolist()
            self._known[id(offsets)] = (offsets, tuple(bounds[row + 1] - bounds[row] for row in self.rows))
        return self._known[id(offsets)][1]


def _report(stage: str, access: Access, name: str, column: Any, lengths: _Lengths, sums: tuple[int, ...] | None) -> FieldReport:
    """column: ragged, [B, ...], or the objects of a NonTensorStack."""
    is_tensor = isinstance(column, torch.Tensor)
    layout = "object" if not is_tensor else "ragged" if is_ragged(column) else "stacked"
    return FieldReport(
        stage=stage,
        access=access,
        field=name,
        dtype=str(column.dtype).removeprefix("torch.") if is_tensor else "object",
        device=str(column.device) if is_tensor else "cpu",
        layout=layout,
        shape=tuple(values_of(column).shape[1:] if layout == "ragged" else column.shape[1:]) if is_tensor else (),
        lengths=lengths.of(column) if layout == "ragged" else (1,) * len(lengths.rows),
        mask_sums=sums,
    )
