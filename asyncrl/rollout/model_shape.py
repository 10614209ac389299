"""Which Hugging Face models the embedded engine serves, and the numbers it needs of them. Refusals are one line (ModelError).

Served: causal language models whose every cache layer is plain full attention (Qwen2, Qwen3, Llama and their kin). Refused: sliding
windows, linear or hybrid layers, encoder-decoders, and rotary frequencies that depend on the longest row of the batch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from asyncrl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary kinds whose frequencies change with the longest position in a forward, so that neighbours would change a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model's cache and vocabulary."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype


def model_shape(model: "PreTrainedModel", context_len: int) -> ModelShape:
    """The shape of a model that the engine can serve. Raises ModelError, one line, for one that it cannot."""
    config = model.config.get_text_config(decoder=True)
    reason = _refusal(model, config, context_len)
    if reason:
        raise ModelError(f"rollout engine 'torch' cannot serve {type(model).__name__}: {reason}")
    weight = cast("torch.nn.Embedding", model.get_input_embeddings()).weight
    num_heads: int = config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        vocab_size=weight.shape[0],
        dtype=weight.dtype,
    )


def output_embeddings(model: "PreTrainedModel") -> torch.nn.Module:
    """The language-model head."""
    return cast("torch.nn.Module", model.get_output_embeddings())  # type: ignore[no-untyped-call]


def _refusal(model: "PreTrainedModel", config: "PreTrainedConfig", context_len: int) -> str:
    """Why not, or an empty string."""
    if model.config.is_encoder_decoder or output_embeddings(model) is None:
        return "it is not a decoder with a language-model head"
    layers = DynamicCache(config=config).layers
    other = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if other:
        return f"it has cache layers other than full attention ({', '.join(other)})"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in BATCH_DEPENDENT_ROPE:
        fixed = "'default', 'linear', 'yarn' or 'llama3'"
        return f"its rotary frequencies depend on the longest row (rope_type {rope['rope_type']!r}); use {fixed}"
    longest = getattr(config, "max_position_embeddings", None)
    if longest and context_len > longest:
        return f"a context of {context_len} tokens is asked for, and it has {longest} positions; lower rollout.max_model_len"
    return ""
