"""Every policy loss against closed forms, a token at a time: loss, gradient, and the facts that become metrics."""

import math

import pytest
import torch

from asyncrl.algorithms.losses import POLICY_LOSSES, LossInputs, PolicyLoss


def _run(
    name: str, ratios: list[float], advantages: list[float], rows: list[int] | None = None, **options: float
) -> tuple[PolicyLoss, list[float], list[float]]:
    """(result, loss, d sum of the losses / d log_prob) of tokens with old probability 0.1."""
    log_prob_n = (0.1 * torch.tensor(ratios, dtype=torch.float64)).log().requires_grad_()
    inputs = LossInputs(
        log_prob_n=log_prob_n,
        old_log_prob_n=torch.full_like(log_prob_n, math.log(0.1)).detach(),
        advantages_n=torch.tensor(advantages, dtype=torch.float64),
        rows_n=torch.tensor(rows or list(range(len(ratios)))),
        selected_n=torch.tensor([number % 2 == 0 for number in range(len(ratios))]),
    )
    result = POLICY_LOSSES[name].policy_loss(inputs, options)
    (gradient_n,) = torch.autograd.grad(result.loss_n.sum(), log_prob_n)
    return result, result.loss_n.tolist(), gradient_n.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "facts"),
    [
        (1.1, 2.0, -2.2, -2.2, (0, 0)),  # inside: the plain policy gradient
        (1.5, 2.0, -2.6, 0.0, (1, 0)),  # good token, ratio already above 1 + high: no more push
        (0.5, 2.0, -1.0, -1.0, (0, 0)),  # good token became rarer: the clip does not help it
        (0.5, -1.0, 0.8, 0.0, (1, 0)),  # bad token already below 1 - low
        (2.0, -1.0, 2.0, 2.0, (0, 0)),  # bad token became likelier: pushed down with its ratio
        (5.0, -1.0, 3.0, 0.0, (0, 1)),  # ... but never by more than the dual clip
        (1.5, 0.0, 0.0, 0.0, (0, 0)),
    ],
)
def test_vanilla(ratio: float, advantage: float, loss: float, gradient: float, facts: tuple[float, float]) -> None:
    result, losses, gradients = _run("vanilla", [ratio], [advantage], clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)
    assert losses + gradients == pytest.approx([loss, gradient])
    assert (float(result.facts["pg_clipfrac"]), float(result.facts["pg_clipfrac_lower"])) == facts
    assert float(result.facts["ppo_kl"]) == pytest.approx(-math.log(ratio))


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name not in ("clip_cov", "geo_mean")])
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    """With old = new, one token a row: -A, whatever the loss. clip_cov holds the selected tokens."""
    options = {"dro_beta": 0.5, "ppo_kl_coef": 0.3} if name in ("dro", "kl_cov") else {}
    _, _, gradients = _run(name, [1.0, 1.0, 1.0], [1.5, -2.0, 0.0], None, **options)
    assert gradients == pytest.approx([-1.5, 2.0, 0.0])


def test_gspo() -> None:
    """The sequence of ratios 0.5 and 2 has ratio 1, that of 1.44 and 1 has 1.2; both tokens have the sequence's value."""
    advantages = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    result, losses, gradients = _run(
        "gspo", [0.5, 2.0, 1.44, 1.0, 1.44, 1.0], advantages, [4, 4, 0, 0, 2, 2], clip_ratio_low=0.1, clip_ratio_high=0.1
    )
    assert losses == pytest.approx([-1, -1, -1.1, -1.1, 1.2, 1.2])
    assert gradients == pytest.approx([-1, -1, 0, 0, 1.2, 1.2])
    assert result.facts["pg_clipfrac"].tolist() == [0, 0, 1, 1, 0, 0]


def test_gspo_bounds_the_ratio_of_a_sequence() -> None:
    _, losses, _ = _run("gspo", [math.exp(15)], [-1.0])
    assert losses == pytest.approx([math.exp(10)])


def test_sapo() -> None:
    """sigmoid(ln 3) = 3/4, so at r = 1 + ln(3) / tau the loss is -3 A / tau and the gradient -3/4 A r."""
    high, low = 1 + math.log(3) / 2, 1 - math.log(3) / 4
    _, losses, gradients = _run("sapo", [high, low], [2.0, -1.0], tau_pos=2.0, tau_neg=4.0)
    assert losses == pytest.approx([-3.0, 0.25])
    assert gradients == pytest.approx([-1.5 * high, 0.75 * low])


@pytest.mark.parametrize("name", ["gpg", "reinforce"])
def test_losses_without_a_ratio(name: str) -> None:
    _, losses, gradients = _run(name, [0.5, 3.0], [2.0, -1.0])
    assert losses == pytest.approx([-2 * math.log(0.05), math.log(0.3)])
    assert gradients == pytest.approx([-2.0, 1.0])


def test_cispo() -> None:
    """Tokens outside the bounds keep a gradient, with the bound as their weight."""
    result, losses, gradients = _run(
        "cispo", [1.1, 3.0, 0.5], [2.0, 2.0, -1.0], clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=9
    )
    assert gradients == pytest.approx([-2.2, -2.6, 0.8])
    assert losses == pytest.approx([-2.2 * math.log(0.11), -2.6 * math.log(0.3), 0.8 * math.log(0.05)])
    assert result.facts["pg_clipfrac"].tolist() == [0, 1, 1]


