"""All policy losses by the name that the config uses.

A loss of your own is a function `(inputs: LossInputs, *, option: float = default, ...) -> PolicyLoss`, wrapped by
`LossSpec(function=...)`; its keyword-only parameters are the keys that have an effect.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from asyncrl.algorithms.aggregation import AggregationMode
from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss
from asyncrl.algorithms.losses.vanilla import vanilla


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """A policy loss and what its caller must know of it."""

    function: Callable[..., PolicyLoss]
    """`function(inputs, *, <options>)`."""
    aggregation: AggregationMode | None = None
    """The only aggregation with which the loss is what it says; None: any."""
    select: Callable[..., torch.Tensor] | None = None
    """`select(log_prob_n, old_log_prob_n, advantages_n, *, generator, <options>) -> selected_n`, bool, over the policy tokens of
    the whole mini-batch; the answer goes into `LossInputs.selected_n` of its micro-batches. None: the loss reads no selection."""
    is_sequence_level: bool = False
    """All tokens of a sequence must be in the same micro-batch."""

    @property
    def options(self) -> dict[str, float]:
        """Names and defaults of the options that have an effect, those of `select` included."""
        return _options(self.function) | ({} if self.select is None else _options(self.select))

    def policy_loss(self, inputs: LossInputs, options: Mapping[str, float]) -> PolicyLoss:
        """The loss of a micro-batch. options: any superset of what the function reads; missing ones have their defaults."""
        return self.function(inputs, **_chosen(self.function, options))

    def selected(
        self,
        log_prob_n: torch.Tensor,
        old_log_prob_n: torch.Tensor,
        advantages_n: torch.Tensor,
        options: Mapping[str, float],
        generator: torch.Generator,
    ) -> torch.Tensor | None:
        """bool [n], without gradient: the tokens picked among all policy tokens of the mini-batch; None without a `select`."""
        if self.select is None:
            return None
        with torch.no_grad():
            chosen = _chosen(self.select, options)
            return self.select(log_prob_n, old_log_prob_n, advantages_n, generator=generator, **chosen)


def _options(function: Callable[..., object]) -> dict[str, float]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "generator"}


def _chosen(function: Callable[..., object], options: Mapping[str, float]) -> dict[str, float]:
    return {name: options[name] for name in _options(function) if name in options}


POLICY_LOSSES: Mapping[str, LossSpec] = MappingProxyType({"vanilla": LossSpec(function=vanilla)})
