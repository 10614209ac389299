"""Advantages of one number a row, from the rewards of its group, spread over the row's policy tokens.

Legend: B rows, R response tokens, G groups. Everywhere: rewards_B is float, the whole reward of each row (best summed in float64);
groups_B is int64, any numbering; mask_BR is bool, True on policy tokens. Out comes advantages_BR, 0 outside the mask, of the
rewards' dtype unless `dtype` names another. Rows that have no policy token get zeros.

Where all of them differ from verl 0.9.1:
1. A group of one gets 0, not its raw reward: it has no baseline, and would otherwise be pushed by its reward's sign.
   `singleton="reward"` gives verl's answer, for comparisons.
2. A group whose rewards are all the same number gets exactly 0. A float32 mean can miss that number in its last bit, and the
   division by a tiny std then returns up to 0.15; the statistics here are float64, and max == min decides.
3. Every row counts once in its group, also one without a policy token. So sessions of several rows are packed into one row first
   (`sessions.Packing`); verl counts rows.
"""

from collections.abc import Mapping, Sequence

import torch

from asyncrl.algorithms.advantages.groups import Groups, Singleton
from asyncrl.algorithms.blocks import row_counts
from asyncrl.algorithms.masked import WHITEN_EPSILON

STD_EPSILON = 1e-6
"""Added to a group's std, as verl has it."""


def spread(advantages_B: torch.Tensor, mask_BR: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, R] of the dtype: each row's number on its policy tokens, 0 elsewhere."""
    return torch.where(mask_BR, advantages_B.to(dtype)[:, None], 0.0)


