"""The three matrix products of a linear layer, through oneDNN where that is faster: float32 on CPU.

torch's default for float32 on CPU is MKL, which on AMD reaches less than half of the machine. Measured on an EPYC (Zen 5), one
thread, 2,560 rows, 256 x 1024, GFLOP/s of MKL and oneDNN: forward 101 and 235, gradient of the input 103 and 220, of the weight 96
and 202. Same precision: both multiply and add in float32, in another order. The operator is the one that torch's own compiler emits
for CPU; where torch has no oneDNN, and for other types and devices, the plain products run.
Operands are made contiguous first: an expanded one, such as the gradient of a sum, would fall to a kernel 250 times slower.

Legend: n rows, I inputs, O outputs.
"""

import os

import torch
from torch.nn import functional

# torch and oneDNN keep the last 1,024 kernels of each thread, one a shape, and token counts make new shapes at every step: 1.2 GB.
# 32 hold the layers of a step, and cost no speed. Read at the first product; what the user has set stands.
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

HAS_ONEDNN = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def is_fast(*tensors: torch.Tensor) -> bool:
    """Whether oneDNN takes these tensors: float32 on CPU, with at least one entry each."""
    return HAS_ONEDNN and all(
        tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.numel() > 0 for tensor in tensors
    )


def linear(input_nI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """input @ weight.T + bias. Any leading dimensions. No gradient: `_Linear` in `training/linear.py` has it."""
    if is_fast(input_nI, weight_OI):
        # The operator reads a bias with gaps as if it had none.
        return onednn_linear(input_nI.contiguous(), weight_OI.contiguous(), None if bias_O is None else bias_O.contiguous())
    return functional.linear(input_nI, weight_OI, bias_O)


def input_gradient(grad_nO: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """grad @ weight."""
    if not is_fast(grad_nO, weight_OI):
        return grad_nO @ weight_OI
    return onednn_linear(grad_nO.contiguous(), weight_OI.contiguous().T, None)


def weight_gradient(grad_nO: torch.Tensor, input_nI: torch.Tensor) -> torch.Tensor:
    """grad.T @ input, [O, I], perhaps as the transposed view of [I, O]: oneDNN is faster with the wide side as columns."""
    if not is_fast(grad_nO, input_nI):
        return grad_nO.T @ input_nI
    grad_nO, input_nI = grad_nO.contiguous(), input_nI.contiguous()
    if grad_nO.shape[1] > input_nI.shape[1]:
        return onednn_linear(input_nI.T, grad_nO.T, None).T
    return onednn_linear(grad_nO.T, input_nI.T, None)


def onednn_linear(input_nI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """The operator itself, for float32 tensors on CPU, contiguous or transposed. weight_OI: plain, or packed for it."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input_nI, weight_OI, bias_O, "none", [], "")
    return out
