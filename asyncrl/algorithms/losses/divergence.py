"""DPPO: tokens whose policy has moved too far in the harmful direction lose their gradient; far is a divergence, not a ratio."""

import torch

from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss, weighted
from asyncrl.algorithms.losses.ratios import bounded_log_ratio

_TINY = 1e-8
"""Added to both probabilities of "another token", which are 0 when the policy is certain (as in verl)."""


def dppo_tv(
    inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 20.0
) -> PolicyLoss:
    """`-A sg[min(r, c)] v log_prob`: v = 0 where A > 0 and p - q > high, or A <= 0 and p - q < -low; p new, q old probability.

    |p - q| is the total variation between the binary policies "this token" and "another": clip_ratio_low and clip_ratio_high bound
    it, clip_ratio_c caps the ratio.

    Source: DPPO (Binary-TV), arXiv 2602.04879. Raises ValueError when clip_ratio_c <= 1.
    Where we differ from verl 0.9.1: 1. the default cap is the 20 that it intends; its config always gives 3.
    Facts: pg_clipfrac (v = 0), ppo_kl (-log ratio), pg_clipfrac_lower (the cap of the ratio, with A < 0).
    """
    moved_n = inputs.log_prob_n.detach().exp() - inputs.old_log_prob_n.exp()
    is_free_n = torch.where(inputs.advantages_n > 0, moved_n <= clip_ratio_high, moved_n >= -clip_ratio_low)
    return _held(inputs, is_free_n, clip_ratio_c)


def dppo_kl(
    inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 20.0
) -> PolicyLoss:
    """As `dppo_tv` with the KL of the binary policies: v = 0 where A > 0, p > q and KL > high, or A <= 0, p < q and KL > low.

    KL(q || p) = q log(q / p) + (1 - q) log((1 - q) / (1 - p)).

    Source: DPPO (Binary-KL), arXiv 2602.04879. Raises ValueError, differs and reports as `dppo_tv`.
    """
    log_p_n, log_q_n = inputs.log_prob_n.detach(), inputs.old_log_prob_n
    p_n, q_n = log_p_n.exp(), log_q_n.exp()
    kl_n = q_n * (log_q_n - log_p_n) + (1 - q_n) * ((1 - q_n + _TINY) / (1 - p_n + _TINY)).log()
    is_free_up_n = (kl_n <= clip_ratio_high) | (p_n <= q_n)
    is_free_down_n = (kl_n <= clip_ratio_low) | (p_n >= q_n)
    return _held(inputs, torch.where(inputs.advantages_n > 0, is_free_up_n, is_free_down_n), clip_ratio_c)


def _held(inputs: LossInputs, is_free_n: torch.Tensor, clip_ratio_c: float) -> PolicyLoss:
    if clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c = {clip_ratio_c} must be greater than 1, such as 20")
    log_ratio_n = bounded_log_ratio(inputs).detach()
    ratio_n = log_ratio_n.exp()
    weight_n = ratio_n.clamp(max=clip_ratio_c) * is_free_n
    loss_n = -inputs.advantages_n * weight_n * inputs.log_prob_n
    facts = {
        "pg_clipfrac": (~is_free_n).to(loss_n.dtype),
        "ppo_kl": -log_ratio_n,
        "pg_clipfrac_lower": ((ratio_n > clip_ratio_c) & (inputs.advantages_n < 0)).to(loss_n.dtype),
    }
    return PolicyLoss(loss_n=weighted(loss_n, inputs), facts=facts)
