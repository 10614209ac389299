"""Sums, means, variances and whitening over the policy tokens. What lies outside a mask has no effect, not even a NaN.

Every count is the number of True entries, so padding changes nothing. float32 in gives float32 out, with the sums taken in float64;
float64 stays float64. Shapes: `values` and `mask` have one shape, mostly [B, R] (B rows, R response tokens).
"""

from collections.abc import Iterator

import torch

from asyncrl.algorithms.blocks import BLOCK

WHITEN_EPSILON = 1e-8
"""Under the root of the whitening, as verl has it."""


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of the values where the bool mask is True, over `dim` or over all: the dtype of `values`; 0 where nothing is True."""
    return _sum(values, mask, dim).to(values.dtype)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of the values where the bool mask is True, over `dim` or over all: the dtype of `values`; 0 where nothing is True."""
    count = mask.count_nonzero() if dim is None else mask.sum(dim)
    return (_sum(values, mask, dim) / count.clamp(min=1)).to(values.dtype)


def masked_var(values: torch.Tensor, mask: torch.Tensor, *, unbiased: bool = True) -> torch.Tensor:
    """Variance of the values where the bool mask is True: a number, with n - 1 below when `unbiased`, else n.

    Where we differ from verl 0.9.1: without two values there is nothing to vary, and the result is 0; verl raises.
    """
    mean = _sum(values, mask, None) / mask.count_nonzero().clamp(min=1)
    return _variance(values, mask, mean, unbiased=unbiased).to(values.dtype)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """(values - mean) / sqrt(variance + 1e-8) over the mask, with n - 1 in the variance; 0 outside the mask.

    values: float, any shape; mask: bool, the same shape. Without `shift_mean` the mean is added back after the scaling.

    Where we differ from verl 0.9.1:
    1. Values that are all the same number give exactly 0 (without `shift_mean`, the mean): max == min decides. The mean of such
       values can miss them in the last bit, and 1 / sqrt(1e-8) makes 10,000 times that of it.
    2. One value or none is no error.
    """
    mean, is_constant = _mean_and_is_constant(values, mask)
    variance = _variance(values, mask, mean)
    scale = torch.where(is_constant, 0.0, (variance + WHITEN_EPSILON).rsqrt()).to(values.dtype)
    centre = mean.to(values.dtype)
    whitened = torch.empty(values.numel(), dtype=values.dtype, device=values.device)
    for piece, inner, inside in _pieces(values, mask):
        scaled = (inner - centre) * scale
        whitened[piece] = torch.where(inside, scaled if shift_mean else scaled + centre, 0.0)
    return whitened.view(values.shape)


def _pieces(values: torch.Tensor, mask: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(place, values, mask) through the flat tensors: see blocks.py. One empty piece of empty ones."""
    values, mask = values.reshape(-1), mask.reshape(-1)
    size = BLOCK if values.device.type == "cpu" else max(len(values), 1)
    for start in range(0, max(len(values), 1), size):
        piece = slice(start, start + size)
        yield piece, values[piece], mask[piece]


def _sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None) -> torch.Tensor:
    if dim is not None:
        return torch.where(mask, values, 0.0).sum(dim, dtype=torch.float64)
    return torch.stack([torch.where(inside, inner, 0.0).double().sum() for _, inner, inside in _pieces(values, mask)]).sum()


def _mean_and_is_constant(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64, and bool: no two values under the mask differ."""
    sums, highest, lowest = [], [], []
    for _, inner, inside in _pieces(values, mask):
        sums.append(torch.where(inside, inner, 0.0).double().sum())
        if len(inner):
            highest.append(torch.where(inside, inner, -torch.inf).amax())
            lowest.append(torch.where(inside, inner, torch.inf).amin())
    mean = torch.stack(sums).sum() / mask.count_nonzero().clamp(min=1)
    if not highest:
        return mean, torch.ones_like(mean, dtype=torch.bool)
    return mean, torch.stack(highest).amax() <= torch.stack(lowest).amin()


def _variance(values: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, *, unbiased: bool = True) -> torch.Tensor:
    """float64, from the distances to the mean."""
    squares = [torch.where(inside, inner.double() - mean, 0.0).square().sum() for _, inner, inside in _pieces(values, mask)]
    return torch.stack(squares).sum() / (mask.count_nonzero() - int(unbiased)).clamp(min=1)
