"""Advantages from the rewards of a group. Place: sample -> [advantages] -> actor update.

Legend: B trajectories, R response tokens (padded), G groups.
"""

import torch


def grpo_advantages(
    rewards_B: torch.Tensor,
    groups_B: torch.Tensor,
    mask_BR: torch.Tensor,
    *,
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """Group-relative advantages, one number a trajectory spread over its policy tokens, zero outside the mask.

    rewards_B: float, the whole reward of each trajectory; groups_B: int64, any numbering of the uids; mask_BR: bool, True on
    policy tokens. Returns advantages_BR, float32: (reward - mean of the group) / (std of the group + epsilon), with n - 1 under the
    root; without `norm_by_std` only the difference. Every row counts once, so a session of several trajectories weighs more.

    Rewards [1, 0, 0, 1] of one group give [0.866, -0.866, -0.866, 0.866].

    Source: GRPO, arXiv 2402.03300 eq. 3; without the std term: Dr. GRPO, arXiv 2503.20783.
    Where we differ from verl 0.9.1:
    1. A group of one gets 0, not its raw reward: it has no baseline, and would otherwise be pushed by its reward's sign.
    2. A group whose rewards are all the same number gets exactly 0. A float32 mean can miss that number in its last bit, and the
       division by a tiny std then returns up to 0.15; the statistics here are float64, and max == min decides.
    3. A row without a single policy token counts in its group's mean and std, and gets zeros.
    """
    signal_B = group_signal(rewards_B, groups_B)
    rewards_B = rewards_B.double()
    _, index_B = torch.unique(groups_B, return_inverse=True)
    count_G = torch.bincount(index_B).double()
    mean_B = _group_mean(rewards_B, index_B, count_G)
    centred_B = torch.where(signal_B, rewards_B - mean_B, 0.0)
    if norm_by_std:
        count_B = count_G[index_B]
        variance_B = _group_mean(centred_B.square(), index_B, count_G) * count_B / (count_B - 1).clamp(min=1)
        centred_B = centred_B / (variance_B.sqrt() + epsilon)
    return (centred_B[:, None] * mask_BR).float()


def group_signal(rewards_B: torch.Tensor, groups_B: torch.Tensor) -> torch.Tensor:
    """bool [B]: True where the trajectory's group has two different rewards, so that there is something to learn.

    max == min decides, not std == 0, which rounding defeats.
    """
    _, index_B = torch.unique(groups_B, return_inverse=True)
    zeros_G = rewards_B.new_zeros(int(index_B.max()) + 1 if len(index_B) else 0)
    highest_G = zeros_G.scatter_reduce(0, index_B, rewards_B, "amax", include_self=False)
    lowest_G = zeros_G.scatter_reduce(0, index_B, rewards_B, "amin", include_self=False)
    return (highest_G != lowest_G)[index_B]


def _group_mean(values_B: torch.Tensor, index_B: torch.Tensor, count_G: torch.Tensor) -> torch.Tensor:
    """Mean of each row's group, float64 [B]."""
    sum_G = torch.zeros_like(count_G).index_add(0, index_B, values_B)
    return (sum_G / count_G)[index_B]
