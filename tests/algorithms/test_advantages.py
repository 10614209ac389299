"""Advantages of one number a row against closed forms, and the places where we differ from the peer."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import group_signal, grpo_advantages
from asyncrl.algorithms.advantages.outcome import (
    gdpo_advantages,
    gpg_advantages,
    grpo_passk_advantages,
    opo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)

GROUP_RELATIVE = (
    grpo_advantages,
    rloo_advantages,
    opo_advantages,
    gpg_advantages,
    grpo_passk_advantages,
    reinforce_plus_plus_baseline_advantages,
)
WITH_SINGLETONS = tuple(function for function in GROUP_RELATIVE if function is not grpo_passk_advantages)
Function = Callable[..., torch.Tensor]


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


def _of(
    function: Function, rewards: list[float], groups: list[int], lengths: list[int] | None = None, **options: object
) -> list[float]:
    """One number a row; row i has lengths[i] policy tokens, by default 1."""
    lengths = lengths or [1] * len(rewards)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    advantages = function(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), mask, **options)
    assert not advantages[~mask].any()
    assert all(len(set(row[inside].tolist())) <= 1 for row, inside in zip(advantages, mask, strict=True))
    return [float(value) for value in advantages[:, 0]]


def test_rloo_is_the_distance_to_the_mean_of_the_others() -> None:
    assert _of(rloo_advantages, [1, 0, 5], [3, 3, 3]) == pytest.approx([-1.5, -3, 4.5])


def test_opo_weighs_its_baseline_by_length() -> None:
    # (3 x 1 + 1 x 5) / 4 = 2
    assert _of(opo_advantages, [1, 5], [0, 0], [3, 1]) == pytest.approx([-1, 3])


def test_gpg_scales_by_the_share_of_rewarded_rows_with_a_token() -> None:
    # of the 3 rows with a token one has a reward: alpha 3
    assert _of(gpg_advantages, [1, 0, 0, 1], [0, 0, 1, 2], [1, 2, 1, 0]) == pytest.approx([1.5, -1.5, 0, 0])
    assert _of(gpg_advantages, [1, 0], [0, 0], f_norm=4.0) == pytest.approx([0.25, -0.25])


def test_pass_at_k_rewards_the_lead_of_the_best() -> None:
    assert _of(grpo_passk_advantages, [1, 4, 2, 7], [0, 0, 0, 1], norm_by_std=False) == [0, 2, 0, 0]
    std = math.sqrt(7 / 3)
    assert _of(grpo_passk_advantages, [1, 4, 2], [0, 0, 0]) == pytest.approx([0, 2 / (std + 1e-6), 0])
    assert _of(grpo_passk_advantages, [1, 4, 4], [0, 0, 0]) == [0, 0, 0]


def test_the_whitening_counts_tokens() -> None:
    # centred +-1; over tokens [1, -1, -1, -1]: mean -1/2, variance 1
    whitened = _of(reinforce_plus_plus_baseline_advantages, [2, 0], [0, 0], [1, 3])
    assert whitened == pytest.approx([1.5, -0.5])


def test_gdpo_normalises_each_component_apart() -> None:
    # one component a thousand times the other: each gives +-1/sqrt(2), so the two cancel in the second pair
    parts = {"a": torch.tensor([1.0, 0, 1, 0]), "b": torch.tensor([1000.0, 0, 0, 1000])}
    groups, mask = torch.tensor([0, 0, 1, 1]), torch.ones(4, 1, dtype=torch.bool)
    total = torch.tensor([2.0, -2, 0, 0]) / math.sqrt(2)
    expected = total / math.sqrt(4 / 3)
    torch.testing.assert_close(gdpo_advantages(parts, groups, mask)[:, 0], expected, rtol=1e-5, atol=1e-5)
    only_a = gdpo_advantages(parts, groups, mask, names=["a"], weights=[9.0])
    torch.testing.assert_close(only_a[:, 0], torch.tensor([1.0, -1, 1, -1]) * math.sqrt(3) / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("names", "weights"), [(["c"], None), ([], None), (None, [1.0]), (["a"], [1.0, 2.0])], ids=["unknown", "none", "few", "many"]
)
def test_gdpo_says_which_components_there_are(names: list[str] | None, weights: list[float] | None) -> None:
    parts = {"a": torch.zeros(1), "b": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"of the reward components \['a', 'b'\]"):
        gdpo_advantages(parts, torch.tensor([0]), torch.ones(1, 1, dtype=torch.bool), names=names, weights=weights)


@pytest.mark.parametrize("function", GROUP_RELATIVE)
@given(reward=st.floats(-1e3, 1e3, width=32), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_constant_groups_get_exactly_zero(function: Function, reward: float, sizes: list[int]) -> None:
    groups = [number for number, size in enumerate(sizes) for _ in range(size)]
    lengths = [1 + row % 3 for row in range(len(groups))]
    assert _of(function, [reward] * len(groups), groups, lengths) == [0.0] * len(groups)


@given(reward=st.floats(-1e3, 1e3, width=32), size=st.integers(1, 9))
def test_constant_components_get_exactly_zero(reward: float, size: int) -> None:
    parts = {"a": torch.full((size,), reward), "b": torch.full((size,), 0.97)}
    assert not gdpo_advantages(parts, torch.zeros(size, dtype=torch.int64), torch.ones(size, 2, dtype=torch.bool)).any()


@pytest.mark.parametrize("function", [grpo_advantages, rloo_advantages, opo_advantages, gpg_advantages, grpo_passk_advantages])
def test_a_constant_group_beside_others_gets_exactly_zero(function: Function) -> None:
    assert _of(function, [0.97, 1, 0.97, 0, 0.97], [0, 1, 0, 1, 0])[::2] == [0, 0, 0]


@pytest.mark.parametrize("function", GROUP_RELATIVE)
def test_a_group_of_one_is_zero_beside_constant_groups(function: Function) -> None:
    assert _of(function, [3, 0.5, 0.5], [0, 1, 1]) == [0, 0, 0]


@pytest.mark.parametrize("function", WITH_SINGLETONS)
def test_the_peers_answer_for_a_group_of_one_is_its_reward(function: Function) -> None:
    got = _of(function, [3, -2], [0, 1], singleton="reward")
    if function is reinforce_plus_plus_baseline_advantages:
        assert got == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    else:
        assert got == pytest.approx([3, -2], rel=1e-5)


ROWS = st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10, width=16), st.integers(1, 4)), min_size=1, max_size=20)


@pytest.mark.parametrize("function", [grpo_advantages, rloo_advantages, opo_advantages, reinforce_plus_plus_baseline_advantages])
@given(rows=ROWS, shift=st.integers(-8, 8))
def test_a_constant_added_to_all_rewards_changes_nothing(
    function: Function, rows: list[tuple[int, float, int]], shift: int
) -> None:
    groups, rewards, lengths = (list(column) for column in zip(*rows, strict=True))
    shifted = _of(function, [reward + shift for reward in rewards], groups, lengths)
    assert shifted == pytest.approx(_of(function, rewards, groups, lengths), rel=1e-6, abs=1e-6)


@given(rows=ROWS, factor=st.sampled_from([0.25, 2.0, 64.0]))
def test_with_the_std_the_scale_of_the_rewards_does_not_matter(rows: list[tuple[int, float, int]], factor: float) -> None:
    groups, rewards, _ = (list(column) for column in zip(*rows, strict=True))
    # the 1e-6 beside the std is all that sees the scale
    scaled = _of(grpo_advantages, [factor * reward for reward in rewards], groups, epsilon=0.0)
    assert scaled == pytest.approx(_of(grpo_advantages, rewards, groups, epsilon=0.0), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("function", [grpo_advantages, rloo_advantages])
@given(rows=ROWS)
def test_advantages_of_a_group_add_up_to_zero(function: Function, rows: list[tuple[int, float, int]]) -> None:
    groups, rewards, _ = (list(column) for column in zip(*rows, strict=True))
    advantages = _of(function, rewards, groups)
    for group in set(groups):
        assert abs(math.fsum(a for a, number in zip(advantages, groups, strict=True) if number == group)) < 1e-9


@pytest.mark.parametrize("function", GROUP_RELATIVE)
def test_no_rows_are_no_error(function: Function) -> None:
    nothing = torch.zeros(0, 3, dtype=torch.bool)
    assert function(torch.zeros(0), torch.zeros(0, dtype=torch.int64), nothing).shape == (0, 3)
