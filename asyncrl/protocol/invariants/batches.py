"""Invariants that compare a batch with something else: its parts, its groups, other stages, other steps, the store, the mesh."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from tensordict import TensorDict

from asyncrl.errors import FieldError
from asyncrl.keys import TrajectoryKey
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.data_proto import pad_batch, unpad_field
from asyncrl.protocol.invariants.tokens import Tokens, differ, names_of, refuse_rows
from asyncrl.protocol.ragged import is_ragged, lengths_of, values_of

# --- its groups and parts ---------------------------------------------------------------------------------------------------------


def groups_are_whole(meta: KVBatchMeta, *, group_size: int, partition_id: str, may_lack_sessions: bool = False) -> None:
    """Every group has rows of all its sessions 0 .. group_size - 1, each with the indexes 0 .. k - 1; all of one partition.

    may_lack_sessions: a group whose sessions failed in part is trained on without these. Padding rows belong to no group. How many
    trajectories a session has only its rows say, so a missing last one is not seen here.
    """
    if meta.partition_id != partition_id:
        raise FieldError(f"{meta.keys[0]}: from partition {meta.partition_id!r}; allowed: {partition_id!r}")
    groups: dict[str, dict[int, list[int]]] = {}
    for key, tag in zip(meta.keys, meta.tags, strict=True):
        if not tag.get("is_padding"):
            parsed = TrajectoryKey.parse(key)
            groups.setdefault(parsed.uid, {}).setdefault(parsed.session_id, []).append(parsed.index)
    for uid, sessions in groups.items():
        is_whole = set(sessions) <= set(range(group_size)) if may_lack_sessions else sorted(sessions) == list(range(group_size))
        if not is_whole:
            raise FieldError(f"group {uid!r} has rows of the sessions {sorted(sessions)}; allowed: each of 0 to {group_size - 1}")
        for session_id, indexes in sessions.items():
            if sorted(indexes) != list(range(len(indexes))):
                raise FieldError(
                    f"group {uid!r} has the trajectories {sorted(indexes)} of its session {session_id}; allowed: 0, 1, ... in a row"
                )


def groups_stay_together(parts: Sequence[KVBatchMeta]) -> None:
    """A mini-batch is a number of whole groups."""
    place: dict[str, int] = {}
    for number, part in enumerate(parts):
        for key, uid in zip(part.keys, part.uids, strict=True):
            if place.setdefault(uid, number) != number:
                raise FieldError(f"{key}: its group {uid!r} is split over parts {place[uid]} and {number}")


def parts_make_up_the_whole(whole: KVBatchMeta, parts: Sequence[KVBatchMeta]) -> None:
    """A reorder (one part), the mini-batches of a step or the shards of the ranks hold each row once, with its tags unchanged."""
    tags = dict(zip(whole.keys, whole.tags, strict=True))
    for key, tag in ((key, tag) for part in parts for key, tag in zip(part.keys, part.tags, strict=True)):
        if key not in tags:
            raise FieldError(f"{key}: in two parts of a batch, or not in the batch at all")
        if (expected := tags.pop(key)) != tag:
            raise FieldError(f"{key}: tag changed from {dict(expected)} to {dict(tag)} in a reorder")
    if tags:
        raise FieldError(f"{next(iter(tags))}: in no part of its batch; {len(tags)} of {len(whole)} rows are lost")


# --- other writers and other steps ------------------------------------------------------------------------------------------------


def one_writer_a_column(meta: KVBatchMeta, written: Iterable[str], *, writer: str, writers: Mapping[str, str]) -> None:
    """Of each (key, field). writers: field -> who wrote it for these keys before; the same one may write it again."""
    for name in written:
        if (first := writers.get(name, writer)) != writer:
            raise FieldError(
                f"{meta.keys[0]}: field {name!r} of its {len(meta)} rows is written by {writer!r}, "
                f"but {first!r} has written it before; allowed: one writer"
            )


def repeats_are_equal(meta: KVBatchMeta, before: TensorDict, after: TensorDict, *, writer: str) -> None:
    """Who writes a column twice writes the same: every column that both have is equal, entry by entry (NaN equals NaN)."""
    for name in names_of(after):
        if name not in names_of(before):
            continue
        old, new = before.get(name), after.get(name)
        if not isinstance(new, torch.Tensor):
            _refuse_objects(meta, name, old.tolist(), new.tolist(), writer)
            continue
        if is_ragged(new):
            refuse_rows(meta, lengths_of(new), lengths_of(old), f"field {name!r} written again by {writer!r} has", "entries, not")
            found = Tokens(new).first(_any(differ(values_of(old), values_of(new))))
            old, new = values_of(old), values_of(new)
        else:
            found = [(row, 0, row) for row in _any(differ(old, new)).nonzero()[:1, 0].tolist()]
        for row, position, at in found:
            raise FieldError(
                f"{meta.keys[row]}: field {name!r} written again by {writer!r} is {new[at].tolist()} at position {position}, "
                f"but it was {old[at].tolist()}"
            )


def trained_once(meta: KVBatchMeta, *, step: int, lineage: Mapping[int, Sequence[str]]) -> None:
    """A trajectory is trained at most once among the steps of a lineage: those that the weights, or a checkpoint, descend from.

    lineage: step -> its keys. A step that is repeated after a restart, and so is in it already, has the keys that it had.
    """
    if step in lineage and tuple(lineage[step]) != meta.keys:
        odd = next(iter({*meta.keys} ^ {*lineage[step]}), meta.keys[0])
        raise FieldError(f"{odd}: step {step} was recorded with {len(lineage[step])} keys, now has {len(meta)}, not the same ones")
    keys = set(meta.keys)
    for earlier, trained in lineage.items():
        for key in trained:
            if earlier != step and key in keys:
                raise FieldError(f"{key}: trained in step {earlier} and again in step {step}; allowed: once in a lineage")


# --- the store, the layout, the mesh ----------------------------------------------------------------------------------------------


def cleanup_leaves_nothing(meta: KVBatchMeta, remaining: Iterable[str]) -> None:
    """remaining: keys, of prompts and trajectories, still visible in the partition after the batch was retired or cleared.

    A retired row may lie hidden in the store until its step is purged; that it is hidden is what must hold.
    """
    uids = set(meta.uids)
    for key in remaining:
        if key in uids or key.rsplit("_", 2)[0] in uids:
            raise FieldError(
                f"{key}: still in partition {meta.partition_id!r} after its group was cleaned up, one of {len(uids)} of a batch"
            )


def padding_and_back_is_the_identity(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Not part of `check_batch`: it copies the batch twice, and property tests hold it for every field and dtype."""
    padded = pad_batch(columns)
    for name in names_of(columns):
        column = columns.get(name)
        if isinstance(column, torch.Tensor) and is_ragged(column):
            back = unpad_field(padded, name, padded.batch[name])
            refuse_rows(meta, lengths_of(back), lengths_of(column), f"padding and back gives field {name!r}", "entries, not")
            for row, position, _ in Tokens(column).first(_any(differ(values_of(back), values_of(column)))):
                raise FieldError(f"{meta.keys[row]}: padding and back changes field {name!r} at position {position}")


