"""Weights of a snapshot into an engine's own model: all names are matched before the first number is changed.

A snapshot names tensors as Hugging Face does. Tied parameters may come under any of their names, or under all of them with equal
values. Persistent buffers are taken when given; they are not asked for.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from asyncrl.errors import EngineError
from asyncrl.wording import names_shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(the engine's tensor, the snapshot's tensor)."""


def match_tensors(model: "PreTrainedModel", tensors: Mapping[str, torch.Tensor]) -> Pairs:
    """Pair every parameter of the model with its tensor of the snapshot. Changes nothing.

    Raises EngineError for unexpected and missing names, other shapes, and tied names with different values.
    """
    targets = model.state_dict(keep_vars=True)
    unexpected = sorted(tensors.keys() - targets.keys())
    if unexpected:
        raise EngineError(f"snapshot has tensors that the engine's model lacks: {names_shown(unexpected, limit=3)}")
    given: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        _check_shape(name, targets[name], tensor)
        first_name, first = given.setdefault(id(targets[name]), (name, tensor))
        if not _is_same(first, tensor):
            raise EngineError(f"snapshot gives different values for the tied parameters {first_name!r} and {name!r}")
    missing = sorted(name for name, parameter in model.named_parameters() if id(parameter) not in given)
    if missing:
        raise EngineError(f"snapshot lacks parameters of the engine's model: {names_shown(missing, limit=3)}")
    return [(targets[name], tensor) for name, tensor in given.values()]


def _check_shape(name: str, target: torch.Tensor, tensor: torch.Tensor) -> None:
    if target.shape != tensor.shape:
        raise EngineError(f"snapshot tensor {name!r} has shape {list(tensor.shape)}, the engine's model {list(target.shape)}")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, where NaN equals NaN: a diverged model is the reader's business, not a broken tie."""
    return one is other or (one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))


@torch.inference_mode()
def copy_tensors(pairs: Pairs) -> None:
    """Copy the snapshot's numbers over the engine's; tied parameters once."""
    for target, tensor in pairs:
        target.copy_(tensor)
