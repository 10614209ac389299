"""Masked statistics against Python's own, and what must not reach them."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten

Entries = list[tuple[float, bool]]
entries = st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=1, max_size=30)


def _tensors(rows: Entries) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    values = torch.tensor([value if inside else math.nan for value, inside in rows], dtype=torch.float64)
    return values, torch.tensor([inside for _, inside in rows]), [value for value, inside in rows if inside]


@given(entries)
def test_sum_mean_and_variance_are_those_of_the_values_inside(rows: Entries) -> None:
    values, mask, inside = _tensors(rows)
    assert math.isclose(float(masked_sum(values, mask)), math.fsum(inside), abs_tol=1e-9)
    assert math.isclose(float(masked_mean(values, mask)), statistics.fmean(inside) if inside else 0.0, abs_tol=1e-9)
    expected = statistics.variance(inside) if len(inside) > 1 else 0.0
    assert math.isclose(float(masked_var(values, mask)), expected, rel_tol=1e-9, abs_tol=1e-9)
    expected = statistics.pvariance(inside) if inside else 0.0
    assert math.isclose(float(masked_var(values, mask, unbiased=False)), expected, rel_tol=1e-9, abs_tol=1e-9)


@given(entries)
def test_whitened_values_are_the_distance_to_the_mean_in_stds(rows: Entries) -> None:
    values, mask, inside = _tensors(rows)
    got = masked_whiten(values, mask)
    assert not got[~mask].any()
    for value, whitened in zip(inside, got[mask].tolist(), strict=True):
        spread = max(inside) != min(inside)
        expected = (value - statistics.fmean(inside)) / math.sqrt(statistics.variance(inside) + 1e-8) if spread else 0.0
        assert math.isclose(whitened, expected, rel_tol=1e-6, abs_tol=1e-9)


def test_over_a_dimension() -> None:
    values = torch.tensor([[1.0, 2.0, 9.0], [4.0, math.nan, math.inf]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_sum(values, mask, 1).tolist() == [3.0, 4.0]
    assert masked_mean(values, mask, 1).tolist() == [1.5, 4.0]
    assert masked_mean(values, mask, 0).tolist() == [2.5, 2.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.97, 0.1, -1 / 3, 1e6])
def test_constant_values_whiten_to_exactly_zero(value: float, dtype: torch.dtype) -> None:
    mask = torch.rand(12, 17, generator=torch.Generator().manual_seed(1)) > 0.3
    values = torch.full((12, 17), value, dtype=dtype)
    assert not masked_whiten(values, mask).any()
    torch.testing.assert_close(masked_whiten(values, mask, shift_mean=False)[mask], values[mask])


def test_one_value_and_none_are_no_errors() -> None:
    values, nothing = torch.tensor([5.0, 7.0]), torch.tensor([False, False])
    assert masked_whiten(values, torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert masked_whiten(values, nothing).tolist() == [0.0, 0.0]
    assert [float(masked_mean(values, nothing)), float(masked_var(values, nothing))] == [0.0, 0.0]
    assert masked_whiten(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    values, mask = torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=torch.bool)
    results = [masked_sum(values, mask), masked_mean(values, mask), masked_var(values, mask), masked_whiten(values, mask)]
    assert {result.dtype for result in results} == {dtype}


def test_a_float32_variance_far_from_zero_keeps_its_digits() -> None:
    values = torch.tensor([10000.0, 10000.5, 10001.0])
    assert math.isclose(float(masked_var(values, torch.ones(3, dtype=torch.bool))), 0.25, rel_tol=1e-6)
