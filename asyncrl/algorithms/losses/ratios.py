"""The ratio of the new policy to the old one, token by token or for a whole sequence, kept where float32 can hold it."""

import torch

from asyncrl.algorithms.losses.inputs import LossInputs

LOG_RATIO_BOUND = 20.0
"""|log ratio| at most: e^20 is far outside every clip, and larger exponents overflow float32."""


def bounded_log_ratio(inputs: LossInputs) -> torch.Tensor:
    """log_prob - old_log_prob within +-LOG_RATIO_BOUND, [n], with gradient (0 where the bound holds it)."""
    return (inputs.log_prob_n - inputs.old_log_prob_n).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_mean(x_n: torch.Tensor, rows_n: torch.Tensor) -> torch.Tensor:
    """The mean of x over the tokens of each token's sequence, [n], dtype of x, with gradient; summed in float64.

    A sequence can have 10,000 tokens and a clip of 0.0003: a running float32 sum is not fine enough.
    """
    num_rows = int(rows_n.max()) + 1 if rows_n.numel() else 0
    wide_n = x_n.double()
    sums = wide_n.new_zeros(num_rows).index_add(0, rows_n, wide_n)
    counts = wide_n.new_zeros(num_rows).index_add(0, rows_n, torch.ones_like(wide_n))
    return (sums / counts.clamp(min=1))[rows_n].to(x_n.dtype)
