"""What the updates of actor and critic share of a mini-batch: whose rows, the weight of each token, and what is told of it.

Invariant: nothing here depends on how the mini-batch is cut into micro-batches, or spread over ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from asyncrl.algorithms.aggregation import AggregationMode, token_weights
from asyncrl.cluster.beats import beat
from asyncrl.errors import AlgorithmError
from asyncrl.ports import Shards
from asyncrl.protocol.mini_batches import mini_batches
from asyncrl.training.mesh import Mesh, gather_objects
from asyncrl.training.metrics import Metrics, merged


def shares_of(shards: Shards, group_ids: Sequence[str | None], groups_each: int, mesh: Mesh) -> list[list[Sequence[int]]]:
    """[mini-batch][rank] -> rows of the batch.

    Without shards, and for one rank, mini-batches are groups in order of first appearance. Raises ValueError for shards that are
    not those of the mesh's ranks.
    """
    check_shards(shards, mesh)
    if not shards:
        return [[rows] for rows in mini_batches(group_ids, groups_each)]
    return [list(ranks) for ranks in zip(*shards, strict=True)]


def check_shards(shards: Shards, mesh: Mesh) -> None:
    """Raises ValueError when they are not those of the mesh's ranks; none at all are those of one rank."""
    if len(shards) != mesh.dp_size and (shards or mesh.dp_size > 1):
        raise ValueError(f"shards for {len(shards)} ranks came to one of {mesh.dp_size}")


def passes(what: str, micro_batches: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], bool]]:
    """(rows, is it the last) of each micro-batch. Each is a sign of life."""
    for number, rows in enumerate(micro_batches, 1):
        beat(f"{what}: micro-batch {number} of {len(micro_batches)}")
        yield rows, number == len(micro_batches)


def mini_batch_weights(
    masks: Sequence[torch.Tensor],
    chosen: Sequence[int],
    mode: AggregationMode,
    *,
    loss_weights: Sequence[torch.Tensor] = (),
    sequences_B: torch.Tensor | None = None,
    scale: float | None = None,
) -> list[torch.Tensor]:
    """Float32 [R] a row of the batch (empty for rows outside `chosen`): `token_weights` of the mini-batch `chosen` of all ranks.

    masks: bool [R] a row of the batch. loss_weights: float32 [R] a row, or empty for all 1; a token of weight 0 is rejected and
    counts in no denominator. sequences_B: int64, the session of each row of the batch; None: every row is a sequence.
    """
    padded = _padded(masks, chosen)
    weighed = _padded(loss_weights, chosen) if loss_weights else None
    counted = padded if weighed is None else padded & (weighed > 0)
    sequences = None if sequences_B is None else sequences_B[list(chosen)]
    found = token_weights(counted, mode, sequences_B=sequences, scale=scale)
    found = found if weighed is None else found * weighed
    weights = [torch.empty(0)] * len(masks)
    for row, weight in zip(chosen, found, strict=True):
        weights[row] = weight[: len(masks[row])]
    return weights


def _padded(rows: Sequence[torch.Tensor], chosen: Sequence[int]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([rows[row] for row in chosen], batch_first=True)


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a rank has found in its micro-batches of a mini-batch; `over_ranks`: what all have."""

    metrics: Metrics = field(default_factory=Metrics)
    broken: list[int] = field(default_factory=list)
    """Rows whose loss is not finite."""
    error: AlgorithmError | None = None
    """Of the user's loss: the first here. The others must not wait for this rank in vain, so it is raised when all are through."""

    def note_broken(self, loss_n: torch.Tensor, masks: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Remember the rows of this micro-batch whose loss is not finite. loss_n: at the policy tokens of `rows`, in order."""
        if torch.isfinite(loss_n).all():
            return
        parts = torch.split(loss_n, [int(masks[row].sum()) for row in rows])
        self.broken.extend(row for row, part in zip(rows, parts, strict=True) if not torch.isfinite(part).all())

    def over_ranks(self, mesh: Mesh) -> Self:
        """The same on every rank. A collective. Raises, on every rank, the AlgorithmError of the first rank that has one."""
        parts = gather_objects((self.metrics, self.broken, None if self.error is None else str(self.error)), mesh)
        said = next((text for _, _, text in parts if text is not None), None)
        if said is not None:
            raise self.error if str(self.error) == said and self.error is not None else AlgorithmError(said)
        return type(self)(metrics=merged(metrics for metrics, _, _ in parts), broken=[row for _, rows, _ in parts for row in rows])

    def suspects(self, group_ids: Sequence[str | None], chosen: Sequence[int]) -> str:
        """The rows that made the loss not finite, as `uid (row n)`; or all groups, when only the backward pass overflowed."""
        if self.broken:
            return "loss not finite in " + ", ".join(f"{group_ids[row]} (row {row})" for row in sorted(self.broken))
        uids = dict.fromkeys(uid for row in chosen if (uid := group_ids[row]) is not None)
        return f"every loss is finite, the backward pass overflowed in groups {', '.join(uids)}"
