"""The clipped surrogate and the KL estimators against closed forms and float64 references."""

import math

import pytest
import torch

from asyncrl.algorithms.kl import KLEstimator, kl_penalty
from asyncrl.algorithms.losses import ppo_clip_loss


def _loss(ratio: float, advantage: float, low: float = 0.2, high: float = 0.3, ceiling: float = 3.0) -> tuple[float, float]:
    """(loss, d loss / d log_prob) of one token."""
    log_prob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    result = ppo_clip_loss(
        log_prob,
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=ceiling,
    )
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_prob)
    return float(result.loss.detach()), float(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside: the plain policy gradient
        (1.5, 2.0, -2.6, 0.0),  # good token, ratio already above 1 + high: no more push
        (0.5, 2.0, -1.0, -1.0),  # good token became rarer: the clip does not help it
        (0.5, -1.0, 0.8, 0.0),  # bad token already below 1 - low
        (2.0, -1.0, 2.0, 2.0),  # bad token became likelier: pushed down with its ratio
        (5.0, -1.0, 3.0, 0.0),  # ... but never by more than the dual clip
    ],
)
def test_every_branch_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert list(_loss(ratio, advantage)) == pytest.approx([loss, gradient])


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    log_prob = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0])
    loss = ppo_clip_loss(log_prob, log_prob.detach(), advantages)
    (gradient,) = torch.autograd.grad(loss.loss.sum(), log_prob)
    assert torch.equal(gradient, -advantages)
    assert not loss.is_clipped.any()
    assert loss.log_ratio.tolist() == [0.0, 0.0, 0.0]


def test_facts_say_which_clip_decided() -> None:
    loss = ppo_clip_loss(torch.tensor([1.5, 5.0, 2.0]).log(), torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]))
    assert loss.is_clipped.tolist() == [True, False, False]
    assert loss.is_clipped_lower.tolist() == [False, True, False]


def test_huge_log_ratios_stay_finite() -> None:
    loss = ppo_clip_loss(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0]))
    assert torch.isfinite(loss.loss).all()


def test_a_dual_clip_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_ratio_c = 1"):
        ppo_clip_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_ratio_c=1.0)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("kl", 0.5, 1.0), ("k2", 0.125, 0.5), ("low_var_kl", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_kl_estimators_by_hand(estimator: KLEstimator, value: float, gradient: float) -> None:
    log_prob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty(log_prob, torch.tensor([-1.5], dtype=torch.float64), estimator)
    (got,) = torch.autograd.grad(penalty.sum(), log_prob)
    assert [float(penalty.detach()), float(got)] == pytest.approx([value, gradient])


def test_k1_and_k3_estimate_the_kl_without_bias() -> None:
    """Expectation over all tokens of a known distribution, not over samples."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = ((0.5 * torch.randn(50, generator=generator, dtype=torch.float64)).log_softmax(0) for _ in range(2))
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in ("kl", "low_var_kl"):
        assert float((policy.exp() * kl_penalty(policy, reference, estimator)).sum()) == pytest.approx(float(exact))


def test_another_estimator_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'k9' is not one of kl, k2, low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k9")  # type: ignore[arg-type]
