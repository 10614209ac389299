"""Estimators of KL(policy || reference) from the log-probs of sampled tokens. Source: http://joschu.net/blog/kl-approx.html."""

from typing import Literal, get_args

import torch

from asyncrl.algorithms.losses import LOG_RATIO_BOUND

KLEstimator = Literal["kl", "k2", "low_var_kl"]

_LOW_VAR_BOUND = 10.0
"""verl's bound on one token's k3: a single token cannot own the penalty."""


def kl_penalty(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """One estimate a token, same shape and dtype as log_prob, differentiable in it.

    log_prob: of the policy; ref_log_prob: of the reference, for the same sampled tokens.

    - kl (k1): log_prob - ref. Unbiased, can be negative; as a loss its gradient is 0 in expectation.
    - k2: (log_prob - ref)^2 / 2. Biased, and its gradient is the KL's.
    - low_var_kl (k3): e^x - 1 - x with x = ref - log_prob. Unbiased, never negative. x is kept within +-20, the value within +-10.

    Raises ValueError for another estimator.
    """
    difference = log_prob - ref_log_prob
    if estimator == "kl":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "low_var_kl":
        x = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return (x.exp() - 1 - x).clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND)
    raise ValueError(f"KL estimator {estimator!r} is not one of {', '.join(get_args(KLEstimator))}")
