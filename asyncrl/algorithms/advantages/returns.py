"""Advantages that look at each token: GAE, REINFORCE++ and ReMax, with the return that all of them build on.

Legend: B rows, R response tokens. Everywhere: rewards_BR is float; mask_BR is bool, True on policy tokens; outputs have the
rewards' dtype and are 0 outside the mask. Gaps (tool observations) take no time: nothing is discounted across them.

Where all of them differ from verl 0.9.1:
1. A reward on a token that is not the policy's counts for the last policy token before it: it is the reward of that action.
   verl's GAE loses it, and so a terminal reward behind a tool's answer. Before the first policy token it has no effect.

A loop over R stays where a discount makes a recurrence: it keeps every row bitwise independent of padding.
"""

import torch

from asyncrl.algorithms.masked import masked_whiten


def rewards_to_go(rewards_BR: torch.Tensor, mask_BR: torch.Tensor, *, gamma: float = 1.0) -> torch.Tensor:
    """returns_BR: reward of the token plus gamma times the return of the next policy token."""
    if gamma == 1:
        return torch.where(mask_BR, rewards_BR.flip(1).cumsum(1).flip(1), 0.0)
    rewards_RB, mask_RB = rewards_of_actions(rewards_BR, mask_BR).T.contiguous(), mask_BR.T.contiguous()
    returns_RB, running_B = torch.empty_like(rewards_RB), rewards_BR.new_zeros(len(rewards_BR))
    for t in reversed(range(len(rewards_RB))):
        running_B = torch.where(mask_RB[t], rewards_RB[t] + gamma * running_B, running_B)
        returns_RB[t] = running_B
    return torch.where(mask_BR, returns_RB.T.contiguous(), 0.0)


def gae_advantages(
    rewards_BR: torch.Tensor, values_BR: torch.Tensor, mask_BR: torch.Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_BR whitened over the mask, returns_BR for the critic).

    values_BR: float, the critic's value before each token. Backwards over the policy tokens, with V' and A' those of the next one:
    delta = reward + gamma V' - V; A = delta + gamma lam A'; return = A + V, with the A before whitening.

    Source: GAE, arXiv 1506.02438 eq. 16.
    """
    rewards_RB, mask_RB = rewards_of_actions(rewards_BR, mask_BR).T.contiguous(), mask_BR.T.contiguous()
    values_RB = values_BR.T.contiguous()
    advantages_RB = torch.empty_like(rewards_RB)
    running_B = next_value_B = rewards_BR.new_zeros(len(rewards_BR))
    for t in reversed(range(len(rewards_RB))):
        delta_B = rewards_RB[t] + gamma * next_value_B - values_RB[t]
        running_B = torch.where(mask_RB[t], delta_B + gamma * lam * running_B, running_B)
        next_value_B = torch.where(mask_RB[t], values_RB[t], next_value_B)
        advantages_RB[t] = running_B
    advantages_BR = advantages_RB.T.contiguous()
    return masked_whiten(advantages_BR, mask_BR), torch.where(mask_BR, advantages_BR + values_BR, 0.0)


def reinforce_plus_plus_advantages(
    rewards_BR: torch.Tensor, mask_BR: torch.Tensor, *, gamma: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_BR, returns_BR): the discounted return, and the same whitened over all policy tokens of the batch.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    returns_BR = rewards_to_go(rewards_BR, mask_BR, gamma=gamma)
    return masked_whiten(returns_BR, mask_BR), returns_BR


def remax_advantages(
    rewards_BR: torch.Tensor, reward_baselines_B: torch.Tensor, mask_BR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_BR, returns_BR): the return, and the return less the row's baseline.

    reward_baselines_B: float, the reward of the greedy answer to the same prompt.

    Source: ReMax, arXiv 2310.10505.
    """
    returns_BR = rewards_to_go(rewards_BR, mask_BR)
    return torch.where(mask_BR, returns_BR - reward_baselines_B.to(returns_BR.dtype)[:, None], 0.0), returns_BR


def rewards_of_actions(rewards_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """float [B, R]: each reward moved to the last policy token at or before it; dropped when there is none."""
    if not ((rewards_BR != 0) & ~mask_BR).any():
        return rewards_BR
    columns_R = torch.arange(mask_BR.shape[1], device=mask_BR.device)
    action_BR = torch.where(mask_BR, columns_R, -1).cummax(1).values
    moved_BR = torch.where(action_BR >= 0, rewards_BR, 0.0)
    return torch.zeros_like(rewards_BR).scatter_add(1, action_BR.clamp(min=0), moved_BR)
