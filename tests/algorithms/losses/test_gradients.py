"""Gradients of every policy loss against central finite differences in float64.

A loss without a stopped part is its own reference (autograd's gradcheck). For the others the reference is the surrogate in which
the stopped part is a constant, written out here.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from asyncrl.algorithms.aggregation import AggregationMode, token_weights
from asyncrl.algorithms.losses import POLICY_LOSSES, LossInputs
from tests.algorithms.losses.cases import MODES, OPTIONS, Batch, batch, inputs_of, loss_and_gradient, selection

Surrogate = Callable[[torch.Tensor], torch.Tensor]
STEP = 1e-6


def _inputs(name: str, whole: Batch) -> LossInputs:
    return inputs_of(whole, selection(name, whole))


def _gspo(inputs: LossInputs) -> Surrogate:
    """s = exp(x - x0 + mean(x0 - old)), x0 and the mean fixed."""
    fixed = inputs.log_prob_n.clone()
    means = torch.stack([(fixed - inputs.old_log_prob_n)[inputs.rows_n == row].mean() for row in inputs.rows_n])

    def surrogate(log_prob_n: torch.Tensor) -> torch.Tensor:
        ratio_n = (log_prob_n - fixed + means).exp()
        clipped_n = ratio_n.clamp(0.95, 1.07)
        return torch.maximum(-inputs.advantages_n * ratio_n, -inputs.advantages_n * clipped_n)

    return surrogate


def _cispo(inputs: LossInputs) -> Surrogate:
    weight_n = (inputs.log_prob_n - inputs.old_log_prob_n).exp().clamp(0.8, 1.28)
    return lambda log_prob_n: -weight_n * inputs.advantages_n * log_prob_n


def _dppo(inputs: LossInputs, low: float, high: float, divergence_n: torch.Tensor) -> Surrogate:
    """v = 0 where the divergence, signed by the direction of the move, is too large in the direction that A pushes."""
    direction_n = (inputs.log_prob_n - inputs.old_log_prob_n).sign()
    is_positive_n = inputs.advantages_n > 0
    held_n = torch.where(is_positive_n, direction_n * divergence_n > high, direction_n * divergence_n < -low)
    weight_n = (inputs.log_prob_n - inputs.old_log_prob_n).exp().clamp(max=1.6) * ~held_n
    return lambda log_prob_n: -weight_n * inputs.advantages_n * log_prob_n


def _dppo_tv(inputs: LossInputs) -> Surrogate:
    return _dppo(inputs, 0.05, 0.08, (inputs.log_prob_n.exp() - inputs.old_log_prob_n.exp()).abs())


def _dppo_kl(inputs: LossInputs) -> Surrogate:
    new, old = (torch.distributions.Bernoulli(logits=x - (-x.expm1()).log()) for x in (inputs.log_prob_n, inputs.old_log_prob_n))
    return _dppo(inputs, 0.02, 0.03, torch.distributions.kl_divergence(old, new))


STOPPED = {"gspo": _gspo, "cispo": _cispo, "dppo_tv": _dppo_tv, "dppo_kl": _dppo_kl}
EXACT = [name for name in POLICY_LOSSES if name not in STOPPED]


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("name", EXACT)
def test_gradient_of_a_loss_without_stopped_parts(name: str, seed: int) -> None:
    inputs = _inputs(name, batch(seed, sessions=4))
    log_prob_n = inputs.log_prob_n.clone().requires_grad_()

    def loss_n(log_prob_n: torch.Tensor) -> torch.Tensor:
        return POLICY_LOSSES[name].policy_loss(replace(inputs, log_prob_n=log_prob_n), OPTIONS[name]).loss_n

    assert torch.autograd.gradcheck(loss_n, log_prob_n, eps=STEP, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("name", STOPPED)
def test_gradient_of_a_loss_with_stopped_parts(name: str, seed: int) -> None:
    inputs = _inputs(name, batch(seed, sessions=4))
    surrogate = STOPPED[name](inputs)
    log_prob_n = inputs.log_prob_n.clone().requires_grad_()
    result = POLICY_LOSSES[name].policy_loss(replace(inputs, log_prob_n=log_prob_n), OPTIONS[name])
    assert inputs.is_weights_n is not None
    torch.testing.assert_close(result.loss_n.detach(), surrogate(inputs.log_prob_n) * inputs.is_weights_n, rtol=1e-9, atol=1e-12)
    (gradient_n,) = torch.autograd.grad(result.loss_n.sum(), log_prob_n)
    # a token's surrogate depends on its own log-prob alone, so one step of all of them gives every difference
    difference_n = (surrogate(inputs.log_prob_n + STEP) - surrogate(inputs.log_prob_n - STEP)) / (2 * STEP)
    torch.testing.assert_close(gradient_n, difference_n * inputs.is_weights_n, rtol=1e-6, atol=1e-8)
    assert 0 < int((gradient_n == 0).sum()) < len(gradient_n) or name == "cispo"  # some tokens are held, some are not


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_the_aggregated_loss(name: str, mode: AggregationMode) -> None:
    """Of one random direction, over the whole mini-batch in the shape that the actor sees."""
    whole = batch(13, sessions=4)
    direction_BR = torch.randn(whole.mask_BR.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, gradient_BR = loss_and_gradient(name, whole, mode)
    assert not gradient_BR[~whole.mask_BR].any()
    inputs = _inputs(name, whole)
    spec = POLICY_LOSSES[name]
    weights_BR = token_weights(
        whole.mask_BR, spec.aggregation or mode, sequences_B=whole.sequences_B, scale=16.0, dtype=torch.float64
    )

    def loss(step: float) -> torch.Tensor:
        moved = replace(inputs, log_prob_n=(whole.log_prob_BR + step * direction_BR)[whole.mask_BR])
        return (spec.policy_loss(moved, OPTIONS[name]).loss_n * weights_BR[whole.mask_BR]).sum()

    difference = (loss(STEP) - loss(-STEP)) / (2 * STEP)
    torch.testing.assert_close((gradient_BR * direction_BR).sum(), difference, rtol=1e-6, atol=1e-9)
