"""The store's own data as journal entries, and back: what a put, a lease or a block is on disk.

A dtype is its name, a block its bytes: nothing here does arithmetic, so every dtype that torch has comes back as it was.
"""

import functools
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from asyncrl.errors import JournalDamagedError
from asyncrl.journal.entries import Cells, Header, Op, PutColumn, PutRows, RowEntry, Saved, SavedRow
from asyncrl.transfer_queue.columns import Block, Kind, Schema
from asyncrl.transfer_queue.partition import Owner, Partition, Row

# --- out ------------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)  # every column of every put asks
def header_of(schema: Schema) -> Header:
    dtype = "" if schema.dtype is None else str(schema.dtype).removeprefix("torch.")
    return Header(kind=str(schema.kind), dtype=dtype, shape=schema.shape)


def put_ops(partition: Partition, keys: Sequence[str], blocks: Mapping[str, Block]) -> list[Op]:
    """Rows and columns of a put that has just been made."""
    rows = [partition.rows[key] for key in keys]
    row_ids = [row.row_id for row in rows]
    entries = [_row_entry(partition.partition_id, key, row) for key, row in zip(keys, rows, strict=True)]
    columns = [PutColumn(name, header_of(block.schema), row_ids, block.values.data, block.bounds) for name, block in blocks.items()]
    return [PutRows(entries), *columns]


def _row_entry(partition_id: str, key: str, row: Row) -> RowEntry:
    owner = row.owner
    return RowEntry(row.row_id, partition_id, key, owner.uid, owner.session_id, owner.attempt, owner.incarnation, row.tag)


# --- back -----------------------------------------------------------------------------------------------------------------------


_KINDS = frozenset(str(kind) for kind in Kind)


def schema_of(header: Header) -> Schema:
    """Raises JournalDamagedError for a dtype or kind that there is not."""
    dtype = getattr(torch, header.dtype, None) if header.dtype else None
    if header.kind not in _KINDS or (header.kind == Kind.OBJECT) == isinstance(dtype, torch.dtype):
        raise JournalDamagedError(f"the journal holds a column of kind {header.kind!r} and dtype {header.dtype!r}; there is none")
    return Schema(kind=Kind(header.kind), dtype=dtype, shape=header.shape)


def check_saved(saved: Saved, weights_step: int) -> None:
    """Raises JournalDamagedError unless each step after the weights and the purged ones has its record, with all of its rows."""
    steps = saved.steps
    for step in range(max(steps.purged, weights_step) + 1, steps.last + 1):
        record = saved.records.get(step)
        if record is None:
            raise JournalDamagedError(
                f"the journal has no record of step {step}; it is purged up to {steps.purged}, and ends with {steps.last}"
            )
        lost = next((row_id for row_id in record.row_ids if row_id not in saved.rows), None)
        if lost is not None:
            raise JournalDamagedError(
                f"the journal has not all rows of step {step}: row {lost} of {len(record.row_ids)} is missing"
            )


def partitions_of(saved: Saved, row_ids: Iterator[int], *, hidden: Collection[int] = ()) -> dict[str, Partition]:
    """The rows as they were, one block a (group, field): a group's rows come and go together. hidden: numbers of rows left out."""
    found: dict[str, dict[str, list[SavedRow]]] = {}
    for row_id, held in saved.rows.items():
        if row_id not in hidden:
            found.setdefault(held.row.partition_id, {}).setdefault(held.row.uid, []).append(held)
    return {partition_id: _partition_of(partition_id, groups, row_ids) for partition_id, groups in found.items()}


def _partition_of(partition_id: str, groups: Mapping[str, Sequence[SavedRow]], row_ids: Iterator[int]) -> Partition:
    """Rows in the order of their numbers, in which they came."""
    held_rows = sorted((held.row for members in groups.values() for held in members), key=operator.attrgetter("row_id"))
    rows = {row.key: _row_of(row) for row in held_rows}
    blocks: dict[str, list[Block]] = {}
    for members in groups.values():
        for name in dict.fromkeys(name for held in members for name in held.cells):
            blocks.setdefault(name, []).append(_block_of(name, [held for held in members if name in held.cells]))
    partition = Partition(partition_id, row_ids)
    partition.add_saved(rows, blocks)
    return partition


def _row_of(row: RowEntry) -> Row:
    owner = Owner(uid=row.uid, session_id=row.session_id, attempt=row.attempt, incarnation=row.incarnation)
    return Row(row.row_id, MappingProxyType(dict(row.tag)), owner)


def _block_of(name: str, members: Sequence[SavedRow]) -> Block:
    header = members[0].cells[name][0]
    return block_of(header, [held.cells[name][1] for held in members], [held.row.key for held in members])


def block_of(header: Header, parts: Sequence[bytes], owners: Sequence[str]) -> Block:
    """A block of bytes that were kept, in memory of its own."""
    bounds = [*itertools.accumulate(map(len, parts), initial=0)]
    values = np.frombuffer(bytearray().join(parts), dtype=np.uint8)
    return Block(schema_of(header), values, bounds, None, owners)


def turn_of(uid: str, session_id: int, cells: Cells) -> dict[str, Block]:
    return {name: block_of(header, [data], [f"{uid}_{session_id}"]) for name, (header, data) in cells.items()}
