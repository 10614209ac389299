"""A preallocated key-value cache with one slot a row, as a Hugging Face cache whose layers scatter by slot and position.

Each layer holds keys and values [slots, kv_heads, context, head_dim]. The engine's thread says with a `Placement` where the next
forward's keys go, runs the unchanged model, and the layers do the rest. Rows at different positions share a forward that way.

Invariants: 1 only the engine's thread touches a cache; 2 a freed slot is zero, so nothing of a former tenant (a NaN would survive
0 x NaN under the attention mask) reaches the next; 3 a decode forward writes one position of each active slot and nothing else.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.rollout.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlacement:
    """Row i of a prefill forward is prompt `source[i]` of its batch, written to slot `slots[i]` from position 0."""

    slots: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlacement:
    """Rows 0..num_active-1 of a decode forward are the slots of that number. `index`: int64, one entry a (slot, head): where its
    key goes in the cache seen as [slots * kv_heads * context, head_dim]. `window`: keys that attention looks at."""

    index: torch.Tensor
    num_active: int
    window: int


Placement = PrefillPlacement | DecodePlacement


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer. `placement` is set before each forward."""

    is_sliding = False
    placement: Placement

    def __init__(self, num_slots: int, context_len: int, shape: "ModelShape") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = (num_slots, shape.num_kv_heads, context_len, shape.head_dim)
        self.keys: torch.Tensor = torch.zeros(size, dtype=shape.dtype)
        self.values: torch.Tensor = torch.zeros(size, dtype=shape.dtype)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the states [rows, kv_heads, tokens, head_dim]; returns the keys and values that this forward attends to."""
        match self.placement:
            case PrefillPlacement(slots=slots, source=source):
                for cache, states in ((self.keys, key_states), (self.values, value_states)):
                    cache[:, :, : states.shape[2]].index_copy_(0, slots, states.index_select(0, source))
                return key_states, value_states
            case DecodePlacement(index=index, num_active=num_active, window=window):
                rows = key_states.shape[0]
                for cache, states in ((self.keys, key_states), (self.values, value_states)):
                    cache.view(-1, cache.shape[3]).index_copy_(0, index, states[:num_active].reshape(-1, cache.shape[3]))
                return self.keys[:rows, :, :window], self.values[:rows, :, :window]

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another."""
        for cache in (self.keys, self.values):
            cache[target] = cache[source]

    def clear(self, slot: int) -> None:
        """Zero a slot."""
        self.keys[slot].zero_()
        self.values[slot].zero_()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is lazy here."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: positions are always given, never derived from the cache."""
        return 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


def _allocate(num_slots: int, context_len: int, shape: "ModelShape") -> list[SlotLayer]:
    try:
        return [SlotLayer(num_slots, context_len, shape) for _ in range(shape.num_layers)]
    except RuntimeError as error:  # torch has no class for memory that is not there
        size_bytes = 2 * shape.num_layers * num_slots * shape.num_kv_heads * context_len * shape.head_dim * shape.dtype.itemsize
        raise ConfigError(
            f"rollout.max_num_seqs = {num_slots}: {num_slots} slots of {context_len} tokens need {size_bytes / 2**30:.0f} GiB for "
            "the cache, more than there is; lower it, or data.max_prompt_length and data.max_response_length"
        ) from error


class SlotCache(Cache):
    """The layers of one model. Free slots are zero."""

    def __init__(self, num_slots: int, context_len: int, shape: "ModelShape") -> None:
        self.slot_layers = _allocate(num_slots, context_len, shape)
        self.num_slots = num_slots
        self.context_len = context_len
        self._num_heads = shape.num_kv_heads
        # First key of each (slot, head) in the flat view: a decode step adds its positions and has the index of all layers.
        self._starts = (torch.arange(num_slots * shape.num_kv_heads) * context_len).view(num_slots, shape.num_kv_heads)
        super().__init__(layers=[*self.slot_layers])

    def place(self, placement: Placement) -> None:
        """Say where the next forward's keys go."""
        for layer in self.slot_layers:
            layer.placement = placement

    def place_decode(self, positions: torch.Tensor, window: int) -> None:
        """One new key at `positions[i]` of each of the first slots. positions: int64 [num_active]."""
        num_active = positions.shape[0]
        index = (self._starts[:num_active] + positions[:, None]).view(-1)
        self.place(DecodePlacement(index=index, num_active=num_active, window=window))

    def move(self, source: int, target: int) -> None:
        """Copy a row to another slot; the source keeps its content until it is cleared."""
        for layer in self.slot_layers:
            layer.move(source, target)

    def clear(self, slot: int) -> None:
        for layer in self.slot_layers:
            layer.clear(slot)

    def is_clear(self, slot: int) -> bool:
        """Whether nothing of a former tenant is left."""
        return not any(bool(layer.keys[slot].any() or layer.values[slot].any()) for layer in self.slot_layers)
