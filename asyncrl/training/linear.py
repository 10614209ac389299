"""Linear layers of the trainer with the fast products of `algorithms/matmul.py`, forward and backward.

`use_fast_linears` changes how a model multiplies, not what it computes, nor the names of its parameters.
"""

from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from asyncrl.algorithms.matmul import input_gradient, is_fast, linear, weight_gradient


class FastLinear(nn.Linear):
    """An `nn.Linear` with other kernels; made from an existing layer by `use_fast_linears`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return product(input, self.weight, self.bias)


def product(input: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """input @ weight.T + bias, differentiable, with the fast kernels where they are for these tensors."""
    if is_fast(weight_OI):
        return cast("torch.Tensor", _Linear.apply(input, weight_OI, bias_O))  # type: ignore[no-untyped-call]
    return functional.linear(input, weight_OI, bias_O)


def use_fast_linears(model: nn.Module) -> None:
    """Turn the model's plain float32 linear layers on CPU into fast ones, in place. Those that tensor parallel has cut are so."""
    for module in model.modules():
        if type(module) is nn.Linear and is_fast(module.weight):
            # The class is changed instead of the module, so that names, ties and hooks stay what they are.
            module.__class__ = FastLinear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input, weight_OI)
        return linear(input, weight_OI, bias_O)

    @staticmethod
    @once_differentiable  # the products have no derivative of their own: torch would silently leave it out of a second one
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight_OI = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad_nO = grad.reshape(-1, grad.shape[-1])
        return (
            input_gradient(grad_nO, weight_OI).view(input.shape) if needs_input else None,
            weight_gradient(grad_nO, input.reshape(-1, input.shape[-1])) if needs_weight else None,
            grad_nO.sum(0) if needs_bias else None,
        )
