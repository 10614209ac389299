"""The optimal baseline of each token, from the rows of its group that have the same token number.

Legend: B rows, R response tokens, G groups, K policy tokens of the longest row.
"""

from dataclasses import dataclass

import torch

from asyncrl.algorithms.advantages.groups import Groups, Singleton
from asyncrl.algorithms.advantages.returns import rewards_to_go

ENERGY_EPSILON = 1e-8
"""Added to each weight: rows that were sure of every token count alike, instead of not at all."""


def optimal_token_baseline_advantages(
    rewards_BR: torch.Tensor,
    groups_B: torch.Tensor,
    mask_BR: torch.Tensor,
    old_log_probs_BR: torch.Tensor,
    sum_pi_squared_BR: torch.Tensor,
    *,
    rollout_is_weights_BR: torch.Tensor | None = None,
    handle_zero_tail: bool = True,
    singleton: Singleton = "zero",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_BR, returns_BR): the return less the group's mean at the same column, weighted by the energy spent so far.

    rewards_BR: float; groups_B: int64, any numbering; mask_BR: bool, True on policy tokens; old_log_probs_BR: log pi(token);
    sum_pi_squared_BR: sum of pi squared over the vocabulary; rollout_is_weights_BR: importance weights, or None for 1.
    The energy of a row at a token is the sum up to there of (1 - 2 pi + sum pi^2) w^2, which estimates the squared norm of the
    gradient of its log-probs. With `handle_zero_tail` the baseline is 0 on the tokens of a group's longest row beyond the second
    longest, where it has no peers; without it the row is its own baseline there, and the advantage 0.

    Source: OTB, arXiv 2602.07078.
    Where we differ from verl 0.9.1:
    1. A group of one gets 0, not its raw return (`singleton="reward"` gives that).
    2. Where all rows of a group have the same return, the advantage is exactly 0. And 1e-8 is added to each weight, not once to
       their sum: with rows that were sure of every token, verl's baseline shrinks to 0.
    3. A length is the last policy token's column plus one, so gaps do not shorten a row; verl counts tokens.
    """
    returns_BR = rewards_to_go(rewards_BR, mask_BR)
    energy_BR = _energy(mask_BR, old_log_probs_BR, sum_pi_squared_BR, rollout_is_weights_BR)
    groups = Groups.of(groups_B)
    advantages_BR = _less_baseline(returns_BR, energy_BR, mask_BR, groups, handle_zero_tail=handle_zero_tail, singleton=singleton)
    return advantages_BR, returns_BR


def tir_optimal_token_baseline_advantages(
    rewards_BR: torch.Tensor,
    groups_B: torch.Tensor,
    mask_BR: torch.Tensor,
    old_log_probs_BR: torch.Tensor,
    sum_pi_squared_BR: torch.Tensor,
    *,
    rollout_is_weights_BR: torch.Tensor | None = None,
    handle_zero_tail: bool = True,
    singleton: Singleton = "zero",
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `optimal_token_baseline_advantages`, with columns counted over policy tokens: the k-th meets the k-th.

    For sessions with tools, whose observations shift policy tokens against each other. Same source, same differences.
    """
    returns_BR = rewards_to_go(rewards_BR, mask_BR)
    energy_BR = _energy(mask_BR, old_log_probs_BR, sum_pi_squared_BR, rollout_is_weights_BR)
    closed = _Closed.of(mask_BR)
    advantages_BK = _less_baseline(
        closed.close(returns_BR),
        closed.close(energy_BR),
        closed.mask_BK,
        Groups.of(groups_B),
        handle_zero_tail=handle_zero_tail,
        singleton=singleton,
    )
    return closed.open(advantages_BK), returns_BR


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Closed:
    """The rows without their gaps."""

    mask_BR: torch.Tensor
    mask_BK: torch.Tensor

    @classmethod
    def of(cls, mask_BR: torch.Tensor) -> "_Closed":
        lengths_B = mask_BR.sum(1)
        columns_K = torch.arange(int(lengths_B.max()) if len(lengths_B) else 0, device=mask_BR.device)
        return cls(mask_BR=mask_BR, mask_BK=columns_K < lengths_B[:, None])

    def close(self, values_BR: torch.Tensor) -> torch.Tensor:
        # both masks list the policy tokens in the same order
        return values_BR.new_zeros(self.mask_BK.shape).masked_scatter(self.mask_BK, values_BR[self.mask_BR])

    def open(self, values_BK: torch.Tensor) -> torch.Tensor:
        return values_BK.new_zeros(self.mask_BR.shape).masked_scatter(self.mask_BR, values_BK[self.mask_BK])


