"""Group-relative advantages against closed forms, and the three places where we differ from the peer."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import group_signal, grpo_advantages


def _row(rewards: list[float], groups: list[int], **options: float) -> list[float]:
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    advantages = grpo_advantages(torch.tensor(rewards), torch.tensor(groups), mask, **options)  # type: ignore[arg-type]
    return [float(value) for value in advantages[:, 0]]


def test_two_against_two_is_the_closed_form() -> None:
    # mean 1/2, variance 1/3 with n - 1
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert torch.allclose(torch.tensor(_row([1, 0, 0, 1], [7, 7, 7, 7])), torch.tensor([expected, -expected, -expected, expected]))


def test_without_std_it_is_the_difference_to_the_groups_mean() -> None:
    assert _row([1, 0, 5, 3], [1, 1, 0, 0], norm_by_std=False) == [0.5, -0.5, 1.0, -1.0]


def test_groups_do_not_see_each_other_in_any_order() -> None:
    apart = _row([1, 0, 4, 2], [0, 0, 1, 1])
    mixed = _row([1, 4, 0, 2], [3, 9, 3, 9])
    assert mixed == [apart[0], apart[2], apart[1], apart[3]]


def test_a_group_of_one_gets_zero() -> None:
    assert _row([1, 0, 1], [0, 0, 1])[2] == 0.0
    assert _row([5.0], [0], norm_by_std=False) == [0.0]


@given(st.floats(-1e3, 1e3, width=32), st.integers(2, 9))
def test_a_constant_group_gets_exactly_zero(reward: float, size: int) -> None:
    assert _row([reward] * size, [0] * size) == [0.0] * size


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10, width=32)), min_size=1, max_size=20), st.booleans())
def test_against_a_plain_float64_reference(rows: list[tuple[int, float]], norm_by_std: bool) -> None:
    got = _row([reward for _, reward in rows], [group for group, _ in rows], norm_by_std=norm_by_std)
    for (group, reward), advantage in zip(rows, got, strict=True):
        peers = [other for number, other in rows if number == group]
        mean = sum(peers) / len(peers)
        expected = reward - mean if max(peers) != min(peers) else 0.0
        if norm_by_std and len(peers) > 1:
            expected /= math.sqrt(sum((peer - mean) ** 2 for peer in peers) / (len(peers) - 1)) + 1e-6
        assert math.isclose(advantage, expected, rel_tol=1e-5, abs_tol=1e-6)


def test_only_policy_tokens_carry_the_advantage() -> None:
    mask = torch.tensor([[True, False, True], [True, True, False]])
    advantages = grpo_advantages(torch.tensor([2.0, 0.0]), torch.tensor([0, 0]), mask, norm_by_std=False)
    assert advantages.tolist() == [[1.0, 0.0, 1.0], [-1.0, -1.0, 0.0]]
    assert advantages.dtype == torch.float32


def test_a_row_without_policy_tokens_still_counts_in_the_baseline() -> None:
    mask = torch.tensor([[True], [False]])
    advantages = grpo_advantages(torch.tensor([2.0, 0.0]), torch.tensor([0, 0]), mask, norm_by_std=False)
    assert advantages.tolist() == [[1.0], [0.0]]


def test_signal_is_two_different_rewards_in_the_group() -> None:
    signal = group_signal(torch.tensor([0.1, 0.1, 0.1, 1.0, 2.0, 3.0]), torch.tensor([0, 0, 0, 1, 1, 2]))
    assert signal.tolist() == [False, False, False, True, True, False]
