"""Policy losses, token by token; `aggregation` turns them into one number. All tensors have one common shape, padded or flat."""

from dataclasses import dataclass

import torch

LOG_RATIO_BOUND = 20.0
"""|log ratio| at most: e^20 is far outside every clip, and larger exponents overflow float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """loss: float, with gradient, one a token. The rest are per-token facts for metrics, without gradient."""

    loss: torch.Tensor
    is_clipped: torch.Tensor
    """bool: the upper or lower clip of the ratio decided the loss."""
    is_clipped_lower: torch.Tensor
    """bool: the dual clip decided the loss (negative advantages only)."""
    log_ratio: torch.Tensor
    """new - old log-prob, within the bound."""


def ppo_clip_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> PolicyLoss:
    """The clipped surrogate, `max(-A r, -A clip(r, 1 - low, 1 + high))` with r = exp(log_prob - old_log_prob), dual-clipped.

    log_prob: float with gradient; old_log_prob and advantages: float, same shape. Where A < 0 the loss is at most
    `-A * clip_ratio_c`, so one token with a huge ratio cannot own the update. Entries outside a mask are computed like the others:
    weigh them with 0.

    With old_log_prob = log_prob.detach() the ratio is 1 and the gradient is -A * d log_prob, the plain policy gradient.

    Source: PPO, arXiv 1707.06347 eq. 7; separate bounds: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729 eq. 5.
    Raises ValueError when clip_ratio_c <= 1: it would cut below the surrogate's own clip.
    """
    if clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c = {clip_ratio_c} must be greater than 1, such as 3")
    log_ratio = (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    surrogate = torch.maximum(plain, clipped)
    ceiling = -advantages * clip_ratio_c
    is_negative = advantages < 0
    loss = torch.where(is_negative, torch.minimum(surrogate, ceiling), surrogate)
    return PolicyLoss(
        loss=loss,
        is_clipped=(clipped > plain).detach(),
        is_clipped_lower=((surrogate > ceiling) & is_negative).detach(),
        log_ratio=log_ratio.detach(),
    )
