"""The clipped value loss and the entropy against closed forms and finite differences."""

import math

import pytest
import torch

from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.token_log_probs import logits_log_probs
from asyncrl.algorithms.values import value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "is_clipped"),
    [
        (1.2, 1.0, 3.0, 0.5 * 1.8**2, -1.8, 0),  # near the old value
        (2.0, 1.0, 3.0, 0.5 * 1.5**2, 0.0, 1),  # has already moved by more than 0.5 towards the target: no more push
        (2.0, 1.0, 0.0, 0.5 * 2.0**2, 2.0, 0),  # has moved away from it: the clip does not help
        (0.0, 1.0, -3.0, 0.5 * 3.5**2, 0.0, 1),
        (3.0, 3.0, 3.0, 0.0, 0.0, 0),
    ],
)
def test_the_value_loss_by_hand(value: float, old: float, target: float, loss: float, gradient: float, is_clipped: int) -> None:
    values_n = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old_n, returns_n = (torch.tensor([x], dtype=torch.float64) for x in (old, target))
    result = value_loss(values_n, old_n, returns_n, cliprange_value=0.5)
    (got,) = torch.autograd.grad(result.loss_n.sum(), values_n)
    assert [float(result.loss_n.detach()), float(got)] == pytest.approx([loss, gradient])
    assert {name: float(fact_n) for name, fact_n in result.facts.items()} == {"vf_clipfrac": is_clipped, "vpred_mean": value}
    assert not any(fact_n.requires_grad for fact_n in result.facts.values())


def test_the_gradient_against_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    values_n, old_n, returns_n = (torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(3))
    values_n.requires_grad_()

    def loss_n(values_n: torch.Tensor) -> torch.Tensor:
        return value_loss(values_n, old_n, returns_n, cliprange_value=0.3).loss_n

    assert torch.autograd.gradcheck(loss_n, values_n, eps=1e-6, atol=1e-7, rtol=1e-6)
    (gradient,) = torch.autograd.grad(loss_n(values_n).sum(), values_n)
    assert 0 < int((gradient == 0).sum()) < 200  # some are held, some are not


def test_no_token_at_all_has_no_value_loss() -> None:
    empty = torch.zeros(0, requires_grad=True)
    result = value_loss(empty, empty.detach(), empty.detach())
    assert float(result.loss_n.sum().detach()) == 0
    assert torch.autograd.grad(result.loss_n.sum(), empty)[0].shape == (0,)


def test_a_clip_range_without_a_meaning_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cliprange_value = 0 must be positive"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), cliprange_value=0)


def test_the_gradient_of_the_entropy_against_finite_differences() -> None:
    """Of its aggregate, through logits and a temperature; -p (log p + H) / temperature in closed form."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(12, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (12,), generator=generator)
    mask = torch.rand(3, 4, generator=generator) < 0.7
    weights_N = token_weights(mask, "seq-mean-token-mean", dtype=torch.float64).flatten()

    def entropy(logits: torch.Tensor) -> torch.Tensor:
        return (logits_log_probs(logits, labels, 0.7)[1] * weights_N).sum()

    assert torch.autograd.gradcheck(entropy, logits, eps=1e-6, atol=1e-8, rtol=1e-6)
    (gradient,) = torch.autograd.grad(entropy(logits), logits)
    log_p = (logits.detach() / 0.7).log_softmax(-1)
    spread = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, -log_p.exp() * (log_p + spread) / 0.7 * weights_N[:, None])


def test_the_entropy_of_equal_logits_is_the_log_of_their_number() -> None:
    assert logits_log_probs(torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64))[1].tolist() == pytest.approx([math.log(8)])
