"""Fast linear layers against torch's own, forward and backward."""

import copy

import pytest
import torch
from torch import nn

from asyncrl.algorithms.matmul import input_gradient, linear, weight_gradient
from asyncrl.training.linear import FastLinear, use_fast_linears


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 33), (33, 5), (16, 16), (1, 1)])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_products_are_those_of_float64(inputs: int, outputs: int, rows: int) -> None:
    left, weight, grad, bias = (
        torch.randn(rows, inputs),
        torch.randn(outputs, inputs),
        torch.randn(rows, outputs),
        torch.randn(outputs),
    )
    for got, want in (
        (linear(left, weight, bias), left.double() @ weight.double().T + bias),
        (input_gradient(grad, weight), grad.double() @ weight.double()),
        (weight_gradient(grad, left), grad.double().T @ left.double()),
    ):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 8), (4, 8), (2, 0, 8)])
def test_a_layer_and_its_gradients_are_unchanged(bias: bool, shape: tuple[int, ...]) -> None:
    plain = nn.Sequential(nn.Linear(8, 24, bias=bias), nn.Tanh(), nn.Linear(24, 3, bias=bias))
    fast = copy.deepcopy(plain)
    use_fast_linears(fast)
    assert [type(layer) for layer in fast] == [FastLinear, nn.Tanh, FastLinear]
    assert list(fast.state_dict()) == list(plain.state_dict())
    inputs = [torch.randn(shape).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    outputs = [model(value) for model, value in zip((plain, fast), inputs, strict=True)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        torch.autograd.backward(output.square().sum())
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for want, got in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_expanded_and_transposed_operands_give_the_same() -> None:
    left, weight, grad = torch.randn(7, 1).expand(7, 6), torch.randn(6, 9).T, torch.randn(1, 9).expand(7, 9)
    torch.testing.assert_close(linear(left, weight), left @ weight.T)
    torch.testing.assert_close(input_gradient(grad, weight), grad @ weight)
    torch.testing.assert_close(weight_gradient(grad, left), grad.T @ left)


def test_a_bias_with_gaps_is_added_as_it_is() -> None:
    left, weight, bias = torch.randn(7, 6), torch.randn(9, 6), torch.randn(18)[::2]
    torch.testing.assert_close(linear(left, weight, bias), left @ weight.T + bias)


def test_a_second_derivative_is_refused_and_not_silently_wrong() -> None:
    layer = nn.Sequential(nn.Linear(4, 4))
    use_fast_linears(layer)
    value = torch.randn(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(value).tanh().sum(), value, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(gradient.square().sum())


def test_other_types_keep_torchs_own_products() -> None:
    half = nn.Linear(4, 4).bfloat16()
    use_fast_linears(half)
    assert type(half) is nn.Linear
    assert linear(torch.ones(2, 4).double(), torch.ones(3, 4).double()).dtype == torch.float64


def test_a_frozen_layer_passes_the_gradient_on() -> None:
    layer = nn.Sequential(nn.Linear(4, 4))
    layer.requires_grad_(False)
    use_fast_linears(layer)
    value = torch.randn(2, 4, requires_grad=True)
    torch.autograd.backward(layer(value).sum())
    assert value.grad is not None
    assert all(parameter.grad is None for parameter in layer.parameters())
