"""Off-policy correction: importance weights and rejection for tokens that another policy than the trainer's sampled.

Place: after the old log-probs are known and before the advantages; a stage reads both log-probs of a batch, writes the weights (a
factor of the loss of each token) and `loss_weights` (1 where a token was accepted, 0 where it was rejected).
It owns neither column, sees no config and keeps no state. The mask stays what it is: rejection is `Correction.accepted_BR`.

Terms: l = old log-prob - rollout log-prob = log(trainer / rollout) of a token; a row is a sequence. A session of several rows is
one sequence: its caller packs the rows into one ([S, T] in place of [B, R]) and unpacks what comes back.

Weights (`rollout_is`), from the mask as it is, so before rejection; w = exp(l), l clamped to +-20:
  token     a weight for each token.
  sequence  exp of the row's sum of l, on each of its tokens.
  A threshold u truncates, min(w, u): Ionides, "Truncated importance sampling", 2008. A band "l_u" keeps l <= w <= u and makes the
  others 0: IcePop, arXiv 2510.18855. `rollout_is_batch_normalize` divides by the mean (token: over tokens, sequence: over rows).

Rejection (`rollout_rs`), each option LEVEL_ESTIMATOR with its threshold; a token passes when all options let it pass:
  token_k1 token_k2 token_k3             each token by its own value
  seq_sum_* seq_mean_*  (k1, k2, k3)     a row by the sum or the mean of its tokens' values
  seq_max_*             (k2, k3)         a row by its largest value
  k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 - l, l clamped to +-20: Schulman, "Approximating KL divergence", 2020.
  k2 and k3 have one threshold u: kept where the value <= u.

Where this differs from the sources or from verl 0.9.1:
  1. k1 is log(rollout / trainer), as in verl: a threshold "l_u" (or u, then l = 1 / u) keeps l <= rollout / trainer <= u. That is
     the inverse of the ratio that `rollout_is_threshold` bounds: "0.2_1.5" rejects trainer / rollout = 0.3 and keeps 1.8.
  2. The mask is never changed; verl writes the rejection into it and leaves the denominators of the loss behind.
  3. Rows without a policy token (padding) count in no metric and in no mean; verl counts them as zeros.
  4. A batch without any policy token has weights 0 and no metrics; verl raises.
  5. Batch-normalised weights have mean 1 over the batch given here; the caller gives the rows of all ranks.
  6. A token whose log-probs are no number is rejected by every option that looks at it.
"""

import math
from dataclasses import dataclass

import torch

from asyncrl.algorithms import correction_metrics
from asyncrl.algorithms.correction_sums import Band, Block, Estimator, Level, Rejection, Sums, blocks_of, joined

LEVELS: tuple[Level, ...] = ("token", "seq_sum", "seq_mean", "seq_max")
KL_ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")
REJECTIONS: dict[str, tuple[Level, Estimator]] = {
    f"{level}_{estimator}": (level, estimator)
    for level in LEVELS
    for estimator in KL_ESTIMATORS
    if (level, estimator) != ("seq_max", "k1")  # of numbers with a sign the largest says nothing
}
"""The options of `rollout_rs`."""

