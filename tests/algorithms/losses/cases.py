"""Mini-batches in float64 and the loss over them, as the actor computes it: in parts, weighed by counts of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

import torch

from asyncrl.algorithms.aggregation import AggregationMode, token_weights
from asyncrl.algorithms.losses import POLICY_LOSSES, LossInputs

MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)
OPTIONS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "vanilla": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.6},
        "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.07},
        "sapo": {"tau_pos": 1.3, "tau_neg": 1.7},
        "gpg": {},
        "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "clip_cov_ub": 9.0},
        "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
        "geo_mean": {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4},
        "cispo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
        "dppo_tv": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 1.6},
        "dppo_kl": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.6},
        "dro": {"dro_beta": 0.5},
        "reinforce": {},
    }
)
"""Values at which every branch is taken by some token of `batch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A mini-batch. All floats are float64; what lies outside the mask is deliberately not 0."""

    log_prob_BR: torch.Tensor
    old_log_prob_BR: torch.Tensor
    advantages_BR: torch.Tensor
    weights_BR: torch.Tensor
    mask_BR: torch.Tensor
    sequences_B: torch.Tensor


def batch(seed: int, rows: int = 6, width: int = 9, *, sessions: int | None = None) -> Batch:
    """Random rows with gaps and one empty row; sessions: rows belong to so many of them, out of order."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old_log_prob_BR = -0.2 - normal().abs()
    mask_BR = torch.rand(rows, width, generator=generator) < 0.7
    mask_BR[rows // 2] = False
    sequences_B = torch.arange(rows) if sessions is None else torch.randint(sessions, (rows,), generator=generator)
    return Batch(
        log_prob_BR=(old_log_prob_BR + 0.4 * normal()).clamp(max=-0.01),
        old_log_prob_BR=old_log_prob_BR,
        advantages_BR=normal(),
        weights_BR=normal().exp(),
        mask_BR=mask_BR,
        sequences_B=sequences_B,
    )


def loss_and_gradient(
    name: str, whole: Batch, mode: AggregationMode, parts: Sequence[torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, d loss / d log_prob_BR), summed over micro-batches of the given rows. None: one micro-batch."""
    spec, mask_BR = POLICY_LOSSES[name], whole.mask_BR
    log_prob_BR = whole.log_prob_BR.clone().requires_grad_()
    weights_BR = token_weights(mask_BR, spec.aggregation or mode, sequences_B=whole.sequences_B, scale=16.0, dtype=torch.float64)
    selected_BR = selection(name, whole)
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts or [torch.arange(len(mask_BR))]:
        inputs = inputs_of(
            Batch(
                log_prob_BR=log_prob_BR[rows],
                old_log_prob_BR=whole.old_log_prob_BR[rows],
                advantages_BR=whole.advantages_BR[rows],
                weights_BR=whole.weights_BR[rows],
                mask_BR=mask_BR[rows],
                sequences_B=whole.sequences_B[rows],
            ),
            None if selected_BR is None else selected_BR[rows],
        )
        total = total + (spec.policy_loss(inputs, OPTIONS[name]).loss_n * weights_BR[rows][mask_BR[rows]]).sum()
    (gradient_BR,) = torch.autograd.grad(total, log_prob_BR)
    return total.detach(), gradient_BR


def selection(name: str, whole: Batch) -> torch.Tensor | None:
    """bool [B, R]: what the loss selects over the mini-batch; None for a loss that does not."""
    mask_BR = whole.mask_BR
    log_prob_n, old_n, advantages_n = (x[mask_BR] for x in (whole.log_prob_BR, whole.old_log_prob_BR, whole.advantages_BR))
    generator = torch.Generator().manual_seed(7)
    chosen_n = POLICY_LOSSES[name].selected(log_prob_n, old_n, advantages_n, OPTIONS[name], generator)
    return None if chosen_n is None else torch.zeros_like(mask_BR).masked_scatter(mask_BR, chosen_n)


def inputs_of(part: Batch, selected_BR: torch.Tensor | None = None) -> LossInputs:
    """The policy tokens of a batch."""
    mask_BR = part.mask_BR
    return LossInputs(
        log_prob_n=part.log_prob_BR[mask_BR],
        old_log_prob_n=part.old_log_prob_BR[mask_BR],
        advantages_n=part.advantages_BR[mask_BR],
        rows_n=part.sequences_B[mask_BR.nonzero()[:, 0]],
        is_weights_n=part.weights_BR[mask_BR],
        selected_n=None if selected_BR is None else selected_BR[mask_BR],
    )