def mini_batches_divide_evenly(parts: Sequence[KVBatchMeta], *, data_parallel: int) -> None:
    """Where a mesh needs equal counts: every mini-batch, its padding rows included, has as many rows for each rank."""
    for number, part in enumerate(parts):
        if len(part) % data_parallel:
            raise FieldError(
                f"{part.keys[-1]}: mini-batch {number} has {len(part)} rows for data parallel {data_parallel}, "
                f"{len(part) % data_parallel} too many; fill it with rows tagged is_padding"
            )


def data_parallel_follows_the_actor(*, world_size: int, sequence_parallel: int, data_parallel: int) -> None:
    """Logical actor DP = world size / sequence parallel; the rollout's parallelism has no say in it."""
    if data_parallel * sequence_parallel != world_size:
        raise FieldError(
            f"data parallel {data_parallel} x sequence parallel {sequence_parallel} = {data_parallel * sequence_parallel}, "
            f"but the actor has {world_size} ranks"
        )


def _any(wrong: torch.Tensor) -> torch.Tensor:
    """[N, ...] -> [N]: an entry of several numbers is wrong when one of them is."""
    return wrong if wrong.ndim == 1 else wrong.flatten(1).any(1)


def _refuse_objects(meta: KVBatchMeta, name: str, old: list[object], new: list[object], writer: str) -> None:
    for key, was, now in zip(meta.keys, old, new, strict=True):
        if was != now:
            raise FieldError(f"{key}: field {name!r} written again by {writer!r} is {now!r}, but it was {was!r}")
