"""Where a model of the library computes: its device, how its layers are cut, and which tokens of a batch are this rank's.

load -> [placement] -> sharding; batch -> [placement] -> model -> [placement] -> results on CPU, of all policy tokens of the batch
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.training.mesh import Mesh
from asyncrl.training.sequence_parallel import Cut, SequenceParallel
from asyncrl.training.tensor_parallel import cut_layers
from asyncrl.training.token_batch import TokenBatch, packed
from asyncrl.wording import named_message_of

PACKED_ATTENTION = ("flash_attention_2", "flex_attention")
"""They take several sequences in one row; the others take padded rows, whose padding costs what tokens cost."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """dtype: of the weights. partial_names: parameters, by Hugging Face name, whose gradients are to be summed over the tensor
    parallel ranks."""

    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    packs: bool = False
    sequence: SequenceParallel | None = None
    partial_names: frozenset[str] = frozenset()

    def part(self, batch: TokenBatch) -> "Part":
        """What this rank computes of a batch on CPU."""
        batch = packed(batch) if self.packs else batch
        if self.sequence is None:
            return Part(tokens=batch.to(self.device), cut=None)
        cut = self.sequence.cut(batch, self.dtype, self.device)
        return Part(tokens=cut.tokens, cut=cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """tokens: on the model's device."""

    tokens: TokenBatch
    cut: Cut | None

    def whole(self, values_n: torch.Tensor) -> torch.Tensor:
        """On CPU, of all policy tokens of the batch: from those of this rank's. Differentiable."""
        return (values_n if self.cut is None else self.cut.whole(values_n)).cpu()

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the library's model."""
        tokens = self.tokens
        given = {
            "input_ids": tokens.input_ids_bL,
            "position_ids": tokens.position_ids_bL,
            "attention_mask": None,
            "use_cache": False,
        }
        if tokens.position_ids_bL is not None and not tokens.is_packed:
            # With given positions the library would look for packed sequences; a mask without holes stops that and is then ignored.
            given["attention_mask"] = torch.ones_like(tokens.input_ids_bL)
        return given if self.cut is None else {**given, "ulysses": self.cut.ulysses}


def place(lm: PreTrainedModel, mesh: Mesh, config: ModelConfig) -> Placement:
    """Move the model to the mesh's device, cut its layers and its attention, in place.

    Raises ConfigError and ModelError, one line each, for what cannot be cut, or not on this device.
    """
    packs = config.attn_implementation in PACKED_ATTENTION
    if packs and mesh.device.type == "cpu":
        raise ConfigError(f"model.attn_implementation = {config.attn_implementation!r} needs a GPU; use 'sdpa'")
    if mesh.tp is not None and config.lora_rank:
        raise ConfigError("model.lora_rank: adapters are not cut by tensor_model_parallel_size; set one of them")
    lm.to(mesh.device)  # type: ignore[arg-type]
    if packs:
        _set_attention(lm, config.attn_implementation)
    return Placement(
        device=mesh.device,
        dtype=lm.dtype,
        packs=packs,
        partial_names=frozenset() if mesh.tp is None else cut_layers(lm, mesh.tp),
        sequence=None if mesh.sp_group is None else SequenceParallel(lm, mesh.sp_group, tp=mesh.topology.tp),
    )


def _set_attention(lm: PreTrainedModel, name: str) -> None:
    try:
        lm.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"model.attn_implementation = {name!r}: {named_message_of(error)}") from error


def checkpoint_layers(layers: Sequence[nn.Module]) -> None:
    """Keep of each layer only its input, and run it again in the backward pass. The library's own switch acts in training mode
    alone, and the models here never are in it."""
    for layer in layers:
        layer.forward = partial(_run_twice, layer.forward)


def _run_twice(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
