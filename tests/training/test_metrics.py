"""Numbers with a declared reduction: parts merged are the whole, however the values are spread."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.training.metrics import Metrics, merged

VALUES = st.lists(st.floats(-1e3, 1e3), max_size=30)
CUTS = st.lists(st.integers(0, 30), max_size=4)
"""Where the values are cut: parts may be empty, as of a rank without rows."""


def told(values: list[float]) -> Metrics:
    metrics, tensor = Metrics(), torch.tensor(values, dtype=torch.float64)
    metrics.add_sum("sum", tensor.sum())
    metrics.add_mean("mean", tensor)
    for value in values:
        metrics.add_weighted_mean("weighted mean", value, value + 1001)
    metrics.add_max("max", tensor)
    metrics.add_std("std", tensor)
    return metrics


@given(VALUES, CUTS)
def test_parts_merged_are_the_whole(values: list[float], cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(values)]
    parts = [told(values[first:last]) for first, last in itertools.pairwise(edges)]
    found = merged(parts).numbers()
    assert found == pytest.approx(told(values).numbers(), rel=1e-9, abs=1e-8)
    if values:
        tensor = torch.tensor(values, dtype=torch.float64)
        weights = tensor + 1001
        assert found == pytest.approx(
            {
                "sum": float(tensor.sum()),
                "mean": float(tensor.mean()),
                "weighted mean": float((tensor * weights).sum() / weights.sum()),
                "max": max(values),
                "std": float(tensor.std(correction=0)),
            },
            rel=1e-9,
            abs=1e-8,
        )


def test_a_spread_far_from_zero_keeps_its_digits() -> None:
    parts = [Metrics(), Metrics()]
    for part, values in zip(parts, ([1e9, 1e9 + 2], [1e9 + 4]), strict=True):
        part.add_std("std", torch.tensor(values, dtype=torch.float64))
    assert merged(parts).numbers() == pytest.approx({"std": math.sqrt(8 / 3)}, rel=1e-9)


def test_a_mean_of_nothing_is_left_out() -> None:
    assert told([]).numbers() == {"sum": 0.0}


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
def test_a_maximum_hides_no_nan(values: list[float]) -> None:
    metrics = Metrics()
    for value in values:
        metrics.add_max("max", torch.tensor([value]))
    assert math.isnan(metrics.numbers()["max"])
    assert math.isnan(Metrics.over_steps([metrics, metrics])["max"])


def test_one_name_has_one_reduction() -> None:
    metrics = Metrics()
    metrics.add_sum("actor/loss_max", 1.0)
    with pytest.raises(ValueError, match="actor/loss_max was added as a sum and as a mean"):
        metrics.add_mean("actor/loss_max", torch.ones(1))


def test_over_steps_a_maximum_is_the_largest_and_the_rest_are_means_of_those_that_have_it() -> None:
    steps = [told([1.0, 3.0]), told([]), told([8.0])]
    found = Metrics.over_steps(steps)
    assert (found["max"], found["sum"], found["mean"]) == (8.0, 4.0, 5.0)
