"""Ulysses: ranks share the tokens of a row, and in attention, which needs all tokens, they share the heads instead.

batch -> [sequence_parallel] -> model -> [sequence_parallel] -> results of all tokens, on every rank

Legend: b rows, L tokens of a row on all ranks, l on this one, h heads on all ranks, d size of a head.

Everything but attention works token by token. Around attention two exchanges turn [b, h, l, d] into [b, h / size, L, d] and back.
Source: DeepSpeed Ulysses, arXiv 2309.14509. Key and value heads that the ranks cannot share evenly are repeated, as few times as it
takes.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.errors import ModelError
from asyncrl.training.token_batch import TokenBatch

NAME = "asyncrl_ulysses"
"""Of the attention in the library's table. It has no entry in its table of masks, so that none is made for a rank's own tokens."""
_ROPES_OF_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ulysses:
    """What attention must know of a batch besides a rank's own tokens. mask: of all tokens, as the inner attention takes it."""

    group: dist.ProcessGroup
    inner: Callable[..., tuple[torch.Tensor, object]]
    mask: Any
    position_ids_bL: torch.Tensor | None


class SequenceParallel:
    """Of one model: cuts batches, and gathers what was computed. `use` has set the model's attention."""

    def __init__(self, lm: PreTrainedModel, group: dist.ProcessGroup, *, tp: int = 1) -> None:
        """Raises ModelError, with the arithmetic, for a model whose attention cannot be shared."""
        config = lm.config.get_text_config()
        size = group.size()
        _check(config, size, tp)
        self.group = group
        self._inner_config = copy.copy(config)
        inner = cast("str", config._attn_implementation)
        # the library has eager attention in the file of each model, not in its table
        self._inner = ALL_ATTENTION_FUNCTIONS.get_interface(inner, _eager_of(lm))
        ALL_ATTENTION_FUNCTIONS.register(NAME, ulysses_attention)
        config._attn_implementation = NAME
        self._inner_config._attn_implementation = inner
        for module in lm.modules():
            if hasattr(module, "num_key_value_groups"):
                _share_heads(cast("Any", module), config, size, tp)

    def cut(self, batch: TokenBatch, dtype: torch.dtype, device: torch.device) -> "Cut":
        """This rank's tokens of a batch on CPU, and what its attention needs, on the device. dtype: of the hidden states."""
        size, rank = self.group.size(), self.group.rank()
        whole = _widened(batch, size)
        width = whole.input_ids_bL.shape[1] // size
        columns = slice(rank * width, (rank + 1) * width)
        positions = whole.position_ids_bL
        owner_n = batch.select_n % batch.input_ids_bL.shape[1] // width
        chosen = owner_n == rank
        select_n = batch.select_n[chosen]
        rows_n, column_n = select_n // batch.input_ids_bL.shape[1], select_n % batch.input_ids_bL.shape[1]
        tokens = TokenBatch(
            input_ids_bL=whole.input_ids_bL[:, columns],
            position_ids_bL=torch.arange(columns.start, columns.stop)[None] if positions is None else positions[:, columns],
            select_n=rows_n * width + column_n - columns.start,
            labels_n=batch.labels_n[chosen],
            lengths=batch.lengths,
            is_packed=batch.is_packed,
        )
        on_device = whole.to(device)
        ulysses = Ulysses(
            group=self.group,
            inner=self._inner,
            mask=self._mask(on_device, dtype),
            position_ids_bL=on_device.position_ids_bL,
        )
        return Cut(
            tokens=tokens.to(device),
            ulysses=ulysses,
            counts=tuple(torch.bincount(owner_n, minlength=size).tolist()),
            order_n=owner_n.argsort(stable=True).argsort().to(device),
        )

    def _mask(self, whole: TokenBatch, dtype: torch.dtype) -> Any:
        shape = (*whole.input_ids_bL.shape, 1)
        mask: object = create_causal_mask(
            config=self._inner_config,
            inputs_embeds=torch.empty(1, dtype=dtype, device=whole.input_ids_bL.device).expand(shape),
            attention_mask=None if whole.is_packed else torch.ones_like(whole.input_ids_bL),
            past_key_values=None,
            position_ids=whole.position_ids_bL,
        )
        return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """counts: policy tokens of each rank; order_n: where in their list each token of the whole batch stands."""

    tokens: TokenBatch
    ulysses: Ulysses
    counts: tuple[int, ...]
    order_n: torch.Tensor

    def whole(self, values_n: torch.Tensor) -> torch.Tensor:
        """The values of all ranks' tokens in the order of the whole batch, from those of this rank. The gradient goes to each rank
        for its own tokens: the loss is the same on all of them."""
        gathered = cast("torch.Tensor", _Gather.apply(values_n, self.counts, self.ulysses.group))  # type: ignore[no-untyped-call]
        return gathered[self.order_n]