def test_dppo_tv() -> None:
    """Old probability 0.1. Held are: up by 0.15 with A > 0, down by 0.08 with A < 0; the harmless directions are free."""
    result, _, gradients = _run(
        "dppo_tv",
        [1.5, 2.5, 0.2, 0.2, 2.5],
        [1.0, 1.0, 1.0, -1.0, -1.0],
        clip_ratio_low=0.05,
        clip_ratio_high=0.1,
        clip_ratio_c=2.0,
    )
    assert gradients == pytest.approx([-1.5, 0.0, -0.2, 0.0, 2.0])  # the last: a ratio of 2.5, capped
    assert result.facts["pg_clipfrac"].tolist() == [0, 1, 0, 1, 0]
    assert result.facts["pg_clipfrac_lower"].tolist() == [0, 0, 0, 0, 1]


def test_dppo_kl() -> None:
    """KL of (0.1, 0.9) to (0.25, 0.75) is 0.0725, to (0.02, 0.98) 0.0843."""
    result, _, gradients = _run(
        "dppo_kl",
        [1.5, 2.5, 0.2, 0.2, 2.5],
        [1.0, 1.0, 1.0, -1.0, -1.0],
        clip_ratio_low=0.08,
        clip_ratio_high=0.07,
        clip_ratio_c=2.0,
    )
    assert gradients == pytest.approx([-1.5, 0.0, -0.2, 0.0, 2.0])
    wider = _run("dppo_kl", [2.5, 0.2], [1.0, -1.0], clip_ratio_low=0.085, clip_ratio_high=0.073, clip_ratio_c=2.0)
    assert wider[2] == pytest.approx([-2.0, 0.2])
    assert result.facts["pg_clipfrac"].tolist() == [0, 1, 0, 1, 0]


def test_dro() -> None:
    _, losses, gradients = _run("dro", [math.e], [2.0], dro_beta=0.5)
    assert losses == pytest.approx([-2 * (math.log(0.1) + 1) + 0.25])
    assert gradients == pytest.approx([-1.5])


def test_geo_mean() -> None:
    """Log ratios 1 and -1 with A = 2 clipped to 0.4 and -1: exp(-0.3) on both tokens, weighed by the mean advantage."""
    result, losses, gradients = _run(
        "geo_mean", [math.e, 1 / math.e, math.e], [2.0, 2.0, -1.0], [0, 0, 1], clip_ratio_low=0.4, clip_ratio_high=0.4
    )
    assert losses == pytest.approx([-2 * math.exp(-0.3)] * 2 + [math.e])
    assert gradients == pytest.approx([0.0, -2 * math.exp(-0.3), math.e])  # the sum of the copies, each a half of d mean
    assert result.facts["pg_clipfrac"].tolist() == [1, 1, 0]
    assert result.facts["pg_clipfrac_lower"].tolist() == [0, 0, 1]


def test_geo_mean_with_advantages_of_tokens() -> None:
    """A = 3 and -1, mean 1: each token is clipped by the sign of its own advantage, 2 to 0.4 and -2 to -0.3."""
    _, losses, gradients = _run(
        "geo_mean", [math.exp(2), math.exp(-2)], [3.0, -1.0], [0, 0], clip_ratio_low=0.3, clip_ratio_high=0.4
    )
    assert losses == pytest.approx([-math.exp(0.05)] * 2)
    assert gradients == [0.0, 0.0]


def test_geo_mean_weighs_a_sequence_by_the_geometric_mean() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    inputs = LossInputs(
        log_prob_n=zeros,
        old_log_prob_n=zeros,
        advantages_n=zeros + 1,
        rows_n=torch.tensor([0, 0, 1, 1]),
        is_weights_n=torch.tensor([0.5, 8.0, 0.0, 2.0], dtype=torch.float64),
    )
    assert POLICY_LOSSES["geo_mean"].policy_loss(inputs, {}).loss_n.tolist() == pytest.approx([-2.0, -2.0, 0.0, 0.0])


def test_covariance_losses_hold_the_selected_tokens() -> None:
    """Token 0 is selected, token 1 is not."""
    result, losses, gradients = _run("clip_cov", [1.1, 1.5], [2.0, 2.0], clip_ratio_low=0.2, clip_ratio_high=0.3)
    assert losses == pytest.approx([0.0, -2.6])
    assert gradients == [0.0, 0.0]
    assert result.facts["pg_clipfrac"].tolist() == [1, 0]
    result, losses, gradients = _run("kl_cov", [0.5, 0.5], [2.0, 2.0], ppo_kl_coef=0.3)
    assert losses == pytest.approx([-1 + 0.3 * math.log(2), -1])
    assert gradients == pytest.approx([-1.3, -1.0])
    assert result.facts["ppo_kl"].tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "geo_mean"])
def test_importance_weights_multiply_the_loss(name: str) -> None:
    plain = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    options = {"dro_beta": 0.5} if name == "dro" else {}

    def loss(weights_n: torch.Tensor | None) -> torch.Tensor:
        inputs = LossInputs(
            log_prob_n=plain,
            old_log_prob_n=plain.flip(0),
            advantages_n=torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64),
            rows_n=torch.tensor([0, 0, 1]),
            is_weights_n=weights_n,
            selected_n=torch.tensor([True, False, False]),
        )
        return POLICY_LOSSES[name].policy_loss(inputs, options).loss_n

    assert torch.equal(loss(weights), loss(None) * weights)
