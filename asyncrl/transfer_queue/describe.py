"""What the store holds of some keys: each field's schema and lengths, without a copy of any value.

TransferQueue.describe -> [describe] -> observe
"""

from collections.abc import Sequence

import numpy as np

from asyncrl.ports import HeldField
from asyncrl.transfer_queue.columns import Block, Kind
from asyncrl.transfer_queue.partition import Partition, Row


def describe(partition: Partition, keys: Sequence[str]) -> tuple[HeldField, ...]:
    """One entry a field that any of `keys` has, in the order the columns came; lengths and mask sums follow `keys`.

    Raises UnknownPartitionError or UnknownKeyError.
    """
    rows = [partition.row(key) for key in keys]
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    sums = _mask_sums(rows)
    return tuple(_held(name, rows, sums) for name in names)


def _held(name: str, rows: Sequence[Row], sums: tuple[int, ...] | None) -> HeldField:
    block = next(row.cells[name] for row in rows if name in row.cells)[0]
    schema = block.schema
    return HeldField(
        field=name,
        dtype="object" if schema.dtype is None else str(schema.dtype).removeprefix("torch."),
        device="cpu",
        layout=str(schema.kind),
        shape=schema.shape,
        lengths=tuple(_length(*row.cells[name]) if name in row.cells else -1 for row in rows),
        mask_sums=sums,
        by_stage=block.step is not None,
    )


def _length(block: Block, position: int) -> int:
    if block.schema.kind is not Kind.RAGGED:
        return 1
    return (block.bounds[position + 1] - block.bounds[position]) // block.schema.item_bytes


def _mask_sums(rows: Sequence[Row]) -> tuple[int, ...] | None:
    cells = [row.cells.get("response_mask") for row in rows]
    return tuple(_sum(*cell) for cell in cells if cell is not None) if all(cells) else None


def _sum(block: Block, position: int) -> int:
    return int(np.count_nonzero(block.values[block.bounds[position] : block.bounds[position + 1]]))
