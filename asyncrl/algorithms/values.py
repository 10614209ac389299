"""The critic's loss: squared error, with predictions held near the old ones. Legend: n policy tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """loss_n: float, with gradient; weighed by `aggregation.token_weights`, its sum is the loss.

    facts: float [n] without gradient; the means over the policy tokens are the metrics critic/vf_clipfrac, critic/vpred_mean.
    """

    loss_n: torch.Tensor
    facts: Mapping[str, torch.Tensor]


def value_loss(
    values_n: torch.Tensor, old_values_n: torch.Tensor, returns_n: torch.Tensor, *, cliprange_value: float = 0.5
) -> ValueLoss:
    """`max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2`, c = cliprange_value.

    values_n: float, with gradient, the predictions; old_values_n: float, those that the advantages were computed with; returns_n:
    float, the targets. Any common shape.

    A prediction that has moved further than c from the old one, towards the target, has no gradient.
    Source: OpenAI baselines' ppo2 (Dhariwal et al. 2017); PPO, arXiv 1707.06347 eq. 9 has no clip here.
    Raises ValueError when cliprange_value is not positive.
    Facts: vf_clipfrac (the clipped error is the larger one), vpred_mean (the prediction).
    """
    if cliprange_value <= 0:
        raise ValueError(f"cliprange_value = {cliprange_value} must be positive, such as 0.5")
    near_n = values_n.clamp(old_values_n - cliprange_value, old_values_n + cliprange_value)
    plain_n = (values_n - returns_n).square()
    clipped_n = (near_n - returns_n).square()
    facts = {"vf_clipfrac": (clipped_n > plain_n).to(values_n.dtype), "vpred_mean": values_n.detach()}
    return ValueLoss(loss_n=0.5 * torch.maximum(plain_n, clipped_n), facts=facts)
