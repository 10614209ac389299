"""KL(policy || reference): estimators from the log-probs of sampled tokens, the penalty in the reward, and its coefficient.

Legend: B rows, R response tokens. Source of the estimators: http://joschu.net/blog/kl-approx.html.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

import torch

from asyncrl.algorithms.losses import LOG_RATIO_BOUND

KLEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]

_LOW_VAR_BOUND = 10.0
"""verl's bound on one token's k3: a single token cannot own the penalty."""
_STEP_BOUND = 0.2
"""Relative error of the KL that the adaptive controller reacts to at most."""


def kl_penalty(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """One estimate a token, same shape and dtype as log_prob, differentiable in it.

    log_prob: of the policy; ref_log_prob: of the reference, for the same sampled tokens.

    - kl, k1: log_prob - ref. Unbiased, can be negative; as a loss its gradient is 0 in expectation.
    - abs: |log_prob - ref|. Its gradient at equality is 0.
    - mse, k2: (log_prob - ref)^2 / 2. Biased, and its gradient is the KL's in expectation.
    - low_var_kl, k3: e^x - 1 - x with x = ref - log_prob. Unbiased, never negative. x is kept within +-20, the value within +-10.
    - any of them with "+": this value, with the gradient of k2 (straight-through).

    Raises ValueError for another estimator.
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"KL estimator {estimator!r} is not one of {', '.join(get_args(KLEstimator))}")
    difference = log_prob - ref_log_prob
    if not estimator.endswith("+"):
        return _estimate(difference, estimator)
    slope = 0.5 * difference.square()
    return _estimate(difference.detach(), estimator.removesuffix("+")) + (slope - slope.detach())


def _estimate(difference: torch.Tensor, estimator: str) -> torch.Tensor:
    if estimator in ("kl", "k1"):
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator in ("mse", "k2"):
        return 0.5 * difference.square()
    x = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (x.expm1() - x).clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND)


def kl_in_reward(
    scores_BR: torch.Tensor,
    log_prob_BR: torch.Tensor,
    ref_log_prob_BR: torch.Tensor,
    mask_BR: torch.Tensor,
    coef: float,
    estimator: KLEstimator,
) -> tuple[torch.Tensor, float]:
    """(rewards_BR = scores - coef * KL on policy tokens, the mean KL for the controller). Without gradient.

    scores_BR, log_prob_BR (of the old policy), ref_log_prob_BR: float; mask_BR: bool. The mean is over rows of the mean over the
    row's policy tokens, in float64; 0 when there is none. Numbers outside the mask have no effect, but scores pass through.

    Source: Ziegler et al., arXiv 1909.08593 eq. 2.
    Where we differ from verl 0.9.1: 1. rows without a policy token (padding) do not count in the mean.
    """
    kl_BR = torch.where(mask_BR, kl_penalty(log_prob_BR.detach(), ref_log_prob_BR, estimator), 0)
    tokens_B = mask_BR.sum(1)
    row_means_B = kl_BR.double().sum(1) / tokens_B.clamp(min=1)
    mean = row_means_B.sum() / (tokens_B > 0).sum().clamp(min=1)
    return scores_BR - coef * kl_BR, float(mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKL:
    """A coefficient that stays."""

    coef: float

    def after(self, current_kl: float, n_steps: int) -> Self:
        """Itself."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL:
    """A coefficient that follows the KL: it grows while the KL is above target and shrinks below it.

    target: the KL wanted; horizon: trajectories in which an error of 20 % changes coef by 20 %. Both positive.
    Source: Ziegler et al., arXiv 1909.08593 §2.2.
    """

    coef: float
    target: float
    horizon: float

    def after(self, current_kl: float, n_steps: int) -> Self:
        """The controller after a batch of n_steps trajectories with this mean KL. float64.

        coef * (1 + clip(current_kl / target - 1, +-0.2) n_steps / horizon).
        """
        error = min(max(current_kl / self.target - 1, -_STEP_BOUND), _STEP_BOUND)
        return replace(self, coef=self.coef * (1 + error * n_steps / self.horizon))
