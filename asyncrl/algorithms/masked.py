"""Sums, means, variances and whitening over the policy tokens. What lies outside a mask has no effect, not even a NaN.

Every count is the number of True entries, so padding changes nothing. float32 in gives float32 out, with the sums taken in float64;
float64 stays float64. Shapes: `values` and `mask` have one shape, mostly [B, R] (B rows, R response tokens).
"""

import torch

WHITEN_EPSILON = 1e-8
"""Under the root of the whitening, as verl has it."""


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of the values where the bool mask is True, over `dim` or over all: the dtype of `values`; 0 where nothing is True."""
    return _sum(torch.where(mask, values, 0.0), dim).to(values.dtype)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of the values where the bool mask is True, over `dim` or over all: the dtype of `values`; 0 where nothing is True."""
    total = _sum(torch.where(mask, values, 0.0), dim)
    return (total / _count(mask, dim).clamp(min=1)).to(values.dtype)


def masked_var(values: torch.Tensor, mask: torch.Tensor, *, unbiased: bool = True) -> torch.Tensor:
    """Variance of the values where the bool mask is True: a number, with n - 1 below when `unbiased`, else n.

    Where we differ from verl 0.9.1: without two values there is nothing to vary, and the result is 0; verl raises.
    """
    return _mean_and_var(values, mask, unbiased=unbiased)[1].to(values.dtype)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """(values - mean) / sqrt(variance + 1e-8) over the mask, with n - 1 in the variance; 0 outside the mask.

    values: float, any shape; mask: bool, the same shape. Without `shift_mean` the mean is added back after the scaling.

    Where we differ from verl 0.9.1:
    1. Values that are all the same number give exactly 0 (without `shift_mean`, the mean): max == min decides. The mean of such
       values can miss them in the last bit, and 1 / sqrt(1e-8) makes 10,000 times that of it.
    2. One value or none is no error.
    """
    mean, variance = _mean_and_var(values, mask)
    scale = torch.where(_is_constant(values, mask), 0.0, (variance + WHITEN_EPSILON).rsqrt())
    whitened = (values - mean.to(values.dtype)) * scale.to(values.dtype)
    if not shift_mean:
        whitened = whitened + mean.to(values.dtype)
    return torch.where(mask, whitened, 0.0)


def _sum(values: torch.Tensor, dim: int | None) -> torch.Tensor:
    # dtype= casts inside the reduction: no float64 copy of a large tensor
    return values.sum(dtype=torch.float64) if dim is None else values.sum(dim, dtype=torch.float64)


def _count(mask: torch.Tensor, dim: int | None) -> torch.Tensor:
    return mask.sum() if dim is None else mask.sum(dim)


def _mean_and_var(values: torch.Tensor, mask: torch.Tensor, *, unbiased: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Both float64. The squares are those of the distances to the mean, and the rounding of that mean is taken out again."""
    count = mask.sum()
    mean = _sum(torch.where(mask, values, 0.0), None) / count.clamp(min=1)
    distance = torch.where(mask, values - mean.to(values.dtype), 0.0)
    squares = _sum(distance.square(), None) - _sum(distance, None).square() / count.clamp(min=1)
    return mean, squares.clamp(min=0) / (count - int(unbiased)).clamp(min=1)


def _is_constant(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """bool: no two values under the mask differ."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.where(mask, values, -torch.inf).amax() <= torch.where(mask, values, torch.inf).amin()
