"""Statistics of the groups of a batch, without a loop: one scatter over the rows each. Legend: B rows, G groups.

All are float64 inside, whatever comes in; they are a few numbers a row.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Singleton = Literal["zero", "reward"]
"""What a group of one gets: 0, having nothing to be compared with (ours), or its raw reward (verl 0.9.1)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Who is whose peer."""

    index_B: torch.Tensor
    """int64, the group of each row, 0 .. G - 1."""
    count_G: torch.Tensor
    """float64, rows of each group."""

    @classmethod
    def of(cls, groups_B: torch.Tensor) -> "Groups":
        """groups_B: int64, any numbering."""
        unique, index_B = torch.unique(groups_B, return_inverse=True)
        return cls(index_B=index_B, count_G=torch.bincount(index_B, minlength=len(unique)).double())

    @property
    def count_B(self) -> torch.Tensor:
        """float64: how many rows the row's group has, itself included."""
        return self.count_G[self.index_B]

    def sum(self, values_B: torch.Tensor) -> torch.Tensor:
        """float64 [B]: the sum over the row's group."""
        return torch.zeros_like(self.count_G).index_add(0, self.index_B, values_B.double())[self.index_B]

    def mean(self, values_B: torch.Tensor) -> torch.Tensor:
        """float64 [B]: the mean over the row's group."""
        return self.sum(values_B) / self.count_B

    def std(self, values_B: torch.Tensor) -> torch.Tensor:
        """float64 [B]: the standard deviation over the row's group, n - 1 under the root; 1 where the group is constant."""
        variance_B = self.sum((values_B - self.mean(values_B)).square()) / (self.count_B - 1).clamp(min=1)
        return torch.where(self.signal(values_B), variance_B.sqrt(), 1.0)

    def signal(self, values_B: torch.Tensor) -> torch.Tensor:
        """bool [B]: the row's group holds two different values. max == min decides, not std == 0, which rounding defeats."""
        zeros_G = values_B.new_zeros(len(self.count_G))
        highest_G = zeros_G.scatter_reduce(0, self.index_B, values_B, "amax", include_self=False)
        lowest_G = zeros_G.scatter_reduce(0, self.index_B, values_B, "amin", include_self=False)
        return (highest_G != lowest_G)[self.index_B]

    def two_highest(self, values_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [G] twice: the row with the highest value of each group, and the next one (any row, in a group of one)."""
        falling_B = torch.argsort(values_B, descending=True, stable=True)
        by_group_B = falling_B[torch.argsort(self.index_B[falling_B], stable=True)]
        first_G = (self.count_G.cumsum(0) - self.count_G).long()
        return by_group_B[first_G], by_group_B[(first_G + 1).clamp(max=len(values_B) - 1)]

    def centred(self, rewards_B: torch.Tensor, baseline_B: torch.Tensor | None = None, *, singleton: Singleton) -> torch.Tensor:
        """float64 [B]: rewards less a baseline, by default the group's mean; exactly 0 where the group is constant.

        A group of one gets 0 or its reward.
        """
        baseline_B = self.mean(rewards_B) if baseline_B is None else baseline_B
        centred_B = torch.where(self.signal(rewards_B), rewards_B.double() - baseline_B, 0.0)
        return torch.where(self.count_B == 1, rewards_B.double(), centred_B) if singleton == "reward" else centred_B


def group_signal(rewards_B: torch.Tensor, groups_B: torch.Tensor) -> torch.Tensor:
    """bool [B]: True where the row's group has two different rewards, so that there is something to learn.

    rewards_B: float; groups_B: int64, any numbering of the groups. max == min decides, not std == 0, which rounding defeats.
    """
    return Groups.of(groups_B).signal(rewards_B)
