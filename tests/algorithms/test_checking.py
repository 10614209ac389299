"""Comparison of numbers: what passes, what is said of the worst place."""

import math

import pytest
import torch

from asyncrl.algorithms.checking import Numbers, compare, compare_exact, compare_metrics


@pytest.mark.parametrize(
    ("got", "want", "passes"),
    [
        (1.0 + 1.0e-5, 1.0, True),
        (1.0 + 1.2e-5, 1.0, False),
        (0.9e-6, 0.0, True),
        (1.1e-6, 0.0, False),
        ([1.0, math.nan], [1.0, 2.0], False),
        ([1.0, math.inf], [1.0, 2.0], False),
        (torch.zeros(2, 3), [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], True),
        (torch.zeros(2, 3), [0.0, 0.0, 0.0], False),
        (torch.zeros(0), [], True),
    ],
)
def test_numbers_pass_within_their_tolerance(got: Numbers, want: Numbers, passes: bool) -> None:
    compared = compare(got, want)
    assert compared.passed is passes
    assert (compared.worst <= 1) is passes


def test_the_worst_place_is_named() -> None:
    compared = compare([[1.0, 2.0], [3.0, 4.5]], [[1.0, 2.1], [3.0, 4.0]], rtol=0, atol=0.05, name="weights")
    assert compared.worst == pytest.approx(10)
    assert compared.what == "weights[1, 1]: 4.5, expected 4, off by 0.5 where 0.05 is allowed"


def test_what_is_no_number_is_infinitely_wrong() -> None:
    assert compare(math.nan, 1.0).worst == compare([1.0], [[1.0]]).worst == compare_exact(1, 2).worst == math.inf


def test_places_outside_the_mask_are_not_read() -> None:
    mask = torch.tensor([True, False])
    assert compare([1.0, math.nan], [1.0, 5.0], mask=mask).passed
    assert not compare([math.nan, 1.0], [1.0, 1.0], mask=mask).passed


def test_python_numbers_are_compared_as_float64() -> None:
    assert not compare(0.1 + 1e-10, 0.1, rtol=1e-12, atol=0).passed


def test_a_deviation_has_its_own_tolerance_and_ours_may_have_more() -> None:
    got = {"a_std": 1.0005, "a_mean": 1.0005, "b": 3.0}
    assert [compared.passed for compared in compare_metrics(got, {"a_std": 1.0, "a_mean": 1.0, "c": 0.0})] == [True, False, False]