DEFAULT_THRESHOLD = 2.0
SMALLEST_MEAN = 1e-8
"""Weights whose mean is not above this are not normalised: all lie outside their band."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOptions:
    """What to do about tokens of another policy. Names, values and defaults are verl's `algorithm.rollout_correction`.

    rollout_is: weights for each "token", for each "sequence", or None.
    rollout_is_threshold: u truncates, min(w, u); a band "l_u" keeps what lies within and makes the others 0.
    rollout_is_batch_normalize: divide the weights by their mean.
    rollout_rs: rejections, a comma list of REJECTIONS, or None.
    rollout_rs_threshold: one for all, or a comma list with one for each. k2, k3: a number u. k1: a band "l_u" (or u for "1/u_u") of
    rollout / trainer, the inverse of the ratio that rollout_is_threshold bounds.
    Raises ValueError, one line with option, value and what is allowed.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | str = DEFAULT_THRESHOLD
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: str | float | None = None

    def __post_init__(self) -> None:
        if self.rollout_is not in ("token", "sequence", None):
            raise ValueError(f"rollout_is = {self.rollout_is!r}: allowed are 'token', 'sequence' and None")
        if self.rollout_is is None and self.rollout_is_batch_normalize:
            raise ValueError(
                "rollout_is_batch_normalize = True has no effect: there are no weights; set rollout_is to 'token' or 'sequence'"
            )
        if self.rollout_is is None and str(self.rollout_is_threshold) not in ("2", "2.0"):
            raise ValueError(
                f"rollout_is_threshold = {self.rollout_is_threshold!r} has no effect: there are no weights; "
                "set rollout_is to 'token' or 'sequence'"
            )
        _ = self.band, self.rejections  # both raise

    @property
    def band(self) -> Band:
        low, high = _bounds(self.rollout_is_threshold, "rollout_is_threshold", "a number u > 0, or 'l_u' with 0 < l <= u")
        return Band(low=1 / high if low is None else low, high=high, is_strict=low is not None)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        if self.rollout_rs is None:
            if self.rollout_rs_threshold is not None:
                raise ValueError(
                    f"rollout_rs_threshold = {self.rollout_rs_threshold!r} has no effect: set rollout_rs, or leave it out"
                )
            return ()
        names = [name.strip() for name in str(self.rollout_rs).split(",")]
        if not set(names) <= set(REJECTIONS) or len(set(names)) < len(names):
            raise ValueError(
                f"rollout_rs = {self.rollout_rs!r}: allowed is a comma list of different ones of {', '.join(REJECTIONS)}"
            )
        return tuple(map(_rejection, names, _each(self.rollout_rs_threshold, len(names))))


def _each(thresholds: str | float | None, count: int) -> list[str | float]:
    """One threshold for each of `count` options."""
    single: list[str | float] = [] if thresholds is None else [thresholds]
    values = list[str | float](thresholds.split(",")) if isinstance(thresholds, str) else single
    if len(values) not in (1, count):
        allowed = "one threshold" if count == 1 else f"one threshold, or {count} in a comma list"
        raise ValueError(f"rollout_rs_threshold = {thresholds!r} for {count} options of rollout_rs: allowed is {allowed}")
    return values if len(values) == count else values * count


def _rejection(name: str, threshold: str | float) -> Rejection:
    level, estimator = REJECTIONS[name]
    is_ratio = estimator == "k1"
    allowed = "for k1 a band 'l_u' with 0 < l <= u, or u >= 1 for '1/u_u'" if is_ratio else f"for {estimator} one number u > 0"
    low, high = _bounds(threshold, "rollout_rs_threshold", allowed)
    if (high < 1 and low is None) if is_ratio else low is not None:
        raise ValueError(f"rollout_rs_threshold = {threshold!r} for {name}: allowed is {allowed}")
    if not is_ratio:
        return Rejection(name=name, level=level, estimator=estimator, low=-math.inf, high=high)
    return Rejection(name=name, level=level, estimator=estimator, low=math.log(low or 1 / high), high=math.log(high))


def _bounds(threshold: str | float, option: str, allowed: str) -> tuple[float | None, float]:
    """(None, u) of a number u or "u"; (l, u) of "l_u"."""
    try:
        if isinstance(threshold, bool):
            raise ValueError
        numbers = [float(part) for part in str(threshold).split("_")]
        *lower, high = numbers
        if len(numbers) > 2 or not all(0 < number < math.inf for number in numbers) or numbers != sorted(numbers):
            raise ValueError
    except ValueError:
        raise ValueError(f"{option} = {threshold!r}: allowed is {allowed}") from None
    return (lower[0] if lower else None), high


