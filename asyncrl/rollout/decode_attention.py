"""The attention function of the embedded engine, registered with Hugging Face under the name `asyncrl_slots`.

A prefill forward is causal attention over its own keys. A decode forward (one query a row) is two batched matrix products over the
slots' key window: heads that share a key head are the rows of one product, so keys are never repeated. On CPU this takes half to
two thirds of the time of `scaled_dot_product_attention` with one query.

The name is registered for attention only, not for masks: Hugging Face then builds no mask, and the one that the engine gives
passes through untouched.
"""

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

NAME = "asyncrl_slots"

WINDOW_MULTIPLE = 16
"""Key windows are rounded up to this: odd ones fall off the vector width, which costs time and makes bits depend on the window."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [rows, heads, tokens, head_dim], key and value [rows, kv_heads, keys, head_dim] -> [rows, tokens, heads, head_dim].

    attention_mask: None for a prefill (right padding needs none under a causal mask), else additive [rows, 1, 1, keys].
    """
    if attention_mask is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    rows, heads, _, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = (query * scaling).view(rows, kv_heads, heads // kv_heads, head_dim)
    scores = torch.matmul(grouped, key.transpose(2, 3)).add_(attention_mask)
    out = torch.matmul(scores.softmax(-1), value)
    return out.view(rows, 1, heads, head_dim), None


def decode_mask(positions: torch.Tensor, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [rows, 1, 1, window]: 0 for keys up to and with the row's position, -inf beyond. positions: int64 [rows]."""
    beyond = torch.arange(window) > positions[:, None]
    return torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)[:, None, None]


AttentionInterface.register(NAME, attend)
