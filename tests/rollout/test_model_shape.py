"""Models that the embedded engine refuses, each with one line."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from asyncrl.errors import ConfigError, ModelError
from asyncrl.rollout.model_runner import ModelRunner
from asyncrl.rollout.model_shape import ModelShape
from asyncrl.rollout.packed_linear import PackedLinear, pack_linears
from asyncrl.rollout.slot_cache import SlotCache

TinyModel = Callable[..., PreTrainedModel]


def serve(model: PreTrainedModel, context_len: int = 64) -> ModelRunner:
    return ModelRunner(model, num_slots=2, context_len=context_len, deterministic=False)


def test_sliding_window_layers_are_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("qwen2", 1, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ModelError, match="DynamicSlidingWindowLayer"):
        serve(model)


def test_rotary_frequencies_of_the_longest_row_are_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("llama", 1, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ModelError, match="'dynamic'"):
        serve(model)


def test_context_beyond_the_model_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ModelError, match="512 positions"):
        serve(tiny_model("qwen2", 1), context_len=513)


def test_a_model_that_is_not_reproduced_is_refused(tiny_model: TinyModel) -> None:
    """Whatever an own attention function does besides (here: a bias), the engine's would leave out."""

    def biased(module: torch.nn.Module, query: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, None]:
        out, _ = sdpa_attention_forward(module, query, *args, **kwargs)  # type: ignore[arg-type]
        return out + 0.5, None

    AttentionInterface.register("test-biased", biased)
    model = tiny_model("qwen2", 1)
    model.set_attn_implementation("test-biased")
    with pytest.raises(ModelError, match="reproduce"):
        serve(model)


def test_half_precision_models_are_served_unpacked(tiny_model: TinyModel) -> None:
    model = tiny_model("qwen2", 1).to(torch.bfloat16)  # type: ignore[arg-type]
    assert pack_linears(model) == []
    assert serve(model).shape.dtype == torch.bfloat16


def test_packing_changes_neither_names_nor_results(tiny_model: TinyModel) -> None:
    model = tiny_model("qwen2", 1)
    names, ids = list(model.state_dict()), torch.arange(12)[None]
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        layers = pack_linears(model)
        after = model(input_ids=ids).logits
    assert list(model.state_dict()) == names
    assert len(layers) == 15
    assert all(isinstance(layer, PackedLinear) for layer in layers)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)


def test_a_cache_that_does_not_fit_into_memory_is_told_with_its_size() -> None:
    shape = ModelShape(num_layers=2, num_kv_heads=8, head_dim=128, vocab_size=10, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"rollout\.max_num_seqs = 1000000000: .* need 15258789 GiB"):
        SlotCache(10**9, 1000, shape)
