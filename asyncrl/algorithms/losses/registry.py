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
from asyncrl.algorithms.losses.covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from asyncrl.algorithms.losses.divergence import dppo_kl, dppo_tv
from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss
from asyncrl.algorithms.losses.policy_gradient import cispo, dro, gpg, reinforce
from asyncrl.algorithms.losses.sequence_ratio import geo_mean, gspo
from asyncrl.algorithms.losses.soft_gate import sapo
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
    def options(self) -> frozenset[str]:
        """Names of the options that have an effect, those of `select` included."""
        return _options(self.function) | (frozenset() if self.select is None else _options(self.select))

    @property
    def required(self) -> frozenset[str]:
        """Names of the options without a default."""
        parameters = inspect.signature(self.function).parameters.values()
        return frozenset(each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty)

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


def _options(function: Callable[..., object]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "generator")


def _chosen(function: Callable[..., object], options: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in options.items() if name in _options(function)}


POLICY_LOSSES: Mapping[str, LossSpec] = MappingProxyType(
    {
        "vanilla": LossSpec(function=vanilla),
        "gspo": LossSpec(function=gspo, is_sequence_level=True),
        "sapo": LossSpec(function=sapo, aggregation="seq-mean-token-mean"),
        "gpg": LossSpec(function=gpg),
        "clip_cov": LossSpec(function=clip_cov, select=select_clip_cov),
        "kl_cov": LossSpec(function=kl_cov, select=select_kl_cov),
        "geo_mean": LossSpec(function=geo_mean, aggregation="seq-mean-token-mean", is_sequence_level=True),
        "cispo": LossSpec(function=cispo),
        "dppo_tv": LossSpec(function=dppo_tv),
        "dppo_kl": LossSpec(function=dppo_kl),
        "dro": LossSpec(function=dro),
        "reinforce": LossSpec(function=reinforce),
    }
)
