"""Norms of float64 models in float64. The library computes them in float32 whatever the weights are: by far the largest error of a
model that is there to compare."""

from functools import partial
from typing import Any

import torch
from torch import nn


def use_wide_norms(model: nn.Module) -> None:
    """Let the root-mean-square norms of a float64 model compute in its own type, in place. Those that do not give what `rms_norm`
    does, within float32's rounding, stay as they are."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module.forward = partial(rms_norm, module)


def rms_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """hidden / sqrt(mean of its squares + epsilon), times the weight. Source: arXiv 1910.07467."""
    weight: torch.Tensor = module.weight
    return weight * (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon))


@torch.no_grad()
def _is_plain(module: Any) -> bool:
    if not hasattr(module, "variance_epsilon") or module.weight.dtype != torch.float64:
        return False
    probe = torch.linspace(-2, 3, len(module.weight), dtype=torch.float64, device=module.weight.device)[None]
    return torch.allclose(module(probe), rms_norm(module, probe), rtol=1e-5, atol=1e-6)
