"""Padding rows: trajectories that only fill a mesh whose ranks need equal counts.

    store -> get (trajectories) -> [with_padding] -> rank computes -> [drop_padding] -> put (trajectories) -> store

They live between the store and the ranks. The store never holds one, so nothing that reads it (replay, lineage, dumps, retirement)
can count one. Today's actor takes different counts on its ranks and asks for none; `balance(equal_counts=True)` does. Invariants:
1. A padding row weighs nothing: no policy token, no reward, no advantage, its own uid, tag `is_padding`. Adding any number of them
   changes no loss, gradient, metric or count (`tests/training/test_padding_changes_nothing.py`, to the bit).
2. It is as short as can be: one prompt and one response token, so that every axis has an entry and no column of a shard is empty.
3. Adding and dropping is the identity.

Where we differ from verl 0.9.1: its padding rows are written to the store, are 128 tokens long, share a uid, take a part in the
sequence means of the loss, and are made wherever a count is no multiple of the mini-batch.
"""

from collections.abc import Callable, Sequence

import torch
from tensordict import NonTensorStack, TensorDict

from asyncrl.errors import FieldError
from asyncrl.fields import Axis, Field, Tag
from asyncrl.fields import field as catalogue_field
from asyncrl.keys import TrajectoryKey
from asyncrl.ports import GroupStatus, Json
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import is_ragged, ragged, rows_of

PADDING_TOKEN = 0
"""The id that every vocabulary has. It is never scored, and nothing looks at it but the padding row itself."""

_LENGTHS = {Axis.PROMPT: 1, Axis.RESPONSE: 1, Axis.SEQUENCE: 2}
_DICTIONARIES = frozenset(
    {"extra_fields", "extra_info", "multi_modal_inputs", "reward_model", "tools_kwargs", "interaction_kwargs"}
)


def padded(batch: KVBatchMeta, count: int) -> KVBatchMeta:
    """The batch with `count` padding rows after it: keys and tags only."""
    uids = _free_uids(batch, count)
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=(*batch.keys, *(str(TrajectoryKey(uid=uid, session_id=0, index=0)) for uid in uids)),
        tags=(*batch.tags, *(_tag() for _ in uids)),
    )


def with_padding(batch: KVBatchMeta, columns: TensorDict) -> TensorDict:
    """Columns of the batch's trajectories, in its order, completed by its padding rows.

    Dtypes, devices and trailing shapes are those of the columns. Raises FieldError when the columns are not those of the
    trajectories, or there is not one to take the shapes from.
    """
    padding = batch.padding
    real = len(batch) - sum(padding)
    if columns.batch_size[:1] != torch.Size([real]) or not real:
        raise FieldError(f"a batch of {real} trajectories and {len(batch) - real} padding rows got {list(columns.batch_size)} rows")
    if real == len(batch):
        return columns

    def complete(name: str, rows: Sequence[torch.Tensor | Json]) -> list[torch.Tensor | Json]:
        trajectories = iter(rows)
        filler = _filler(catalogue_field(name), rows[0])
        return [filler(uid) if fills else next(trajectories) for uid, fills in zip(batch.uids, padding, strict=True)]

    return _by_rows(columns, complete, len(batch))


def drop_padding(batch: KVBatchMeta, columns: TensorDict) -> tuple[KVBatchMeta, TensorDict]:
    """The trajectories alone, what `with_padding` was given.

    Raises FieldError when there is none: a rank with only padding rows has nothing to write.
    """
    kept = [row for row, fills in enumerate(batch.padding) if not fills]
    if columns.batch_size[:1] != torch.Size([len(batch)]) or not kept:
        raise FieldError(f"a batch of {len(kept)} trajectories among {len(batch)} rows got {list(columns.batch_size)} rows")
    if len(kept) == len(batch):
        return batch, columns
    return batch.select(kept), _by_rows(columns, lambda name, rows: [rows[row] for row in kept], len(kept))


# --- one row ----------------------------------------------------------------------------------------------------------------------


def _tag() -> Tag:
    lengths = {"prompt_len": 1, "response_len": 1, "seq_len": 2, "policy_len": 0}
    return {
        "status": GroupStatus.FINISHED.value,
        "is_padding": True,
        "global_steps": 0,
        "min_global_steps": 0,
        "max_global_steps": 0,
        **lengths,
        "score": 0.0,
    }


def _free_uids(batch: KVBatchMeta, count: int) -> list[str]:
    taken, uids, number = set(batch.uids) if count else set(), list[str](), 0
    while len(uids) < count:
        if (uid := f"padding{number}") not in taken:
            uids.append(uid)
        number += 1
    return uids


def _filler(entry: Field, example: torch.Tensor | Json) -> Callable[[str], torch.Tensor | Json]:
    """What a padding row of some uid has in the field; example: the value of a trajectory."""
    if not isinstance(example, torch.Tensor):
        return lambda uid: uid if entry.name == "uid" else {} if entry.name in _DICTIONARIES else None
    if entry.axis is Axis.NONE:
        return lambda uid: torch.zeros_like(example)
    row = torch.zeros((_LENGTHS[entry.axis], *example.shape[1:]), dtype=example.dtype, device=example.device)
    if entry.name in ("prompts", "responses", "input_ids"):
        row.fill_(PADDING_TOKEN)
    elif entry.name == "position_ids":
        row += torch.arange(len(row), device=row.device).view(-1, *[1] * (row.ndim - 1))
    elif entry.name == "attention_mask":
        row.fill_(True)
    elif entry.name == "token_versions":
        row.fill_(-1)
    return lambda uid: row


def _by_rows(
    columns: TensorDict,
    change: Callable[[str, Sequence[torch.Tensor | Json]], list[torch.Tensor | Json]],
    num_rows: int,
) -> TensorDict:
    """New columns: each a list of rows, changed, and put together again in its own layout."""
    changed: dict[str, torch.Tensor | NonTensorStack] = {}
    for key in columns.keys():  # noqa: SIM118  a TensorDict iterates over rows, not names
        name, column = str(key), columns.get(key)
        if not isinstance(column, torch.Tensor):
            changed[name] = NonTensorStack(*change(name, column.tolist()))
        elif is_ragged(column):
            changed[name] = ragged(change(name, rows_of(column)))
        else:
            changed[name] = torch.stack(change(name, column.unbind()))
    return TensorDict(changed, batch_size=[num_rows])
