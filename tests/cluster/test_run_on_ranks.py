"""The tests' helper `run_on_ranks`: a function of this file runs in each rank, and collectives work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncrl.cluster import Rank

pytestmark = pytest.mark.ranks


def _sum_and_threads(rank: Rank, payload: torch.Tensor) -> tuple[torch.Tensor, int]:
    value = payload * (rank.rank + 1)
    dist.all_reduce(value)
    return value, torch.get_num_threads()


@pytest.mark.parametrize("world", [1, 2])
def test_a_function_runs_in_each_rank(run_on_ranks: Callable[..., list[Any]], world: int) -> None:
    replies = run_on_ranks(world, _sum_and_threads, torch.tensor([1.0, 2.0]))
    factor = world * (world + 1) / 2
    assert [(value.tolist(), threads) for value, threads in replies] == [([factor, 2 * factor], 1)] * world