def ulysses_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    ulysses: Ulysses,
    **rest: Any,
) -> tuple[torch.Tensor, object]:
    """As the library calls an attention. query: [b, h, l, d]; key, value: [b, key heads, l, d]. Returns [b, l, h, d]."""
    repeats = cast("Any", module).ulysses_repeats
    heads = [_tokens_for_heads(part, ulysses.group) for part in (query, *(_repeated(part, repeats) for part in (key, value)))]
    rest["position_ids"] = ulysses.position_ids_bL
    found, weights = ulysses.inner(module, *heads, ulysses.mask, **rest)
    return _heads_for_tokens(found, ulysses.group), weights


def _tokens_for_heads(states_bhld: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, h, l, d] -> [b, h / size, L, d]."""
    b, h, length, d = states_bhld.shape
    size = group.size()
    parts = states_bhld.view(b, size, h // size, length, d).transpose(0, 1)
    return _exchange(parts, group).permute(1, 2, 0, 3, 4).reshape(b, h // size, size * length, d)


def _heads_for_tokens(states_bLhd: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, L, h / size, d] -> [b, l, h, d]."""
    b, length, h, d = states_bLhd.shape
    size = group.size()
    parts = states_bLhd.view(b, size, length // size, h, d).transpose(0, 1)
    return _exchange(parts, group).permute(1, 2, 0, 3, 4).reshape(b, length // size, size * h, d)


def _repeated(states_bhld: torch.Tensor, repeats: int) -> torch.Tensor:
    return states_bhld if repeats == 1 else states_bhld.repeat_interleave(repeats, dim=1)


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """parts[i] to rank i; from rank i into result[i]."""
    return cast("torch.Tensor", _Exchange.apply(parts, group))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        returned = torch.empty_like(grad)
        dist.all_to_all_single(returned, grad, group=ctx.group)
        return returned, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_n: torch.Tensor, counts: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.first, ctx.count = sum(counts[: group.rank()]), counts[group.rank()]
        padded = values_n.new_zeros(max(counts))
        padded[: len(values_n)] = values_n
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=group)
        return torch.cat([values[:count] for values, count in zip(found, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad[ctx.first : ctx.first + ctx.count].clone(), None, None


def _widened(batch: TokenBatch, size: int) -> TokenBatch:
    """Padding on the right up to a multiple of `size` tokens. Packed rows get it as a row of its own."""
    ids, positions = batch.input_ids_bL, batch.position_ids_bL
    missing = -ids.shape[1] % size
    if not missing:
        return batch
    ids = nn.functional.pad(ids, (0, missing))
    if positions is not None:
        tail = torch.arange(missing) if batch.is_packed else positions.new_zeros(missing)
        positions = torch.cat([positions, tail.expand(len(positions), -1)], dim=1)
    return TokenBatch(
        input_ids_bL=ids,
        position_ids_bL=positions,
        select_n=batch.select_n,
        labels_n=batch.labels_n,
        lengths=batch.lengths,
        is_packed=batch.is_packed,
    )


def _share_heads(attention: Any, config: PreTrainedConfig, size: int, tp: int) -> None:
    groups = attention.num_key_value_groups
    attention.ulysses_repeats = _repeats(config.num_key_value_heads // tp, groups, size)
    attention.num_key_value_groups = groups // attention.ulysses_repeats


def _repeats(key_heads: int, groups: int, size: int) -> int:
    """The smallest number of copies of each key head with which `size` ranks share them evenly.

    groups: query heads a key head, which the copies share in turn. 2 key heads of 6 queries each on 4 ranks: 2.
    """
    return next(copies for copies in range(1, groups + 1) if groups % copies == 0 and key_heads * copies % size == 0)


def _check(config: PreTrainedConfig, size: int, tp: int) -> None:
    where = f"ulysses_sequence_parallel_size = {size}"
    heads = config.num_attention_heads // tp
    if heads % size:
        shown = f"{config.num_attention_heads} attention heads" + (f" / tensor parallel {tp} = {heads}" if tp > 1 else "")
        raise ModelError(f"{where} must divide the model's {shown}: {heads} / {size} = {heads / size:.3g}")
    window = getattr(config, "sliding_window", None)  # of models that do not tell each layer's type: of all layers
    types: Sequence[str] = getattr(config, "layer_types", None) or (["sliding_attention"] if window else [])
    if other := sorted(set(types) - {"full_attention"}):
        raise ModelError(f"{where}: the model has layers of {other[0]}; sequence parallel has full attention alone")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _ROPES_OF_LENGTH:
        raise ModelError(f"{where}: the model's {rope} position embedding depends on a length that no rank sees alone")


def _eager_of(lm: PreTrainedModel) -> Any:
    return vars(sys.modules[type(lm).__module__]).get("eager_attention_forward")
