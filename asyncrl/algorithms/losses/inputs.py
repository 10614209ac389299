"""What a policy loss is given and what it answers: flat policy tokens, without padding. Legend: n policy tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The policy tokens of a micro-batch, in any order; every tensor is [n] (n may be 0).

    A sequence-level loss needs all accepted tokens of a sequence in one micro-batch; every other loss takes any split.
    """

    log_prob_n: torch.Tensor
    """float, with gradient: natural log-probs of the sampled tokens under the policy that is trained."""
    old_log_prob_n: torch.Tensor
    """float: the same under the policy at the start of the update (bypass: under the rollout)."""
    advantages_n: torch.Tensor
    """float."""
    rows_n: torch.Tensor
    """int64: number of the sequence of each token, 0 .. number of sequences - 1; numbers may be missing."""
    is_weights_n: torch.Tensor | None = None
    """float, without gradient: rollout importance weights that multiply the loss. None: 1."""
    selected_n: torch.Tensor | None = None
    """bool: the tokens that the loss's `select` picked over the whole mini-batch. None: the loss has no `select`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """loss_n: float, with gradient, times the importance weights; `aggregation` turns it into one number.

    facts: float [n] without gradient; the mean over all policy tokens is the metric `actor/<name>`.
    """

    loss_n: torch.Tensor
    facts: Mapping[str, torch.Tensor] = field(default_factory=dict)


def weighted(loss_n: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """loss_n times the importance weights, when there are any."""
    return loss_n if inputs.is_weights_n is None else loss_n * inputs.is_weights_n
