"""Tensor parallel: each linear layer of a decoder layer is cut over ranks, by the plan that comes with the model.

model -> [tensor_parallel] -> sharding. Embedding, norms and head stay whole on every rank and compute the same there.
"""

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.errors import ModelError

_SUMMED = "replicated_with_grad_allreduce"
_STYLES: Mapping[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def cut_layers(lm: PreTrainedModel, mesh: DeviceMesh) -> frozenset[str]:
    """Cut the model's linear layers over the mesh, in place. Returns the parameters, by Hugging Face name, which are whole but see
    the heads of this rank alone: their gradients are to be summed over the mesh.

    Raises ModelError, with the arithmetic, for what the plan or the sizes do not allow.
    """
    config = lm.config.get_text_config()
    plan = _plan(config, mesh.size())
    _check_sizes(config, mesh.size())
    parallelize_module(lm.base_model, mesh, {name: _STYLES[style]() for name, style in plan.items() if style != _SUMMED})
    suffixes = tuple(name.split("*")[-1] for name, style in plan.items() if style == _SUMMED)
    return frozenset(name for name, _ in lm.named_parameters() if suffixes and name.rpartition(".")[0].endswith(suffixes))


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
