"""balance: which rank trains which rows, so that no rank waits for another.

    replay.sample -> [balance] -> old_log_prob, ref_log_prob, advantage, update_actor -> retire

It orders keys; the payload stays in the store. Within a mini-batch sessions go to the ranks by largest differencing of their
workload (`algorithms/partition.py`); the ranks' shares make up the batch, one contiguous shard a rank. Invariants:
1. `parts_make_up_the_whole`: each row is in one shard, its tags unchanged.
2. `groups_stay_together`: the mini-batches are the same whole groups whatever the number of ranks; only who computes a row changes.
   The rows of a session are on one rank: a sequence-level loss sees all of it.
3. With one rank the batch is left as it is, and the same input always gives the same order.
4. Losses are normalised by counts over all ranks (`algorithms/aggregation.py`), so counts of rows may differ between ranks. Padding
   rows are made only where `equal_counts` asks for them, in the mini-batch that needs them.

What ranks take from it: `Dispatch.row_shards`, the rows of each in each mini-batch. A share may be empty; such a rank still joins
the collectives of that step, as it does when others have more micro-batches (`training/microbatch.py`). Ranks are those of data
parallelism: world / (sequence parallel x tensor parallel).

Where we differ from verl 0.9.1:
1. Balance is within each mini-batch, not over the whole batch: the ranks meet at every optimizer step, and a group is not split.
2. Counts of rows may differ between ranks, so parts are balanced to a fraction of a session and there are no padding rows.
3. The heaviest share goes to the rank with the least work so far.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.algorithms.partition import contiguous, partition, workload
from asyncrl.errors import FieldError
from asyncrl.ports import Shards
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants import groups_stay_together, parts_make_up_the_whole
from asyncrl.protocol.mini_batches import mini_batches
from asyncrl.protocol.padding import padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The rows of one rank. mini_batches: row numbers of the shard for each optimizer step; empty where the rank has no share."""

    batch: KVBatchMeta
    mini_batches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A batch as its ranks take it. whole: the sampled batch, and behind it padding rows where counts had to be equal."""

    whole: KVBatchMeta
    shards: tuple[Shard, ...]
    metrics: dict[str, float]
    """`global_seqlen/*`: tokens a rank, see `seqlen_metrics`."""

    @property
    def batch(self) -> KVBatchMeta:
        """The rows in order of the ranks."""
        if len(self.shards) == 1:
            return self.shards[0].batch
        return self.whole.select(_positions(self.whole, [key for shard in self.shards for key in shard.batch.keys]))

    @property
    def row_shards(self) -> Shards:
        """Rank and mini-batch -> rows of `batch`; () for one rank."""
        if len(self.shards) == 1:
            return ()
        starts = itertools.accumulate((len(shard.batch) for shard in self.shards), initial=0)
        return tuple(
            tuple(tuple(start + row for row in rows) for rows in shard.mini_batches)
            for start, shard in zip(starts, self.shards, strict=False)
        )

    @property
    def mini_batches(self) -> tuple[KVBatchMeta, ...]:
        """The rows of each optimizer step, over all ranks."""
        steps = zip(*(shard.mini_batches for shard in self.shards), strict=True)
        keys = [[self.shards[rank].batch.keys[row] for rank, rows in enumerate(step) for row in rows] for step in steps]
        return tuple(self.whole.select(_positions(self.whole, chosen)) for chosen in keys)

    def check(self) -> None:
        """Raises FieldError when a row was lost, doubled or changed, a group is split over steps, or a session over ranks."""
        parts_make_up_the_whole(self.whole, [shard.batch for shard in self.shards])
        parts_make_up_the_whole(self.whole, self.mini_batches)
        groups_stay_together(self.mini_batches)
        owners: dict[str, int] = {}
        for rank, shard in enumerate(self.shards):
            for session in filter(None, shard.batch.sessions):
                if owners.setdefault(session, rank) != rank:
                    raise FieldError(f"session {session!r} is split over ranks {owners[session]} and {rank}")


def balance(batch: KVBatchMeta, dp_size: int, *, groups_each: int, equal_counts: bool = False) -> Dispatch:
    """Shares of about equal workload for each of `dp_size` ranks, mini-batch by mini-batch of `groups_each` groups.

    Rows keep their order within a share. equal_counts: every rank gets the same number of rows of each mini-batch; padding rows are
    added where it does not divide. Milliseconds for a thousand rows, so not for the loop.
    Raises FieldError when a tag has no seq_len, and when equal counts are asked for with a session of several rows.
    """
    if dp_size < 1:
        raise ValueError(f"{dp_size} ranks cannot take a batch of {len(batch)} rows; give at least 1")
    steps = mini_batches(batch.groups, groups_each)
    if dp_size == 1:
        alone = Shard(batch=batch, mini_batches=tuple(map(tuple, steps)))
        return Dispatch(whole=batch, shards=(alone,), metrics=seqlen_metrics(batch, [alone]))
    whole = _fill_up(batch, steps, dp_size) if equal_counts else batch
    shards = [_shard(whole, shares) for shares in _shares(whole, steps, dp_size, equal_counts)]
    return Dispatch(whole=whole, shards=tuple(shards), metrics=seqlen_metrics(batch, shards))


def seqlen_metrics(batch: KVBatchMeta, shards: Sequence[Shard]) -> dict[str, float]:
    """Tokens a rank, under verl's names: min, max and minmax_diff of the batch cut into contiguous parts as it was sampled,
    balanced_min and balanced_max of the shards, and the mean. Padding rows do not count.

    Two ranks and rows of 9, 7, 2 and 2 tokens: max 16, balanced_max 11, mean 10.
    """
    sampled = batch.without_padding()
    before = [sum(_tokens(sampled, rows)) for rows in contiguous(len(sampled), len(shards))]
    after = [sum(_tokens(own := shard.batch.without_padding(), range(len(own)))) for shard in shards]
    return {
        "global_seqlen/min": float(min(before)),
        "global_seqlen/max": float(max(before)),
        "global_seqlen/minmax_diff": float(max(before) - min(before)),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": sum(before) / len(before),
    }


def _shares(whole: KVBatchMeta, steps: Sequence[list[int]], dp_size: int, equal_counts: bool) -> list[list[list[int]]]:
    """Row numbers by rank and mini-batch."""
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    work_so_far, work, sessions = [0] * dp_size, _work(whole), whole.sessions
    for rows in steps:
        units = _units(rows, sessions)
        if equal_counts and len(units) < len(rows):
            raise FieldError("ranks cannot have equal counts of rows: a session of several rows is not split")
        weights = [sum(work[row] for row in unit) for unit in units]
        lightest_first = sorted(range(dp_size), key=work_so_far.__getitem__)
        for rank, items in zip(lightest_first, partition(weights, dp_size, equal_counts=equal_counts), strict=True):
            ranks[rank].append(sorted(row for item in items for row in units[item]))
            work_so_far[rank] += sum(weights[item] for item in items)
    return ranks


def _work(whole: KVBatchMeta) -> list[int]:
    """Of each row. A padding row is none: it is in no micro-batch (`Rows.micro_batches`)."""
    tokens = _tokens(whole, range(len(whole)))
    return [0 if fills else workload(length) for fills, length in zip(whole.padding, tokens, strict=True)]


def _units(rows: Sequence[int], sessions: Sequence[str | None]) -> list[list[int]]:
    """The rows by session; each padding row is a unit of its own."""
    units: dict[str | int, list[int]] = {}
    for row in rows:
        units.setdefault(sessions[row] or row, []).append(row)
    return list(units.values())


def _shard(whole: KVBatchMeta, shares: Sequence[Sequence[int]]) -> Shard:
    starts = [sum(map(len, shares[:number])) for number in range(len(shares))]
    return Shard(
        batch=whole.select(row for rows in shares for row in rows),
        mini_batches=tuple(tuple(range(start, start + len(rows))) for start, rows in zip(starts, shares, strict=True)),
    )


def _fill_up(batch: KVBatchMeta, steps: list[list[int]], dp_size: int) -> KVBatchMeta:
    """The batch with padding rows after it, each added to the mini-batch of `steps` whose count it makes a multiple."""
    missing = [-len(rows) % dp_size for rows in steps]
    numbers = iter(range(len(batch), len(batch) + sum(missing)))
    for rows, count in zip(steps, missing, strict=True):
        rows.extend(next(numbers) for _ in range(count))
    return padded(batch, sum(missing))


def _tokens(batch: KVBatchMeta, rows: Sequence[int]) -> list[int]:
    for row in rows:
        if "seq_len" not in batch.tags[row]:
            raise FieldError(f"{batch.keys[row]}: tag 'seq_len' is missing, which the agents write; balance needs it")
    return [int(batch.tags[row]["seq_len"]) for row in rows]


def _positions(whole: KVBatchMeta, keys: Sequence[str]) -> list[int]:
    place = {key: position for position, key in enumerate(whole.keys)}
    return [place[key] for key in keys]