def _energy(
    mask_BR: torch.Tensor, old_log_probs_BR: torch.Tensor, sum_pi_squared_BR: torch.Tensor, weights_BR: torch.Tensor | None
) -> torch.Tensor:
    """[B, R], rising along the policy tokens of each row."""
    norm_BR = 1 - 2 * old_log_probs_BR.exp() + sum_pi_squared_BR
    if weights_BR is not None:
        norm_BR = norm_BR * weights_BR.square()
    return torch.where(mask_BR, norm_BR, 0.0).cumsum(1)


def _less_baseline(
    returns_BR: torch.Tensor,
    energy_BR: torch.Tensor,
    mask_BR: torch.Tensor,
    groups: Groups,
    *,
    handle_zero_tail: bool,
    singleton: Singleton,
) -> torch.Tensor:
    """The returns less their baseline, 0 outside the mask."""
    weights_BR = torch.where(mask_BR, energy_BR + ENERGY_EPSILON, 0.0)
    zeros_GR = returns_BR.new_zeros(len(groups.count_G), returns_BR.shape[1])
    total_GR = zeros_GR.index_add(0, groups.index_B, weights_BR)
    baseline_GR = zeros_GR.index_add(0, groups.index_B, weights_BR * returns_BR) / torch.where(total_GR > 0, total_GR, 1.0)
    centred_BR = torch.where(_differs(returns_BR, mask_BR, groups), returns_BR - baseline_GR[groups.index_B], 0.0)
    alone_BR = (groups.count_B == 1)[:, None] & mask_BR
    if handle_zero_tail:
        centred_BR = torch.where(_tail(mask_BR, groups), returns_BR, centred_BR)
    centred_BR = torch.where(alone_BR, returns_BR if singleton == "reward" else 0.0, centred_BR)
    return torch.where(mask_BR, centred_BR, 0.0)


def _differs(returns_BR: torch.Tensor, mask_BR: torch.Tensor, groups: Groups) -> torch.Tensor:
    """bool [B, R]: two rows of the group have different returns at this column."""
    index_BR = groups.index_B[:, None].expand_as(returns_BR)
    zeros_GR = returns_BR.new_zeros(len(groups.count_G), returns_BR.shape[1])
    highest_GR = zeros_GR.scatter_reduce(0, index_BR, torch.where(mask_BR, returns_BR, -torch.inf), "amax", include_self=False)
    lowest_GR = zeros_GR.scatter_reduce(0, index_BR, torch.where(mask_BR, returns_BR, torch.inf), "amin", include_self=False)
    return (highest_GR > lowest_GR)[groups.index_B]


def _tail(mask_BR: torch.Tensor, groups: Groups) -> torch.Tensor:
    """bool [B, R]: tokens of a group's longest row beyond the second longest."""
    columns_R = torch.arange(mask_BR.shape[1], device=mask_BR.device)
    lengths_B = (mask_BR.flip(1).cumsum(1) > 0).sum(1)  # up to the last policy token
    _, second_G = groups.two_highest(lengths_B)
    return (columns_R >= lengths_B[second_G][groups.index_B][:, None]) & mask_BR
