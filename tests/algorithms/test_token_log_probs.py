"""The fused head against its definition: values, gradients, chunk borders, kept and recomputed numerators."""

import pytest
import torch

from asyncrl.algorithms import token_log_probs
from asyncrl.algorithms.token_log_probs import head_log_probs, logits_log_probs

N, H, V = 200, 7, 11


@pytest.fixture(params=["one chunk", "many chunks", "recompute"])
def head_case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The three ways through the fused head, by its two constants."""
    case = str(request.param)
    if case != "one chunk":
        monkeypatch.setattr(token_log_probs, "CHUNK_ENTRIES", 1)  # 64 tokens a chunk: 200 tokens make a ragged last one
    if case == "recompute":
        monkeypatch.setattr(token_log_probs, "KEEP_BYTES", 0)
    return case


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((N, H), (V, H), (V,)))
    labels = torch.randint(V, (N,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_the_definition(head_case: str, temperature: float, with_bias: bool) -> None:
    hidden, weight, bias, labels = _inputs()
    upstream = torch.linspace(-1, 1, N, dtype=torch.float64)
    logits = hidden @ weight.T + (bias if with_bias else 0)
    expected, expected_entropy = logits_log_probs(logits, labels, temperature)
    got, entropy = head_log_probs(hidden, weight, labels, bias_V=bias if with_bias else None, temperature=temperature)
    assert torch.allclose(got, expected)
    assert torch.allclose(entropy, expected_entropy)
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    want_gradients = torch.autograd.grad((expected * upstream).sum(), inputs)
    got_gradients = torch.autograd.grad((got * upstream).sum(), inputs)
    for want, gradient in zip(want_gradients, got_gradients, strict=True):
        assert torch.allclose(gradient, want)


def test_a_second_backward_pass_computes_again(head_case: str) -> None:
    hidden, weight, _, labels = _inputs()
    log_probs, _ = head_log_probs(hidden, weight, labels)
    first = torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True)
    second = torch.autograd.grad(log_probs.sum(), hidden)
    assert torch.allclose(first[0], second[0])


def test_a_second_derivative_is_refused_and_not_silently_wrong() -> None:
    hidden, weight, _, labels = _inputs()
    log_probs, _ = head_log_probs(hidden, weight, labels)
    (gradient,) = torch.autograd.grad(log_probs.exp().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(gradient.square().sum())


def test_float32_is_close_to_float64_and_extreme_logits_stay_finite() -> None:
    hidden, weight, _, labels = _inputs(torch.float32)
    log_probs, entropy = head_log_probs(hidden * 100, weight, labels)
    expected, expected_entropy = logits_log_probs((hidden * 100).double() @ weight.double().T, labels)
    assert torch.allclose(log_probs.double(), expected, atol=1e-3, rtol=1e-5)
    assert torch.allclose(entropy.double(), expected_entropy, atol=1e-4)


def test_bfloat16_gives_float32_out() -> None:
    hidden, weight, _, labels = _inputs(torch.bfloat16)
    log_probs, entropy = head_log_probs(hidden, weight, labels)
    torch.autograd.backward(log_probs.sum())
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_entropy_of_the_uniform_distribution_is_log_v() -> None:
    _, entropy = head_log_probs(torch.zeros(3, H), torch.zeros(V, H), torch.zeros(3, dtype=torch.int64))
    assert torch.allclose(entropy, torch.tensor(float(V)).log().expand(3))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_sum_of_squared_probabilities_is_that_of_the_definition(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks, too: at least 64 tokens each."""
    monkeypatch.setattr(token_log_probs, "CHUNK_ENTRIES", 1)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((150, 8), (11, 8), (11,)))
    want = ((hidden @ weight.T + bias) / temperature).softmax(-1).square().sum(-1)
    got = token_log_probs.head_sum_pi_squared(hidden, weight, bias_V=bias, temperature=temperature)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    even = token_log_probs.head_sum_pi_squared(torch.zeros(2, 8), torch.zeros(4, 8))
    assert even.tolist() == [0.25, 0.25]
