"""Losses with the gradient of the plain policy gradient times a fixed factor: reinforce, gpg, cispo; and DRO's square."""

import torch

from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss, weighted
from asyncrl.algorithms.losses.ratios import bounded_log_ratio


def reinforce(inputs: LossInputs) -> PolicyLoss:
    """`-A log_prob`, times the importance weights: the loss of a bypassed old policy, whose only correction are the weights.

    Source: REINFORCE, Williams 1992. Facts: ppo_kl (-log ratio to old_log_prob, that is to the rollout in bypass).
    """
    loss_n = -inputs.advantages_n * inputs.log_prob_n
    return PolicyLoss(loss_n=weighted(loss_n, inputs), facts={"ppo_kl": -bounded_log_ratio(inputs).detach()})


def gpg(inputs: LossInputs) -> PolicyLoss:
    """`-A log_prob`: no ratio and no clip, for advantages of the estimator gpg. No facts.

    Source: GPG, arXiv 2504.02546, the objective; its correction of the batch is in the advantages.
    """
    return PolicyLoss(loss_n=weighted(-inputs.advantages_n * inputs.log_prob_n, inputs))


def cispo(inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> PolicyLoss:
    """`-sg[clip(r, 1 - low, 1 + high)] A log_prob`: the ratio is a clipped weight, so no token loses its gradient.

    Source: CISPO (MiniMax-M1), arXiv 2506.13585 eq. 4 and 5; the paper leaves the lower bound out (low = 1).
    Facts: pg_clipfrac (the ratio is outside the bounds), ppo_kl (-log ratio), pg_clipfrac_lower (0: no dual clip).
    """
    log_ratio_n = bounded_log_ratio(inputs).detach()
    ratio_n = log_ratio_n.exp()
    weight_n = ratio_n.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss_n = -weight_n * inputs.advantages_n * inputs.log_prob_n
    facts = {
        "pg_clipfrac": (weight_n != ratio_n).to(loss_n.dtype),
        "ppo_kl": -log_ratio_n,
        "pg_clipfrac_lower": torch.zeros_like(ratio_n),
    }
    return PolicyLoss(loss_n=weighted(loss_n, inputs), facts=facts)


def dro(inputs: LossInputs, *, dro_beta: float) -> PolicyLoss:
    """`-(A log_prob - dro_beta / 2 (log_prob - old_log_prob)^2)`: the policy gradient, held near the old policy by a square.

    Source: DRO, arXiv 2405.19107, the policy's part of its squared loss, with an advantage in place of reward minus value.
    Raises ValueError when dro_beta is not positive. Facts: ppo_kl (-log ratio).
    """
    if dro_beta <= 0:
        raise ValueError(f"dro_beta = {dro_beta} must be positive, such as 0.5")
    log_ratio_n = inputs.log_prob_n - inputs.old_log_prob_n
    loss_n = -(inputs.advantages_n * inputs.log_prob_n - 0.5 * dro_beta * log_ratio_n.square())
    return PolicyLoss(loss_n=weighted(loss_n, inputs), facts={"ppo_kl": -log_ratio_n.detach()})
