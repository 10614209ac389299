"""Largest differencing, as properties of any numbers, and against the optimum found by trying everything."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.partition import partition, partition_under_cap, workload

WEIGHTS = st.lists(st.integers(0, 10_000), max_size=60)
PARTS = st.integers(1, 9)


def _sums(weights: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(weights[item] for item in part) for part in parts]


@given(WEIGHTS, PARTS)
def test_every_item_is_in_exactly_one_part(weights: list[int], num_parts: int) -> None:
    parts = partition(weights, num_parts)
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == list(range(len(weights)))
    assert all(part == sorted(part) for part in parts)


@given(WEIGHTS, PARTS)
def test_parts_fall_in_weight_and_differ_by_the_largest_item_at_most(weights: list[int], num_parts: int) -> None:
    sums = _sums(weights, partition(weights, num_parts))
    assert sums == sorted(sums, reverse=True)
    assert sums[0] - sums[-1] <= max(weights, default=0)


@given(st.lists(st.integers(0, 10_000), max_size=8), PARTS)
def test_equal_counts_are_equal_and_the_spread_is_that_of_a_slice(counts: list[int], num_parts: int) -> None:
    weights = [(number * 7919 + place * 104729) % 10_007 for number in counts for place in range(num_parts)]
    parts = partition(weights, num_parts, equal_counts=True)
    assert {len(part) for part in parts} == {len(counts)}
    assert sorted(item for part in parts for item in part) == list(range(len(weights)))
    falling = sorted(weights, reverse=True)
    slices = [falling[start : start + num_parts] for start in range(0, len(falling), num_parts)]
    sums = _sums(weights, parts)
    assert sums[0] - sums[-1] <= max((part[0] - part[-1] for part in slices), default=0)


@given(st.lists(st.integers(0, 50), max_size=7), st.integers(2, 3))
def test_the_heaviest_part_is_at_most_four_thirds_of_the_optimum(weights: list[int], num_parts: int) -> None:
    places = itertools.product(range(num_parts), repeat=len(weights))
    best = min(
        max(sum(w for w, at in zip(weights, chosen, strict=True) if at == part) for part in range(num_parts)) for chosen in places
    )
    assert 3 * _sums(weights, partition(weights, num_parts))[0] <= 4 * best


@given(WEIGHTS, PARTS, st.randoms(use_true_random=False))
def test_the_sums_do_not_depend_on_the_order_of_different_items(weights: list[int], num_parts: int, random: object) -> None:
    distinct = sorted(set(weights))
    shuffled = distinct[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert _sums(shuffled, partition(shuffled, num_parts)) == _sums(distinct, partition(distinct, num_parts))


def test_the_example_of_the_docstring() -> None:
    assert partition([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]


def test_fewer_items_than_parts_leave_parts_empty() -> None:
    assert partition([3, 1], 4) == [[0], [1], [], []]
    assert partition([], 2, equal_counts=True) == [[], []]


def test_equal_counts_that_are_impossible_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"13 items cannot make 4 parts .*: 13 = 4 x 3 \+ 1, 3 more are needed"):
        partition([1] * 13, 4, equal_counts=True)
    with pytest.raises(ValueError, match="0 parts"):
        partition([1], 0)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(50, 300), st.integers(1, 4))
def test_no_part_breaks_the_cap_and_there_are_as_many_as_others_need(lengths: list[int], cap: int, others: int) -> None:
    if len(lengths) < others:
        return
    parts = partition_under_cap(lengths, cap, at_least=others)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in part) <= cap for part in parts)
    assert len(parts) >= max(others, -(-sum(lengths) // cap))


def test_consecutive_rows_stay_together_under_a_cap() -> None:
    parts = partition_under_cap([5, 5, 1, 1, 9, 9], 20, group_size=2)
    assert sorted(parts) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("lengths", "options", "complaint"),
    [
        ([9, 30], {}, r"2 groups of 1 rows do not fit under 20 tokens .* the longest group has 30"),
        ([9, 9], {"at_least": 3}, "in 3 parts or more"),
        ([9, 9, 9], {"group_size": 2}, "3 rows cannot stay together in groups of 2"),
    ],
)
def test_a_cap_that_cannot_be_kept_is_refused(lengths: list[int], options: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        partition_under_cap(lengths, 20, **options)


def test_both_terms_of_the_workload_weigh_the_same_at_six_hidden_sizes() -> None:
    assert workload(6 * 4096) == 2 * (6 * 4096) ** 2
    assert workload(0) == 0
