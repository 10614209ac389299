"""PPO's clipped surrogate with separate bounds (clip-higher) and the dual clip."""

import torch

from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss, weighted
from asyncrl.algorithms.losses.ratios import bounded_log_ratio


def vanilla(
    inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0
) -> PolicyLoss:
    """`max(-A r, -A clip(r, 1 - low, 1 + high))` with r = exp(log_prob - old_log_prob); where A < 0 at most `-A * clip_ratio_c`.

    The dual clip keeps one token with a huge ratio from owning the update. With old_log_prob = log_prob.detach() the ratio is 1
    and the gradient is -A * d log_prob, the plain policy gradient.

    Source: PPO, arXiv 1707.06347 eq. 7; separate bounds: DAPO, arXiv 2503.14476 eq. 10; dual clip: arXiv 1912.09729 eq. 5.
    Raises ValueError when clip_ratio_c <= 1: it would cut below the surrogate's own clip.
    Facts: pg_clipfrac (a bound of the ratio decided), ppo_kl (-log ratio), pg_clipfrac_lower (the dual clip decided).
    """
    if clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c = {clip_ratio_c} must be greater than 1, such as 3")
    log_ratio_n = bounded_log_ratio(inputs)
    ratio_n = log_ratio_n.exp()
    plain_n = -inputs.advantages_n * ratio_n
    clipped_n = -inputs.advantages_n * ratio_n.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    surrogate_n = torch.maximum(plain_n, clipped_n)
    ceiling_n = -inputs.advantages_n * clip_ratio_c
    is_negative_n = inputs.advantages_n < 0
    loss_n = torch.where(is_negative_n, torch.minimum(surrogate_n, ceiling_n), surrogate_n)
    facts = {
        "pg_clipfrac": (clipped_n > plain_n).to(loss_n.dtype),
        "ppo_kl": -log_ratio_n.detach(),
        "pg_clipfrac_lower": ((surrogate_n > ceiling_n) & is_negative_n).to(loss_n.dtype),
    }
    return PolicyLoss(loss_n=weighted(loss_n, inputs), facts=facts)
