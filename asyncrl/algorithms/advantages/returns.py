"""Advantages that look at each token: GAE, REINFORCE++ and ReMax, with the return that all of them build on.

Legend: B rows, R response tokens. Everywhere: rewards_BR is float; mask_BR is bool, True on policy tokens; outputs have the
rewards' dtype and are 0 outside the mask. Gaps (tool observations) take no time: nothing is discounted across them.

Where all of them differ from verl 0.9.1:
1. A reward on a token that is not the policy's counts for the last policy token before it: it is the reward of that action.
   verl's GAE loses it, and so a terminal reward behind a tool's answer. Before the first policy token it has no effect.

A loop over R stays where a discount makes a recurrence: it keeps every row bitwise independent of padding.
"""

import torch

from asyncrl.algorithms.blocks import row_blocks
from asyncrl.algorithms.masked import masked_whiten


def rewards_to_go(rewards_BR: torch.Tensor, mask_BR: torch.Tensor, *, gamma: float = 1.0) -> torch.Tensor:
    """returns_BR: reward of the token plus gamma times the return of the next policy token."""
    if gamma == 1:
        returns_BR = torch.empty_like(rewards_BR)
        for rows in row_blocks(rewards_BR):
            returns_BR[rows] = torch.where(mask_BR[rows], rewards_BR[rows].flip(1).cumsum(1).flip(1), 0.0)
        return returns_BR
    rewards_RB, mask_RB = rewards_of_actions(rewards_BR, mask_BR).T.contiguous(), mask_BR.T.contiguous()
    returns_RB, running_B = torch.empty_like(rewards_RB), rewards_BR.new_zeros(len(rewards_BR))
    for t in reversed(range(len(rewards_RB))):
        running_B = torch.where(mask_RB[t], rewards_RB[t] + gamma * running_B, running_B)
        returns_RB[t] = running_B
    return _masked_rows(returns_RB, mask_BR)


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
    advantages_BR = masked_whiten(_masked_rows(advantages_RB, mask_BR), mask_BR)
    return advantages_BR, _masked_rows(advantages_RB.add_(values_RB), mask_BR)


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
    found = [((rewards_BR[rows] != 0) & ~mask_BR[rows]).any(1) for rows in row_blocks(rewards_BR)]
    rows_b = torch.cat(found).nonzero()[:, 0] if found else torch.zeros(0, dtype=torch.int64)
    if not len(rows_b):
        return rewards_BR
    mask_bR, columns_R = mask_BR[rows_b], torch.arange(mask_BR.shape[1], device=mask_BR.device)
    action_bR = torch.where(mask_bR, columns_R, -1).cummax(1).values
    counted_bR = torch.where(action_bR >= 0, rewards_BR[rows_b], 0.0)
    moved_bR = torch.zeros_like(counted_bR).scatter_add(1, action_bR.clamp(min=0), counted_bR)
    return rewards_BR.index_copy(0, rows_b, moved_bR)


def _masked_rows(values_RB: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """[B, R], contiguous; 0 outside the mask."""
    masked_BR = values_RB.new_empty(mask_BR.shape)
    for rows in row_blocks(mask_BR):
        masked_BR[rows] = torch.where(mask_BR[rows], values_RB[:, rows].T, 0.0)
    return masked_BR
