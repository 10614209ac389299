"""Adapters of low rank (LoRA, arXiv 2106.09685): a linear layer computes W x + s B A x, where W is frozen and A, B are trained.

Names are those of peft's files: beside `x.weight` stand `x.lora_A.weight` [R, I] and `x.lora_B.weight` [O, R]; s is alpha / R.
Legend: I inputs, O outputs, R rank.
"""

from collections.abc import Iterable, Mapping

import torch

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def adapted_weights(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Weight -> its (A, B), for every adapter of which at least one half is among the names; in their order."""
    stems = dict.fromkeys(name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) for name in names if is_adapter(name))
    return {f"{stem}.weight": (stem + A_SUFFIX, stem + B_SUFFIX) for stem in stems}


def merged(weight_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor) -> torch.Tensor:
    """W + B A in the type of W, computed in float32 or wider. b_OR: with s in it."""
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    return torch.addmm(weight_OI.to(wide), b_OR.to(wide), a_RI.to(wide)).to(weight_OI.dtype)


def merge_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights without adapters that compute the same. tensors: weights, and adapters with s in B."""
    adapters = adapted_weights(tensors)
    return {
        name: merged(tensor, *(tensors[half] for half in adapters[name])) if name in adapters else tensor
        for name, tensor in tensors.items()
        if not is_adapter(name)
    }
