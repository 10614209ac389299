"""Tensor parallel: each linear layer of a decoder layer is cut over ranks, by the plan that comes with the model.

model -> [tensor_parallel] -> sharding. Embedding, norms and head stay whole on every rank and compute the same there.

Weights are DTensors, so that sharding, checkpoints and the optimizer know how they are cut; the products run on the plain parts,
with the same kernels as without. A column-wise layer gives this rank's outputs and sums up the gradient of its input; a row-wise
one takes this rank's inputs and sums up its output. Source: Megatron-LM, arXiv 1909.08053 §3.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.errors import ModelError
from asyncrl.training.linear import product


class _CutLinear(nn.Linear):
    """Made from an existing layer: the class is changed instead of the module, so that names and hooks stay what they are."""

    group: dist.ProcessGroup

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of this rank; their gradients are of the DTensors again."""
        return cast("DTensor", self.weight).to_local(), None if self.bias is None else cast("DTensor", self.bias).to_local()


class ColumnLinear(_CutLinear):
    """Some of the outputs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return product(cast("torch.Tensor", _SumGradient.apply(input, self.group)), *self.parts)  # type: ignore[no-untyped-call]


class RowLinear(_CutLinear):
    """Some of the inputs. The bias is whole, and is added once."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.parts
        found = cast("torch.Tensor", _Sum.apply(product(input, weight, None), self.group))  # type: ignore[no-untyped-call]
        return found if bias is None else found + bias


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = share.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Cut(ParallelStyle):
    """One entry of a plan: how weight and bias of a layer are cut, and what it then is."""

    def __init__(self, kind: type[_CutLinear], weight: Placement, bias: Placement) -> None:
        super().__init__()
        self._kind, self._placements = kind, {"weight": weight, "bias": bias}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert type(module) is nn.Linear, f"{type(module).__name__} is in a tensor parallel plan"
        for name, parameter in list(module.named_parameters()):
            # every rank has loaded the same weights: nothing is sent
            part = distribute_tensor(parameter.detach(), device_mesh, [self._placements[name]], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        layer = cast("_CutLinear", module)
        layer.__class__ = self._kind
        layer.group = device_mesh.get_group()
        return layer


_SUMMED = "replicated_with_grad_allreduce"
_STYLES: Mapping[str, ParallelStyle] = {
    "colwise": _Cut(ColumnLinear, Shard(0), Shard(0)),
    "rowwise": _Cut(RowLinear, Shard(1), Replicate()),
}


def cut_layers(lm: PreTrainedModel, mesh: DeviceMesh) -> frozenset[str]:
    """Cut the model's linear layers over the mesh, in place. Returns the parameters, by Hugging Face name, which are whole but see
    the heads of this rank alone: their gradients are to be summed over the mesh.

    Raises ModelError, with the arithmetic, for what the plan or the sizes do not allow.
    """
    config = lm.config.get_text_config()
    plan = _plan(config, mesh.size())
    _check_sizes(config, mesh.size())
    parallelize_module(lm.base_model, mesh, {name: _STYLES[style] for name, style in plan.items() if style != _SUMMED})
    suffixes = tuple(name.split("*")[-1] for name, style in plan.items() if style == _SUMMED)
    summed = frozenset(name for name, _ in lm.named_parameters() if suffixes and name.rpartition(".")[0].endswith(suffixes))
    _check_rest(lm, summed, mesh.size())
    return summed


def _check_rest(lm: PreTrainedModel, summed: frozenset[str], size: int) -> None:
    """Among layers that are cut, such as those of an attention, a whole weight may see the heads of one rank alone. One that the
    plan forgets would become another on each rank."""
    for place, module in lm.named_modules():
        if not any(isinstance(child, _CutLinear) for child in module.children()):
            continue
        for name, parameter in module.named_parameters(prefix=place):
            if not isinstance(parameter, DTensor) and name not in summed:
                raise ModelError(
                    f"tensor_model_parallel_size = {size}: the library's plan for a {lm.config.model_type} model does not tell how "
                    f"the gradient of {name} is made, which stands among layers that are cut"
                )


def _plan(config: PreTrainedConfig, size: int) -> Mapping[str, str]:
    """Of the decoder layers: what the library would cut besides stays whole."""
    whole: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {name: style for name, style in whole.items() if name.startswith("layers.")}
    where = f"tensor_model_parallel_size = {size}"
    if not plan:
        raise ModelError(f"{where}: the library has no tensor parallel plan for a {config.model_type} model")
    for name, style in plan.items():
        if style not in _STYLES and style != _SUMMED:
            raise ModelError(f"{where}: {name} of a {config.model_type} model is to be cut as {style!r}, which is not covered")
    return plan


def _check_sizes(config: PreTrainedConfig, size: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        whole = getattr(config, name)
        if whole % size:
            raise ModelError(
                f"tensor_model_parallel_size = {size} must divide the model's {name} = {whole}: "
                f"{whole} / {size} = {whole / size:.3g}"
            )
