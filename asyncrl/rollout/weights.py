"""Weights of a snapshot into an engine's own model: all names are matched before the first number is changed.

A snapshot names tensors as Hugging Face does. It has all weights, of which tied parameters may come under any of their names, or
under all of them with equal values, and persistent buffers are taken when given and not asked for; or it has adapters alone
(`algorithms/low_rank.py`, alpha / rank in B), which are merged into the weights of the last whole snapshot.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from asyncrl.algorithms.low_rank import adapted_weights, is_adapter, merged
from asyncrl.errors import EngineError
from asyncrl.wording import names_shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(the engine's tensor, the snapshot's tensor)."""


class EngineWeights:
    """The weights of an engine's model. It keeps a copy of those that adapters have been merged into: nothing is merged twice."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = model
        self._base: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a snapshot. Raises EngineError, with nothing changed, when its names or shapes do not match the model's."""
        if tensors and all(map(is_adapter, tensors)):
            self._merge(tensors)
            return
        pairs = match_tensors(self._model, tensors)
        self._base.clear()
        for target, tensor in pairs:
            target.copy_(tensor)

    def _merge(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Layers that had an adapter and have none any more are what they were without it."""
        targets = self._model.state_dict(keep_vars=True)
        adapters = match_adapters(targets, tensors)
        for name in adapters:
            self._base.setdefault(name, targets[name].detach().clone())
        for name, base in self._base.items():
            halves = adapters.get(name)
            targets[name].copy_(base if halves is None else merged(base, *halves))


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
        _check_shape(name, targets[name].shape, tensor)
        first_name, first = given.setdefault(id(targets[name]), (name, tensor))
        if not _is_same(first, tensor):
            raise EngineError(f"snapshot gives different values for the tied parameters {first_name!r} and {name!r}")
    missing = sorted(name for name, parameter in model.named_parameters() if id(parameter) not in given)
    if missing:
        raise EngineError(f"snapshot lacks parameters of the engine's model: {names_shown(missing, limit=3)}")
    return [(targets[name], tensor) for name, tensor in given.values()]


def match_adapters(
    targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Weight of the model -> (A, B). Changes nothing.

    Raises EngineError for adapters of weights that the model lacks, halves without the other, and other shapes.
    """
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, halves in adapted_weights(tensors).items():
        if name not in targets or targets[name].ndim != 2:
            raise EngineError(f"snapshot has an adapter of {name!r}, which is no matrix of the engine's model")
        if missing := [half for half in halves if half not in tensors]:
            raise EngineError(f"snapshot has half an adapter: it lacks {missing[0]!r}")
        a_RI, b_OR = (tensors[half] for half in halves)
        rows, columns = targets[name].shape
        _check_shape(halves[0], torch.Size([len(a_RI), columns]), a_RI)
        _check_shape(halves[1], torch.Size([rows, len(a_RI)]), b_OR)
        found[name] = (a_RI, b_OR)
    return found


def _check_shape(name: str, wanted: torch.Size, tensor: torch.Tensor) -> None:
    if wanted != tensor.shape:
        raise EngineError(f"snapshot tensor {name!r} has shape {list(tensor.shape)}, the engine's model {list(wanted)}")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, where NaN equals NaN: a diverged model is the reader's business, not a broken tie."""
    return one is other or (one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