def grpo_advantages(
    rewards_B: torch.Tensor,
    groups_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    norm_by_std: bool = True,
    epsilon: float = STD_EPSILON,
    singleton: Singleton = "zero",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(reward - mean of the group) / (std of the group + epsilon), n - 1 under the root; or the difference alone.

    Rewards [1, 0, 0, 1] of one group give [0.866, -0.866, -0.866, 0.866].

    Source: GRPO, arXiv 2402.03300 eq. 3; without the std term: Dr. GRPO, arXiv 2503.20783.
    """
    advantages_B = grpo_scores(rewards_B, Groups.of(groups_B), norm_by_std=norm_by_std, epsilon=epsilon, singleton=singleton)
    return spread(advantages_B, mask_BR, dtype or _float_dtype(rewards_B))


def grpo_scores(
    rewards_B: torch.Tensor,
    groups: Groups,
    *,
    norm_by_std: bool = True,
    epsilon: float = STD_EPSILON,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """float64 [B]: the numbers of `grpo_advantages`. The std of a group of one counts as 1."""
    centred_B = groups.centred(rewards_B, singleton=singleton)
    if not norm_by_std:
        return centred_B
    return centred_B / (groups.std(rewards_B) + epsilon)


def rloo_advantages(
    rewards_B: torch.Tensor,
    groups_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    singleton: Singleton = "zero",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The reward less the mean of the others of its group: n / (n - 1) (reward - mean of the group).

    Source: RLOO, arXiv 2402.14740. `singleton`: verl has both answers, the raw reward in `rloo`, 0 in `rloo_vectorized`.
    """
    groups = Groups.of(groups_B)
    count_B = groups.count_B
    advantages_B = groups.centred(rewards_B, singleton=singleton) * torch.where(count_B == 1, 1.0, count_B / (count_B - 1))
    return spread(advantages_B, mask_BR, dtype or _float_dtype(rewards_B))


def opo_advantages(
    rewards_B: torch.Tensor,
    groups_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    singleton: Singleton = "zero",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The reward less the group's mean weighted by length: reward - sum(len reward) / sum(len).

    len: the policy tokens of a row. The baseline of least variance when the squared norm of a row's gradient grows with its length.
    A row without policy tokens weighs nothing in it.

    Source: OPO, arXiv 2505.23585.
    """
    groups, lengths_B = Groups.of(groups_B), row_counts(mask_BR).double()
    baseline_B = groups.sum(lengths_B * rewards_B) / groups.sum(lengths_B).clamp(min=1)
    return spread(groups.centred(rewards_B, baseline_B, singleton=singleton), mask_BR, dtype or _float_dtype(rewards_B))


def gpg_advantages(
    rewards_B: torch.Tensor,
    groups_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    f_norm: float = 1.0,
    singleton: Singleton = "zero",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """alpha (reward - mean of the group) / f_norm, with alpha the rows of the batch over its rows with a reward that is not 0.

    Source: GPG, arXiv 2504.02546.
    1. The paper's alpha leaves out the groups without signal; like verl, this counts rewards that are not 0.
    2. Both counts are over rows with a policy token; verl counts padding rows in the upper one.
    """
    if f_norm <= 0:
        raise ValueError(f"gpg_f_norm = {f_norm} must be positive, such as 1")
    counted_B = mask_BR.any(1)
    alpha = counted_B.sum() / (counted_B & (rewards_B != 0)).sum().clamp(min=1)
    advantages_B = Groups.of(groups_B).centred(rewards_B, singleton=singleton) * (alpha.double() / f_norm)
    return spread(advantages_B, mask_BR, dtype or _float_dtype(rewards_B))


def grpo_passk_advantages(
    rewards_B: torch.Tensor,
    groups_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    norm_by_std: bool = True,
    epsilon: float = STD_EPSILON,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The best row of a group gets best - second best, [over std + epsilon]; all others 0. Of equal best rows all get 0.

    Source: Pass@k training, arXiv 2503.19595.
    1. A group of one gets 0; verl raises.
    """
    groups = Groups.of(groups_B)
    best_G, second_G = groups.two_highest(rewards_B)
    lead_G = torch.where(groups.count_G > 1, rewards_B[best_G].double() - rewards_B[second_G].double(), 0.0)
    if norm_by_std:
        lead_G = lead_G / (groups.std(rewards_B)[best_G] + epsilon)
    advantages_B = torch.zeros_like(rewards_B, dtype=torch.float64).index_copy(0, best_G, lead_G)
    return spread(advantages_B, mask_BR, dtype or _float_dtype(rewards_B))


def reinforce_plus_plus_baseline_advantages(
    rewards_B: torch.Tensor,
    groups_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    singleton: Singleton = "zero",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(reward - mean of the group), then whitened over all policy tokens of the batch.

    The whitening takes the batch's mean off, so a constant group is 0 before it and, beside others, not after; when every group is
    constant, all is 0.

    Source: REINFORCE++, arXiv 2501.03262, the variant with a group baseline.
    """
    centred_B = Groups.of(groups_B).centred(rewards_B, singleton=singleton)
    return spread(_whitened(centred_B, mask_BR), mask_BR, dtype or _float_dtype(rewards_B))


def gdpo_advantages(
    components: Mapping[str, torch.Tensor],
    groups_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    names: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
    norm_by_std: bool = True,
    epsilon: float = STD_EPSILON,
    singleton: Singleton = "zero",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """GRPO of each component of the reward on its own, their weighted sum, whitened over all policy tokens of the batch.

    components: float [B] by name. names: those that count, by default all in the order of the names; weights: one each, by default
    ones. A component that is constant in a group adds exactly 0 there. Raises ValueError for an unknown name, for no component, and
    for another number of weights.

    Source: GDPO, arXiv 2601.05242.
    """
    names = sorted(components) if names is None else names
    weights = [1.0] * len(names) if weights is None else weights
    if not names or len(weights) != len(names) or not components.keys() >= set(names):
        raise ValueError(
            f"gdpo: {list(weights)} weigh {list(names)} of the reward components {sorted(components)}; one weight each"
        )
    groups = Groups.of(groups_B)
    total_B = torch.zeros(len(groups_B), dtype=torch.float64, device=mask_BR.device)
    for name, weight in zip(names, weights, strict=True):  # a handful of components
        total_B += weight * grpo_scores(components[name], groups, norm_by_std=norm_by_std, epsilon=epsilon, singleton=singleton)
    return spread(_whitened(total_B, mask_BR), mask_BR, dtype or _float_dtype(components[names[0]]))


def _whitened(advantages_B: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """float64 [B]: `masked_whiten` of the spread advantages, without spreading them: each row counts as often as it has tokens."""
    tokens_B = row_counts(mask_BR)
    counted = advantages_B[tokens_B > 0]
    if not len(counted) or counted.amax() == counted.amin():
        return torch.zeros_like(advantages_B)
    num_tokens = tokens_B.sum()
    centred_B = advantages_B - (tokens_B * advantages_B).sum() / num_tokens
    variance = (tokens_B * centred_B.square()).sum() / (num_tokens - 1)
    return centred_B * (variance + WHITEN_EPSILON).rsqrt()


def _float_dtype(rewards_B: torch.Tensor) -> torch.dtype:
    return rewards_B.dtype if rewards_B.is_floating_point() else torch.float32
