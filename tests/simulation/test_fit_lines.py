"""Straight lines that nothing pulls below zero, and distributions of what was measured."""

import random
from collections.abc import Sequence
from statistics import mean

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncrl.config.distribution import Distribution
from asyncrl.rollout.work_sums import WorkSums
from asyncrl.simulation.fit.lines import Line, line_of_points, line_of_sums
from asyncrl.simulation.fit.values import MOST_VALUES, distribution_of, likeness, thinned

Points = list[tuple[int, float]]


def sums_of(points: Sequence[tuple[int, float]]) -> Line:
    sums = WorkSums()
    for size, seconds in points:
        sums.add(size, seconds)
    told = sums.stats("k", "n", "x")
    return line_of_sums(told["k_n"], told["k_x"], told["k_x_sq"], told["k_s"], told["k_x_s"])


def squares(points: Points, base_s: float, slope_s: float) -> float:
    return sum((seconds - base_s - slope_s * size) ** 2 for size, seconds in points)


points = st.lists(st.tuples(st.integers(1, 64), st.floats(0, 10)), min_size=2, max_size=20)


@given(points, st.floats(0, 5), st.floats(0, 1))
def test_no_line_above_zero_is_nearer(points: Points, base_s: float, slope_s: float) -> None:
    assume(max(size for size, _ in points) > 1.2 * min(size for size, _ in points))
    line = sums_of(points)
    assert line.base_s >= 0
    assert line.slope_s >= 0
    assert squares(points, line.base_s, line.slope_s) <= squares(points, base_s, slope_s) * (1 + 1e-6) + 1e-6


@given(st.floats(0, 5), st.floats(0, 1))
def test_an_exact_line_is_found(base_s: float, slope_s: float) -> None:
    line = sums_of([(size, base_s + slope_s * size) for size in (1, 2, 5, 17)])
    assert (line.base_s, line.slope_s) == pytest.approx((base_s, slope_s), abs=1e-9)


@pytest.mark.parametrize(
    ("points", "wanted"),
    [
        ([(8, 0.5), (8, 0.7)], (0.6, 0.0, False)),
        ([(1, 1.0), (3, 0.5)], (0.75, 0.0, True)),
        ([(1, 0.1), (4, 2.0)], (0.0, 8.1 / 17, True)),
        ([], (0.0, 0.0, False)),
    ],
    ids=["sizes that are alike", "a slope below zero", "a base below zero", "nothing"],
)
def test_what_cannot_be_told_apart_is_the_bases(points: Points, wanted: tuple[float, float, bool]) -> None:
    line = sums_of(points)
    assert (line.base_s, line.slope_s, line.is_certain) == pytest.approx(wanted)


def test_noise_that_hides_the_slope_makes_time_proportional() -> None:
    rng = random.Random(0)
    sizes = [1000.0 + 5 * place for place in range(20)]
    noisy = line_of_points(sizes, [1.0 + 0.0002 * size + rng.uniform(-0.3, 0.3) for size in sizes])
    assert (noisy.base_s, noisy.is_certain) == (0.0, False)
    assert noisy.at(mean(sizes)) == pytest.approx(1.2, rel=0.1)
    clear = line_of_points([100.0, 1000.0, 3000.0], [1.02, 1.2, 1.6])
    assert clear.base_s == pytest.approx(1.0, rel=0.01)
    assert clear.slope_s == pytest.approx(0.0002, rel=0.01)


def test_numbers_that_are_alike_are_one() -> None:
    assert distribution_of([0.2, 0.2005, 0.201]) == Distribution(value=0.2005)
    assert distribution_of([0.0, 0.0]) == Distribution(value=0.0)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=500))
def test_thinning_keeps_order_ends_and_mean(values: list[float]) -> None:
    ordered = sorted(values)
    found = thinned(ordered)
    assert len(found) == min(len(values), MOST_VALUES)
    assert found == sorted(found)
    assert ordered[0] - 1e-6 <= found[0]
    assert found[-1] <= ordered[-1] + 1e-6
    if len(values) % len(found) == 0:
        assert mean(found) == pytest.approx(mean(values), abs=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_likeness_is_the_square_of_the_share_that_a_group_has_in_common(share: float) -> None:
    rng = random.Random(1)
    groups = []
    for _ in range(600):
        common = rng.randint(1, 5)
        groups.append([float(common if rng.random() < share else rng.randint(1, 5)) for _ in range(6)])
    assert likeness(groups) == pytest.approx(share**2, abs=0.05)


def test_likeness_of_what_says_nothing() -> None:
    assert likeness([[2.0, 2.0], [2.0]]) is None
    assert likeness([[1.0], [2.0]]) is None
