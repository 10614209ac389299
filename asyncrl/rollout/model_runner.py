"""Forwards of an unchanged Hugging Face model over the slot cache: token ids in, next-token logits out.

Owns the model copy and its cache; knows slots, positions and padding, and nothing of requests, sampling or versions.

Deterministic setting. On CPU the bits of a row depend on the shape of the forward it is in: a matrix product with fewer than 4
rows, a key window off the vector width or another padding of the prompt takes other instructions. So: 1 decode always runs all
slots, whose number is rounded up to `SLOT_MULTIPLE`; 2 the key window is a multiple of `WINDOW_MULTIPLE` and at least
`LEAST_WINDOW`; 3 one prompt a prefill, padded to a multiple of `WINDOW_MULTIPLE`. It holds with one intra-op thread.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from asyncrl.errors import ModelError
from asyncrl.rollout.decode_attention import NAME, WINDOW_MULTIPLE, decode_mask
from asyncrl.rollout.model_shape import model_shape, output_embeddings
from asyncrl.rollout.packed_linear import pack_linears, repack
from asyncrl.rollout.slot_cache import PrefillPlacement, SlotCache
from asyncrl.rollout.weights import EngineWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLOT_MULTIPLE = 8
"""Slots of the deterministic setting are rounded up to this: products of 4 rows or more were seen to give a row the same bits."""

LEAST_WINDOW = 64
"""Keys that the deterministic setting looks at at least: torch multiplies matrices of less than 400 products by another kernel."""

MAX_PREFILL_TOKENS = 4096
"""Padded tokens of one prefill forward, which bound its activations. A longer prompt has a forward of its own."""


class ModelRunner:
    """One model and its slots. Every method but the constructor belongs to the engine's thread."""

    def __init__(self, model: "PreTrainedModel", *, num_slots: int, context_len: int, deterministic: bool) -> None:
        self.shape = model_shape(model, context_len)
        self.deterministic = deterministic
        self._model = model
        model.train(False).requires_grad_(False)
        self._least_window = LEAST_WINDOW if deterministic else WINDOW_MULTIPLE
        num_slots = _round_up(num_slots, SLOT_MULTIPLE) if deterministic else num_slots
        self.cache = SlotCache(num_slots, self._window(context_len), self.shape)
        self.forward_tokens = 0
        """Tokens that the last forward computed: equal prompts once, padding and idle slots as well."""
        self._last: torch.Tensor | None = None
        reference = _plain_logits(model)
        model.set_attn_implementation(NAME)
        self._packed = pack_linears(model)
        self._weights = EngineWeights(model)
        output_embeddings(model).register_forward_pre_hook(self._keep_last)
        self._check(reference)

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> torch.Tensor:
        """Fill `slots[i]` with the keys of `prompts[i]`. Returns logits [len(prompts), vocab] after each prompt's last token.

        Equal prompts, as the sessions of a group have, are computed once.
        """
        unique = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        source = torch.tensor([unique[tuple(prompt)] for prompt in prompts])
        longest = max(map(len, unique))
        length = _round_up(longest, WINDOW_MULTIPLE) if self.deterministic else longest
        ids = torch.tensor([[*prompt, *([0] * (length - len(prompt)))] for prompt in unique])
        self.cache.place(PrefillPlacement(slots=torch.tensor(slots), source=source))
        self._last = torch.tensor([len(prompt) - 1 for prompt in unique])
        logits = self._forward(ids, torch.arange(length).expand(len(unique), -1), None)
        return logits.index_select(0, source)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token a row for the first rows. tokens, positions: int64 [rows], the position that the token takes.

        Returns logits [rows, vocab], which the caller may overwrite.
        """
        num_rows = tokens.shape[0]
        window = self._window(int(positions.max()) + 1)
        self.cache.place_decode(positions, window)
        if self.deterministic:
            idle = (0, self.cache.num_slots - num_rows)
            tokens, positions = torch.nn.functional.pad(tokens, idle), torch.nn.functional.pad(positions, idle)
        self._last = None
        mask = decode_mask(positions, window, self.shape.dtype)
        return self._forward(tokens[:, None], positions[:, None], mask)[:num_rows]

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a snapshot's weights. Raises EngineError, with nothing changed, when names or shapes do not match."""
        self._weights.load(tensors)
        repack(self._packed)

    def _window(self, length: int) -> int:
        return max(self._least_window, _round_up(length, WINDOW_MULTIPLE))

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        self.forward_tokens = ids.numel()
        out = self._model(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self.cache, use_cache=True)
        logits: torch.Tensor = out.logits[:, -1]
        return logits.float()

    def _keep_last(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Hand the head only the hidden state after each prompt's last token: padded prompts end at different places."""
        if self._last is None:
            return None
        (hidden,) = args
        return (hidden[torch.arange(hidden.shape[0]), self._last][:, None],)

    @torch.inference_mode()
    def _check(self, reference: torch.Tensor) -> None:
        """Refuse a model whose own forward is not reproduced: `attend` would ignore a soft cap, a sink or a bias."""
        ids = _probe_ids(self._model)
        self.prefill([ids[:-1]], [0])
        logits = self.decode(torch.tensor(ids[-1:]), torch.tensor([len(ids) - 1]))[0]
        self.cache.clear(0)
        tolerance = 1e-3 if self.shape.dtype == torch.float32 else 0.1
        scale = max(1.0, float(reference.abs().max()))
        if not torch.allclose(logits, reference, rtol=0, atol=tolerance * scale):
            name = type(self._model).__name__
            raise ModelError(f"rollout engine 'torch' cannot serve {name}: it does not reproduce the model's own logits")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _probe_ids(model: "PreTrainedModel") -> list[int]:
    return [place % int(model.config.get_text_config(decoder=True).vocab_size) for place in range(3)]


@torch.inference_mode()
def _plain_logits(model: "PreTrainedModel") -> torch.Tensor:
    """The model's own next-token logits [vocab] after the probe, before anything of it is changed."""
    logits: torch.Tensor = model(input_ids=torch.tensor([_probe_ids(model)]), use_cache=False).logits[0, -1]
    return logits.float()
