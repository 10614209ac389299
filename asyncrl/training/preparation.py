"""What must be known of a whole mini-batch before its first gradient: which tokens count, what they weigh, which ones are picked.

columns, or a forward pass without gradient -> [preparation] -> micro-batches of the actor's update

Rejection and weights are columns where the correction stage has written them. With the engine's own log-probs as the old ones
("bypass") they are taken here, from the policy as it is before this optimizer step. Invariant: nothing here depends on how the
mini-batch is cut into micro-batches or spread over ranks. Each rank scores its own rows; then all of them do the same with the rows
of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from asyncrl.algorithms.correction import CorrectionOptions
from asyncrl.algorithms.session_correction import correct_sessions
from asyncrl.chosen import ChosenLoss

RowValues = list[torch.Tensor]
"""One tensor [R] a row of the batch."""
Score = Callable[[Sequence[int]], RowValues]
"""Log-probs under the policy now of the chosen rows, those of other ranks too, float32 [R] each, 0 outside the mask; anything for
rows that were not chosen. On many ranks a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRows:
    """The columns of a batch, a tensor a row; an absent column is an empty list. sessions_B: int64, session of each row."""

    mask: RowValues
    advantages: RowValues
    sessions_B: torch.Tensor
    old: RowValues
    reference: RowValues
    rollout: RowValues
    is_weights: RowValues
    kept: RowValues
    """bool: policy tokens that no rejection has taken out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Of each row of the mini-batch: kept, bool, policy tokens that count; is_weights, float32, and selected, bool, or empty."""

    kept: RowValues
    is_weights: RowValues = field(default_factory=list)
    selected: RowValues = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def prepare(
    rows: ActorRows, chosen: Sequence[int], loss: ChosenLoss, correction: CorrectionOptions | None, score: Score, *, seed: int
) -> Prepared:
    """chosen: the rows of all ranks in the mini-batch, in an order that the number of ranks has no part in.
    correction: with "bypass", what to weigh and reject by the policy now against the engine; seed: of what a loss picks."""
    if correction is None and loss.spec.select is None:
        return Prepared(kept=rows.kept, is_weights=rows.is_weights)
    now = score(chosen)
    if correction is None:
        prepared = Prepared(kept=rows.kept, is_weights=rows.is_weights)
    else:
        prepared = _corrected(rows, chosen, correction, now)
    if loss.spec.select is None:
        return prepared
    selected = _selected(rows, chosen, loss, prepared.kept, now, seed)
    return Prepared(kept=prepared.kept, is_weights=prepared.is_weights, selected=selected, metrics=prepared.metrics)


def _corrected(rows: ActorRows, chosen: Sequence[int], options: CorrectionOptions, now: RowValues) -> Prepared:
    lengths_b = torch.tensor([len(rows.mask[row]) for row in chosen])
    found = correct_sessions(
        _padded(now, chosen),
        _padded(rows.old, chosen),
        _padded(rows.mask, chosen),
        lengths_b,
        rows.sessions_B[list(chosen)],
        options,
    )
    return Prepared(
        kept=_placed(found.accepted_BR, chosen, rows.mask),
        is_weights=[] if found.weights_BR is None else _placed(found.weights_BR, chosen, rows.mask),
        metrics={f"rollout_corr/{name}": value for name, value in found.metrics.items()},
    )


def _selected(rows: ActorRows, chosen: Sequence[int], loss: ChosenLoss, kept: RowValues, now: RowValues, seed: int) -> RowValues:
    def flat(values: RowValues) -> torch.Tensor:
        return torch.cat([values[row][kept[row]] for row in chosen])

    now_n = flat(now)
    old_n = flat(rows.old) if rows.old else now_n
    generator = torch.Generator().manual_seed(seed)
    picked_n = loss.selected(now_n, old_n, flat(rows.advantages), generator)
    assert picked_n is not None
    parts = torch.split(picked_n, [int(kept[row].sum()) for row in chosen])
    selected = [picked_n[:0]] * len(rows.mask)
    for row, part in zip(chosen, parts, strict=True):
        selected[row] = torch.zeros_like(rows.mask[row])
        selected[row][kept[row]] = part
    return selected


def _padded(values: RowValues, chosen: Sequence[int]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([values[row] for row in chosen], batch_first=True)


def _placed(values_bR: torch.Tensor, chosen: Sequence[int], like: RowValues) -> RowValues:
    """The padded rows as rows of the batch; empty ones elsewhere."""
    placed = [values_bR[0, :0]] * len(like)
    for row, values in zip(chosen, values_bR, strict=True):
        placed[row] = values[: len(like[row])]
    return placed
