"""The fused head against its definition: values, gradients, chunk borders, kept and recomputed numerators."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
@pytest.mark.parametrize("entropy_coeff", [0.0, 0.8])
def test_values_and_gradients_are_those_of_the_definition(
    head_case: str, temperature: float, with_bias: bool, entropy_coeff: float
) -> None:
    hidden, weight, bias, labels = _inputs()
    upstream = torch.linspace(-1, 1, N, dtype=torch.float64)
    logits = hidden @ weight.T + (bias if with_bias else 0)
    expected, expected_entropy = logits_log_probs(logits, labels, temperature)
    got, entropy = head_log_probs(
        hidden,
        weight,
        labels,
        bias_V=bias if with_bias else None,
        temperature=temperature,
        entropy_gradient=entropy_coeff > 0,
    )
    assert torch.allclose(got, expected)
    assert torch.allclose(entropy, expected_entropy)
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    want_gradients = torch.autograd.grad(((expected + entropy_coeff * expected_entropy) * upstream).sum(), inputs)
    got_gradients = torch.autograd.grad(((got + entropy_coeff * entropy) * upstream).sum(), inputs)
    for want, gradient in zip(want_gradients, got_gradients, strict=True):
        assert torch.allclose(gradient, want, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_the_entropy_alone(head_case: str) -> None:
    """A certain token has an entropy of 0, whose gradient is 0 and not NaN."""
    hidden, weight, _, labels = _inputs()
    hidden = (hidden.detach() * torch.linspace(0, 1e4, N, dtype=torch.float64)[:, None]).requires_grad_()
    _, expected = logits_log_probs(hidden @ weight.T, labels)
    _, entropy = head_log_probs(hidden, weight, labels, entropy_gradient=True)
    want = torch.autograd.grad(expected.square().sum(), [hidden, weight])
    got = torch.autograd.grad(entropy.square().sum(), [hidden, weight])
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_an_excluded_token_has_no_gradient() -> None:
    """Its logit is -inf, as a mask of the vocabulary gives it."""
    hidden, weight, bias, labels = _inputs()
    bias = bias.detach().clone().index_fill_(0, torch.tensor([V - 1]), -torch.inf)
    log_probs, entropy = head_log_probs(hidden, weight, labels.clamp(max=V - 2), bias_V=bias, entropy_gradient=True)
    got = torch.autograd.grad((log_probs + entropy).sum(), [hidden, weight])
    expected = logits_log_probs(hidden @ weight[:-1].T + bias[:-1], labels.clamp(max=V - 2))
    want = torch.autograd.grad((expected[0] + expected[1]).sum(), [hidden, weight])
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other)


def test_frozen_inputs_get_no_gradient(head_case: str) -> None:
    """As the head under an adapter is."""
    hidden, weight, _, labels = _inputs()
    log_probs, _ = head_log_probs(hidden, weight.detach(), labels)
    torch.autograd.backward(log_probs.sum())
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_tokens_have_empty_results_and_gradients_of_zero() -> None:
    _, weight, _, labels = _inputs()
    hidden = torch.zeros(0, H, dtype=torch.float64, requires_grad=True)
    log_probs, entropy = head_log_probs(hidden, weight, labels[:0], entropy_gradient=True)
    torch.autograd.backward((log_probs + entropy).sum())
    assert log_probs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that the results of operators held at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        found = [tensor for one in self._alive if (tensor := one()) is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
        self.peak = max(self.peak, sum(storages.values()))
        return result


@pytest.mark.parametrize("case", ["scoring", "update, kept", "update, computed again"])
def test_numerators_are_kept_only_for_a_backward_pass_and_where_all_of_them_fit(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, vocab = 64 * 20, 500
    whole, chunk = num_tokens * vocab * 8, 64 * vocab * 8
    monkeypatch.setattr(token_log_probs, "CHUNK_ENTRIES", 1)
    monkeypatch.setattr(token_log_probs, "KEEP_BYTES", whole - (case == "update, computed again"))
    hidden = torch.randn(num_tokens, 4, dtype=torch.float64, requires_grad=True)
    weight, labels = torch.randn(vocab, 4, dtype=torch.float64), torch.zeros(num_tokens, dtype=torch.int64)
    with _LiveBytes() as live, torch.set_grad_enabled(case != "scoring"):
        log_probs, entropy = head_log_probs(hidden, weight, labels, entropy_gradient=True)
        if case != "scoring":
            torch.autograd.backward((log_probs + entropy).sum())
    if case == "update, kept":
        assert whole < live.peak < whole + 6 * chunk
    else:
        assert live.peak < 6 * chunk


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
    log_probs, entropy = head_log_probs(hidden, weight, labels, entropy_gradient=True)
    torch.autograd.backward((log_probs + entropy).sum())
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_a_bfloat16_weight_sums_its_chunks_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """One large share and many small ones, each less than half a unit in its last place."""
    monkeypatch.setattr(token_log_probs, "CHUNK_ENTRIES", 1)
    hidden = torch.full((64 * 101, 1), 2.0**-9, dtype=torch.bfloat16)
    hidden[:64] = 1
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = head_log_probs(hidden, weight, torch.zeros(len(hidden), dtype=torch.int64))
    torch.autograd.backward(log_probs.sum())
    want = float(hidden.double().sum()) / 2
    assert weight.grad is not None
    assert float(weight.grad[0]) == pytest.approx(want, rel=2**-8)


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
