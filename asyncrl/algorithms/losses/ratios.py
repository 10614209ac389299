"""The ratio of the new policy to the old one, token by token, kept where float32 can hold it."""

import torch

from asyncrl.algorithms.losses.inputs import LossInputs

LOG_RATIO_BOUND = 20.0
"""|log ratio| at most: e^20 is far outside every clip, and larger exponents overflow float32."""


def bounded_log_ratio(inputs: LossInputs) -> torch.Tensor:
    """log_prob - old_log_prob within +-LOG_RATIO_BOUND, [n], with gradient (0 where the bound holds it)."""
    return (inputs.log_prob_n - inputs.old_log_prob_n).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
