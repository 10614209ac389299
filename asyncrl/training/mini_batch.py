"""What the updates of actor and critic share of a mini-batch: the weight of each token, and the numbers that are told of it.

Invariant: nothing here depends on how the mini-batch is cut into micro-batches.
"""

from collections.abc import Sequence

import torch

from asyncrl.algorithms.aggregation import AggregationMode, token_weights


def mini_batch_weights(
    masks: Sequence[torch.Tensor],
    chosen: Sequence[int],
    mode: AggregationMode,
    *,
    loss_weights: Sequence[torch.Tensor] = (),
    sequences_B: torch.Tensor | None = None,
    scale: float | None = None,
) -> list[torch.Tensor]:
    """Float32 [R] a row of the batch (empty for rows outside `chosen`): `token_weights` of the mini-batch `chosen`.

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


class Tally:
    """Numbers of one mini-batch, added up over its micro-batches in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._means: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._drift: list[torch.Tensor] = []
        self._broken: list[int] = []

    def add_sum(self, name: str, value: torch.Tensor) -> None:
        """A share of a number that is a weighted sum over the mini-batch."""
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def add_mean(self, name: str, values: torch.Tensor) -> None:
        """Values, a token each, of a number that is a mean over the tokens of the mini-batch."""
        self._means[name] = self._means.get(name, 0.0) + float(values.sum())
        self._tokens[name] = self._tokens.get(name, 0) + len(values)

    def add_drift(self, difference: torch.Tensor) -> None:
        """Distances, a token each, between the probabilities of the engine and of the trainer."""
        self._drift.append(difference)

    def note_broken(self, loss_n: torch.Tensor, masks: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Remember the rows of this micro-batch whose loss is not finite. loss_n: at the policy tokens of `rows`, in order."""
        if torch.isfinite(loss_n).all():
            return
        parts = torch.split(loss_n, [int(masks[row].sum()) for row in rows])
        self._broken.extend(row for row, part in zip(rows, parts, strict=True) if not torch.isfinite(part).all())

    def metrics(self) -> dict[str, float]:
        """Each number by its name. A mean over no token at all is left out."""
        found = {name: total / self._tokens[name] for name, total in self._means.items() if self._tokens[name]}
        return {**self._sums, **found, **(_drift_metrics(torch.cat(self._drift)) if self._drift else {})}

    def suspects(self, group_ids: Sequence[str | None], chosen: Sequence[int]) -> str:
        """The rows that made the loss not finite, as `uid (row n)`; or all groups, when only the backward pass overflowed."""
        if self._broken:
            return "loss not finite in " + ", ".join(f"{group_ids[row]} (row {row})" for row in sorted(self._broken))
        uids = dict.fromkeys(uid for row in chosen if (uid := group_ids[row]) is not None)
        return f"every loss is finite, the backward pass overflowed in groups {', '.join(uids)}"


def _drift_metrics(drift: torch.Tensor) -> dict[str, float]:
    return {
        "training/rollout_probs_diff_max": float(drift.max()),
        "training/rollout_probs_diff_mean": float(drift.mean()),
        "training/rollout_probs_diff_std": float(drift.std(correction=0)),
    }


def means(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each number over the mini-batches that have it: one without policy tokens has no loss."""
    found: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
