"""KL estimators, their gradients, the penalty in the reward, and the controllers, against closed forms."""

import math
from typing import get_args

import pytest
import torch

from asyncrl.algorithms.kl import AdaptiveKL, FixedKL, KLEstimator, kl_in_reward, kl_penalty

ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)
PLAIN = [estimator for estimator in ESTIMATORS if not estimator.endswith("+")]
K3 = math.exp(-0.5) - 0.5


def _value_and_gradient(log_prob: float, ref: float, estimator: KLEstimator) -> list[float]:
    at = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty(at, torch.tensor([ref], dtype=torch.float64), estimator)
    (gradient,) = torch.autograd.grad(penalty.sum(), at)
    return [float(penalty.detach()), float(gradient)]


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("kl", 0.5, 1.0),
        ("k1", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("mse", 0.125, 0.5),
        ("k2", 0.125, 0.5),
        ("low_var_kl", K3, 1 - math.exp(-0.5)),
        ("k3", K3, 1 - math.exp(-0.5)),
    ],
)
def test_estimators_by_hand_and_straight_through(estimator: KLEstimator, value: float, gradient: float) -> None:
    """At a difference of 0.5; with `+`, the value stays and the gradient is the difference."""
    assert _value_and_gradient(-1.0, -1.5, estimator) == pytest.approx([value, gradient])
    straight = next(name for name in ESTIMATORS if name == f"{estimator}+")
    assert _value_and_gradient(-1.0, -1.5, straight) == pytest.approx([value, 0.5])


@pytest.mark.parametrize("estimator", PLAIN)
def test_gradients_against_finite_differences(estimator: KLEstimator) -> None:
    generator = torch.Generator().manual_seed(0)
    log_prob, ref = (-torch.rand(50, generator=generator, dtype=torch.float64) * 6 for _ in range(2))
    log_prob.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, estimator), log_prob, eps=1e-6, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_at_equality_the_value_is_zero_and_so_is_the_gradient_of_all_but_k1(estimator: KLEstimator) -> None:
    assert _value_and_gradient(-1.3, -1.3, estimator) == [0.0, 1.0 if estimator in ("kl", "k1") else 0.0]


@pytest.mark.parametrize("difference", [-600.0, -25.0, 3.0, 25.0, 600.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_bounded(difference: float, dtype: torch.dtype) -> None:
    log_prob = torch.tensor([difference], dtype=dtype, requires_grad=True)
    value = kl_penalty(log_prob, torch.zeros(1, dtype=dtype), "k3")
    (gradient,) = torch.autograd.grad(value.sum(), log_prob)
    x = min(max(-difference, -20.0), 20.0)
    assert float(value.detach()) == pytest.approx(min(math.expm1(x) - x, 10))
    assert torch.isfinite(gradient).all()
    assert value.dtype == dtype


def test_k1_and_k3_estimate_the_kl_without_bias() -> None:
    """Expectation over all tokens of a known distribution, not over samples."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = ((0.5 * torch.randn(50, generator=generator, dtype=torch.float64)).log_softmax(0) for _ in range(2))
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in ("kl", "low_var_kl"):
        assert float((policy.exp() * kl_penalty(policy, reference, estimator)).sum()) == pytest.approx(float(exact))


def test_the_gradient_of_k2_is_that_of_the_kl() -> None:
    """In expectation over the policy's own tokens; the gradient of k1 as a loss is 0 there, and so `k1+` has k2's."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    for estimator in ("k2", "k1+"):
        loss = (policy.detach().exp() * kl_penalty(policy, reference, estimator)).sum()
        torch.testing.assert_close(torch.autograd.grad(loss, logits, retain_graph=True)[0], exact)
    loss = (policy.detach().exp() * kl_penalty(policy, reference, "k1")).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.zeros_like(exact))


def test_another_estimator_is_refused_by_name() -> None:
    for name in ("k9", "k1++", "full", "+"):
        with pytest.raises(ValueError, match=r"is not one of kl, k1, abs, mse, k2, low_var_kl, k3, kl\+"):
            kl_penalty(torch.zeros(1), torch.zeros(1), name)  # type: ignore[arg-type]


def test_the_penalty_in_the_reward_by_hand() -> None:
    """Row means of the KL are 0.5 and 3 over the policy tokens; the third row has none and does not count."""
    scores = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    log_prob = torch.tensor([[-1.0, 99.0, -1.0], [-1.0, -1.0, 99.0], [99.0, 99.0, 99.0]])
    ref = torch.tensor([[-2.0, 0.0, -1.0], [-3.0, -5.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])
    rewards, mean_kl = kl_in_reward(scores, log_prob, ref, mask, 0.1, "kl")
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.0, 1.0], [-0.2, 1.6, 0.0], [0.0, 0.0, 0.0]]))
    assert mean_kl == pytest.approx(1.75)


def test_numbers_outside_the_mask_have_no_effect_not_even_infinite_ones() -> None:
    mask = torch.tensor([[True, False]])
    bad = torch.tensor([[-1.0, math.nan]])
    rewards, mean_kl = kl_in_reward(torch.zeros(1, 2), bad, torch.tensor([[-1.5, -math.inf]]), mask, 1.0, "k3")
    assert rewards[0, 1] == 0
    assert mean_kl == pytest.approx(K3, rel=1e-6)


def test_no_policy_token_at_all_has_no_kl() -> None:
    scores = torch.ones(2, 3)
    rewards, mean_kl = kl_in_reward(scores, scores, 2 * scores, torch.zeros(2, 3, dtype=torch.bool), 1.0, "kl")
    assert (rewards.tolist(), mean_kl) == (scores.tolist(), 0.0)


def test_a_fixed_coefficient_stays() -> None:
    controller = FixedKL(coef=0.1)
    assert controller.after(1e9, 64) == controller


@pytest.mark.parametrize(
    ("current", "coef"),
    [(6.0, 0.2), (6.6, 0.2 * (1 + 0.1 * 0.05)), (100.0, 0.2 * (1 + 0.2 * 0.05)), (5.4, 0.2 * (1 - 0.1 * 0.05)), (0.0, 0.2 * 0.99)],
)
def test_an_adaptive_coefficient_by_hand(current: float, coef: float) -> None:
    """500 of a horizon of 10,000 trajectories, target 6: an error counts up to 20 %."""
    after = AdaptiveKL(coef=0.2, target=6.0, horizon=10_000).after(current, 500)
    assert after.coef == pytest.approx(coef, rel=1e-12)
    assert (after.target, after.horizon) == (6.0, 10_000)
