"""Clip-Cov and KL-Cov: the few tokens whose log-prob goes most with their advantage make entropy collapse; these are held.

Which tokens is a matter of the whole mini-batch (`select_...`); the losses only read `LossInputs.selected_n`, so the split into
micro-batches changes nothing. Source: arXiv 2505.22617.

Where we differ from verl 0.9.1:
1. Tokens are chosen over the mini-batch, not in each micro-batch for itself.
2. Random choices come from the caller's generator, not from the global one.
3. Log ratios are kept within +-20.
"""

import torch

from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss, weighted
from asyncrl.algorithms.losses.ratios import LOG_RATIO_BOUND, bounded_log_ratio


def clip_cov(inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> PolicyLoss:
    """`max(-A r, -A clip(r, 1 - low, 1 + high))`, and 0 for the selected tokens: they have no gradient.

    Source: Clip-Cov, arXiv 2505.22617. Raises ValueError without selected_n.
    Facts: pg_clipfrac (the selected tokens), ppo_kl (-log ratio).
    """
    selected_n = _selected(inputs, "clip_cov")
    log_ratio_n = bounded_log_ratio(inputs)
    plain_n, clipped_n = _surrogates(log_ratio_n, inputs.advantages_n, clip_ratio_low, clip_ratio_high)
    loss_n = torch.maximum(plain_n, clipped_n) * ~selected_n
    facts = {"pg_clipfrac": selected_n.to(loss_n.dtype), "ppo_kl": -log_ratio_n.detach()}
    return PolicyLoss(loss_n=weighted(loss_n, inputs), facts=facts)


def select_clip_cov(
    log_prob_n: torch.Tensor,
    old_log_prob_n: torch.Tensor,
    advantages_n: torch.Tensor,
    *,
    generator: torch.Generator,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> torch.Tensor:
    """bool [n]: max(1, int(clip_cov_ratio n)) tokens at random, of those with lb < covariance < ub that no clip holds already.

    All tensors float [n], the policy tokens of the mini-batch in a fixed order; generator: of the CPU. Fewer when fewer qualify.
    Raises ValueError when clip_cov_ratio is no share, or when no covariance lies between the bounds.
    """
    _check_share("clip_cov_ratio", clip_cov_ratio)
    if clip_cov_lb >= clip_cov_ub:
        raise ValueError(f"clip_cov_lb = {clip_cov_lb} must be less than clip_cov_ub = {clip_cov_ub}, such as 1 and 5")
    log_ratio_n = (log_prob_n - old_log_prob_n).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    plain_n, clipped_n = _surrogates(log_ratio_n, advantages_n, clip_ratio_low, clip_ratio_high)
    covariance_n = token_covariance(log_prob_n, advantages_n)
    qualifies_n = (covariance_n > clip_cov_lb) & (covariance_n < clip_cov_ub) & (clipped_n <= plain_n)
    candidates = qualifies_n.nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    chosen = candidates[order[: max(1, int(clip_cov_ratio * len(log_prob_n)))]]
    return torch.zeros_like(qualifies_n).index_fill(0, chosen, True)


def kl_cov(inputs: LossInputs, *, ppo_kl_coef: float = 1.0) -> PolicyLoss:
    """`-A r`, plus `ppo_kl_coef |log r|` for the selected tokens. There is no clip.

    Source: KL-Cov, arXiv 2505.22617. Raises ValueError without selected_n.
    Facts: ppo_kl (here |log ratio|, as verl).
    """
    selected_n = _selected(inputs, "kl_cov")
    log_ratio_n = bounded_log_ratio(inputs)
    loss_n = -inputs.advantages_n * log_ratio_n.exp() + ppo_kl_coef * log_ratio_n.abs() * selected_n
    return PolicyLoss(loss_n=weighted(loss_n, inputs), facts={"ppo_kl": log_ratio_n.detach().abs()})


def select_kl_cov(
    log_prob_n: torch.Tensor,
    old_log_prob_n: torch.Tensor,
    advantages_n: torch.Tensor,
    *,
    generator: torch.Generator,
    kl_cov_ratio: float = 0.0002,
) -> torch.Tensor:
    """bool [n]: the max(1, int(kl_cov_ratio n)) tokens of the largest covariance; of equal ones the first.

    Raises ValueError when kl_cov_ratio is no share.
    """
    _check_share("kl_cov_ratio", kl_cov_ratio)
    covariance_n = token_covariance(log_prob_n, advantages_n)
    largest = covariance_n.argsort(descending=True, stable=True)[: max(1, int(kl_cov_ratio * len(log_prob_n)))]
    return torch.zeros_like(covariance_n, dtype=torch.bool).index_fill(0, largest, True)


def token_covariance(log_prob_n: torch.Tensor, advantages_n: torch.Tensor) -> torch.Tensor:
    """(A - mean A)(log_prob - mean log_prob), [n]: the part of each token in the covariance (arXiv 2505.22617)."""
    return (advantages_n - advantages_n.mean()) * (log_prob_n - log_prob_n.mean())


def _surrogates(
    log_ratio_n: torch.Tensor, advantages_n: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(plain, clipped) as in PPO."""
    ratio_n = log_ratio_n.exp()
    return -advantages_n * ratio_n, -advantages_n * ratio_n.clamp(1 - low, 1 + high)


def _check_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} = {value} must be a share of the tokens, more than 0 and at most 1, such as 0.0002")


def _selected(inputs: LossInputs, name: str) -> torch.Tensor:
    if inputs.selected_n is None:
        raise ValueError(f"{name} needs selected_n, the answer of its `select` over the mini-batch")
    return inputs.selected_n