# --- the correction -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What `correct` returns.

    weights_BR: of the inputs' dtype, 0 outside the mask; None without `rollout_is`. Constants: they carry no gradient.
    accepted_BR: bool, a subset of the mask; the mask itself (the same tensor) without `rollout_rs`.
    metrics: names as verl has them, without a prefix (see correction_metrics.py).
    """

    weights_BR: torch.Tensor | None
    accepted_BR: torch.Tensor
    metrics: dict[str, float]


@torch.no_grad()
def correct(
    old_log_probs_BR: torch.Tensor,
    rollout_log_probs_BR: torch.Tensor,
    mask_BR: torch.Tensor,
    options: CorrectionOptions,
    *,
    with_metrics: bool = True,
) -> Correction:
    """Weights and accepted tokens of a batch, with metrics over all of it.

    old_log_probs_BR, rollout_log_probs_BR: float32 or float64, both alike, natural logs; outside the mask they may hold anything.
    mask_BR: bool, True on policy tokens; gaps are False. Rows may be packed sessions.
    Raises ValueError where shapes or dtypes differ.
    The batch goes through in blocks of rows that fit the processor's cache, with one exponential a token for weights, k3 and chi2.
    """
    _check_inputs(old_log_probs_BR, rollout_log_probs_BR, mask_BR)
    weights_BR = torch.empty_like(old_log_probs_BR, memory_format=torch.contiguous_format) if options.rollout_is else None
    accepted_BR = mask_BR.clone() if options.rollout_rs else mask_BR
    blocks: list[Sums] = []
    for rows, block in blocks_of(old_log_probs_BR, rollout_log_probs_BR, mask_BR):
        _add_block(block, None if weights_BR is None else weights_BR[rows], accepted_BR[rows], options, with_metrics=with_metrics)
        blocks.append(block.sums)
    sums = joined(blocks)
    metrics = _metrics(sums, weights_BR, mask_BR, options) if with_metrics and sums else {}
    if weights_BR is not None and options.rollout_is_batch_normalize and sums:
        factor = _norm_factor(sums, options)
        weights_BR.div_(factor)
        metrics |= {"rollout_is_batch_norm_factor": factor} if with_metrics else {}
    return Correction(weights_BR=weights_BR, accepted_BR=accepted_BR, metrics=metrics)


def _check_inputs(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> None:
    if old.ndim != 2 or old.shape != rollout.shape or old.shape != mask.shape:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (old, rollout, mask))
        raise ValueError(f"old log-probs, rollout log-probs and mask have the shapes {shapes}: allowed is one shape [B, R] for all")
    if old.dtype not in (torch.float32, torch.float64) or old.dtype != rollout.dtype or mask.dtype != torch.bool:
        dtypes = ", ".join(str(tensor.dtype) for tensor in (old, rollout, mask))
        raise ValueError(
            f"old log-probs, rollout log-probs and mask are {dtypes}: allowed are one of float32 and float64 for both, and bool"
        )


def _add_block(
    block: Block, weights_bR: torch.Tensor | None, accepted_bR: torch.Tensor, options: CorrectionOptions, *, with_metrics: bool
) -> None:
    if with_metrics:
        block.add_policy_sums()
    if weights_bR is not None and options.rollout_is == "token":
        block.weigh_tokens(weights_bR, options.band, with_stats=with_metrics)
    elif weights_bR is not None:
        block.weigh_rows(weights_bR, options.band)
    for rejection in options.rejections:
        block.reject(accepted_bR, rejection, with_stats=with_metrics)
    if options.rollout_rs and with_metrics:
        block.sums["accepted"] = block.count(accepted_bR)


def _metrics(sums: Sums, weights_BR: torch.Tensor | None, mask_BR: torch.Tensor, options: CorrectionOptions) -> dict[str, float]:
    metrics = correction_metrics.policy_metrics(sums)
    if weights_BR is not None:
        of_weights = (
            correction_metrics.token_weight_metrics if options.rollout_is == "token" else correction_metrics.row_weight_metrics
        )
        metrics |= of_weights(sums, options.band)
        metrics |= correction_metrics.weight_quantiles(weights_BR, mask_BR, int(sums["tokens"].sum()))
    for rejection in options.rejections:
        metrics |= correction_metrics.rejection_metrics(sums, rejection)
    return metrics | (correction_metrics.all_rejections_metrics(sums) if options.rollout_rs else {})


def _norm_factor(sums: Sums, options: CorrectionOptions) -> float:
    """What batch normalisation divides by: the mean weight, over tokens or rows."""
    is_token = options.rollout_is == "token"
    mean = 1 + sums["is/total"].sum() / sums["tokens"].sum() if is_token else sums["is/limited"].mean()
    return float(mean) if mean > SMALLEST_MEAN else 1.0
