"""The optimal baseline of each token by hand, its tail, its exact zeros, and gaps."""

import math
from collections.abc import Callable

import pytest
import torch

from asyncrl.algorithms.advantages.token_baseline import optimal_token_baseline_advantages, tir_optimal_token_baseline_advantages

Function = Callable[..., tuple[torch.Tensor, torch.Tensor]]
BOTH = pytest.mark.parametrize("function", [optimal_token_baseline_advantages, tir_optimal_token_baseline_advantages])


def _mask(rows: list[str]) -> torch.Tensor:
    """# is a policy token."""
    return torch.tensor([[sign == "#" for sign in row] for row in rows])


def _rewarded(totals: list[float], width: int) -> torch.Tensor:
    """The whole reward on the last column, so that every token of a row has it as its return."""
    rewards = torch.zeros(len(totals), width, dtype=torch.float64)
    rewards[:, -1] = torch.tensor(totals, dtype=torch.float64)
    return rewards


def _energies(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(old_log_probs, sum_pi_squared) with 1 - 2 pi + sum pi^2 as given: pi = 1/2, so the sum is the energy itself."""
    squares = torch.tensor(rows, dtype=torch.float64)
    return torch.full_like(squares, math.log(0.5)), squares


def test_rows_weigh_by_the_energy_spent_so_far() -> None:
    mask = _mask(["##", "##"])
    probs = _energies([[1, 2], [3, 0]])
    advantages, returns = optimal_token_baseline_advantages(_rewarded([1, 0], 2), torch.tensor([4, 4]), mask, *probs)
    # baselines: 1/4 at the first token; energies 3 and 3 at the second, so 1/2
    torch.testing.assert_close(advantages, torch.tensor([[0.75, 0.5], [-0.25, -0.5]], dtype=torch.float64), rtol=1e-7, atol=1e-7)
    assert returns.tolist() == [[1, 1], [0, 0]]


def test_importance_weights_count_squared() -> None:
    mask, probs = _mask(["#", "#"]), _energies([[1], [1]])
    weights = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    advantages, _ = optimal_token_baseline_advantages(
        _rewarded([1, 0], 1), torch.tensor([0, 0]), mask, *probs, rollout_is_weights_BR=weights
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.2], [-0.8]], dtype=torch.float64), rtol=1e-7, atol=1e-7)


@BOTH
@pytest.mark.parametrize(("handle_zero_tail", "tail"), [(True, 2.0), (False, 0.0)])
def test_the_longest_row_beyond_its_peers(function: Function, handle_zero_tail: bool, tail: float) -> None:
    mask, probs = _mask(["####", "##..", "#..."]), _energies([[1.0] * 4] * 3)
    rewards = torch.tensor([[0, 0, 0, 2.0], [0, 1.0, 0, 0], [1.0, 0, 0, 0]], dtype=torch.float64)
    advantages, _ = function(rewards, torch.tensor([0, 0, 0]), mask, *probs, handle_zero_tail=handle_zero_tail)
    assert advantages[0, 2:].tolist() == [tail, tail]
    assert advantages[0, 1] == pytest.approx(0.5)


@BOTH
def test_two_longest_rows_have_no_tail(function: Function) -> None:
    mask, probs = _mask(["###", "###", "#.."]), _energies([[1.0] * 3] * 3)
    advantages, _ = function(_rewarded([1, 0, 0], 3), torch.tensor([0, 0, 0]), mask, *probs)
    torch.testing.assert_close(advantages[:2, 2], torch.tensor([0.5, -0.5], dtype=torch.float64))


@BOTH
@pytest.mark.parametrize("energy", [0.7, 1e-12, 0.0])
def test_equal_returns_give_exactly_zero_however_sure_the_rows_were(function: Function, energy: float) -> None:
    mask, probs = _mask(["###"] * 5), _energies([[energy * (row + 1)] * 3 for row in range(5)])
    advantages, _ = function(_rewarded([0.97] * 5, 3), torch.zeros(5, dtype=torch.int64), mask, *probs)
    assert not advantages.any()


def test_rows_that_were_sure_of_every_token_weigh_alike() -> None:
    mask, probs = _mask(["#", "#"]), _energies([[0.0], [0.0]])
    advantages, _ = optimal_token_baseline_advantages(_rewarded([1, 0], 1), torch.tensor([0, 0]), mask, *probs)
    assert advantages.tolist() == [[0.5], [-0.5]]


@BOTH
@pytest.mark.parametrize("handle_zero_tail", [True, False])
def test_a_group_of_one(function: Function, handle_zero_tail: bool) -> None:
    mask, probs, groups = _mask(["##", "##"]), _energies([[1.0, 1.0]] * 2), torch.tensor([0, 1])
    rewards = _rewarded([3, 4], 2)
    ours, _ = function(rewards, groups, mask, *probs, handle_zero_tail=handle_zero_tail)
    theirs, _ = function(rewards, groups, mask, *probs, handle_zero_tail=handle_zero_tail, singleton="reward")
    assert ours.tolist() == [[0, 0], [0, 0]]
    assert theirs.tolist() == [[3, 3], [4, 4]]


def test_columns_are_counted_over_policy_tokens_when_tools_shift_them() -> None:
    rewards, groups = torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 0]], dtype=torch.float64), torch.tensor([0, 0])
    mask, probs = _mask(["#..#", "##.."]), _energies([[1.0] * 4] * 2)
    closed, _ = tir_optimal_token_baseline_advantages(rewards, groups, mask, *probs)
    assert closed.tolist() == [[0.5, 0, 0, 0.5], [-0.5, -0.5, 0, 0]]
    # by column the second tokens do not meet: one is in the tail, the other is alone and its own baseline
    by_column, _ = optimal_token_baseline_advantages(rewards, groups, mask, *probs)
    assert by_column.tolist() == [[0.5, 0, 0, 1.0], [-0.5, 0, 0, 0]]
