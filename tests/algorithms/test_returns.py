"""Returns, GAE and ReMax by hand; rewards on tokens that are not the policy's; no dependence on padding to the last bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.advantages.returns import (
    gae_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
    rewards_of_actions,
    rewards_to_go,
)

MASK = torch.tensor([[True, False, True, False, False]])
REWARDS = torch.tensor([[1.0, 10.0, 2.0, 20.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [33, 0, 22, 0, 0]), (0.5, [11 + 0.5 * 22, 0, 22, 0, 0])])
def test_a_return_counts_what_came_before_the_next_action_as_its_own(gamma: float, expected: list[float]) -> None:
    assert rewards_to_go(REWARDS, MASK, gamma=gamma).tolist() == [expected]


def test_a_reward_before_the_first_action_is_nobodys() -> None:
    mask, rewards = torch.tensor([[False, True, True]]), torch.tensor([[5.0, 1.0, 2.0]])
    assert rewards_of_actions(rewards, mask).tolist() == [[0, 1, 2]]
    for gamma in (1.0, 0.5):
        assert float(rewards_to_go(rewards, mask, gamma=gamma)[0, 1]) == 1 + 2 * gamma


def test_rewards_that_lie_on_actions_are_not_copied() -> None:
    rewards = REWARDS * MASK
    assert rewards_of_actions(rewards, MASK) is rewards


@pytest.mark.parametrize("place", [2, 3, 4], ids=["action", "gap", "end"])
def test_gae_keeps_a_terminal_reward_wherever_it_lands(place: int) -> None:
    rewards, values = torch.zeros(1, 5, dtype=torch.float64), torch.tensor([[0.5, 9.0, 0.25, 9.0, 9.0]], dtype=torch.float64)
    rewards[0, place] = 1.0
    _, returns = gae_advantages(rewards, values, MASK, gamma=0.5, lam=0.5)
    # deltas: 1 - 0.25 = 0.75 and 0.5 x 0.25 - 0.5 = -0.375; A = [-0.375 + 0.25 x 0.75, 0.75]
    assert returns.tolist() == [[0.5 - 0.375 + 0.1875, 0, 1.0, 0, 0]]


def test_gae_with_lambda_one_and_no_values_is_the_return() -> None:
    _, returns = gae_advantages(REWARDS, torch.zeros_like(REWARDS), MASK, gamma=0.9, lam=1.0)
    torch.testing.assert_close(returns, rewards_to_go(REWARDS, MASK, gamma=0.9))


def test_gae_with_lambda_zero_is_one_step() -> None:
    values = torch.tensor([[4.0, 0, 3.0, 0, 0]], dtype=torch.float64)
    _, returns = gae_advantages(REWARDS, values, MASK, gamma=0.5, lam=0.0)
    assert returns.tolist() == [[11 + 0.5 * 3, 0, 22, 0, 0]]


def test_whitened_by_hand() -> None:
    advantages, returns = reinforce_plus_plus_advantages(torch.tensor([[0.0, 1.0, 9.0], [0.0, 3.0, 0.0]]), torch.ones(2, 3) == 1)
    assert returns.tolist() == [[10, 10, 9], [3, 3, 0]]
    torch.testing.assert_close(advantages, (returns - returns.mean()) / returns.std())


def test_remax_takes_the_greedy_answers_reward_off() -> None:
    advantages, returns = remax_advantages(REWARDS, torch.tensor([3.0]), MASK)
    assert advantages.tolist() == [[30, 0, 19, 0, 0]]
    assert returns.tolist() == [[33, 0, 22, 0, 0]]


@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([1.0, 0.9]))
def test_a_row_does_not_see_its_padding_to_the_last_bit(seed: int, gamma: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(3, 6, generator=generator), torch.randn(3, 6, generator=generator)
    mask = torch.rand(3, 6, generator=generator) < 0.7

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, 3, 0, 2))

    wide = rewards_to_go(padded(rewards), padded(mask), gamma=gamma)
    assert torch.equal(wide[:3, :6], rewards_to_go(rewards, mask, gamma=gamma))
    _, wide = gae_advantages(padded(rewards), padded(values), padded(mask), gamma=gamma, lam=0.8)
    assert torch.equal(wide[:3, :6], gae_advantages(rewards, values, mask, gamma=gamma, lam=0.8)[1])


def test_no_tokens_are_no_error() -> None:
    rewards, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    for gamma in (1.0, 0.5):
        assert rewards_to_go(rewards, mask, gamma=gamma).shape == (2, 0)
    assert gae_advantages(rewards, rewards, mask)[0].shape == (2, 0)
