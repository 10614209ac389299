"""What is done to a model before it is sharded, on one rank: packed rows, checkpointed layers, wide norms, and what is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import MistralConfig, MistralForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedModel

from asyncrl.config import FSDPConfig, ModelConfig
from asyncrl.errors import ConfigError, ModelError
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import Policy, build_policy, decoder_layers, load_model
from asyncrl.training.norms import use_wide_norms
from asyncrl.training.placement import Placement, checkpoint_layers
from asyncrl.training.sequence_parallel import SequenceParallel, _repeats
from asyncrl.training.tensor_parallel import cut_layers
from asyncrl.training.token_batch import TokenBatch, packed, token_batch
from asyncrl.training.value_model import build_value_model

MakeModel = Callable[..., Path]
MakeLM = Callable[..., PreTrainedModel]


@pytest.fixture
def batch() -> TokenBatch:
    """Three rows of 4, 9 and 6 tokens, the last tokens of each the policy's."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(37, (length,), generator=generator) for length in (4, 9, 6)]
    return token_batch(rows, [torch.ones(3, dtype=torch.bool), torch.tensor([True, False, True, True]), torch.ones(5) > 0])


def test_packed_rows_have_no_padding_and_positions_that_start_again(batch: TokenBatch) -> None:
    one = packed(batch)
    assert one.input_ids_bL.shape == (1, 19)
    assert one.position_ids_bL is not None
    assert one.position_ids_bL[0].tolist() == [*range(4), *range(9), *range(6)]
    torch.testing.assert_close(one.input_ids_bL[0, one.select_n + 1], batch.labels_n)
    assert packed(replace(batch, position_ids_bL=torch.zeros_like(batch.input_ids_bL))).input_ids_bL.shape == (3, 9)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_packed_rows_have_the_log_probs_of_padded_ones(kind: str, make_lm: MakeLM, batch: TokenBatch) -> None:
    lm = make_lm(kind, initializer_range=0.3).double()
    padded, one_row = Policy(lm)(batch)[0], Policy(lm, Placement(packs=True))(batch)[0]
    torch.testing.assert_close(one_row, padded, rtol=0, atol=1e-6)


def test_checkpointed_layers_run_again_in_the_backward_pass_alone(make_lm: MakeLM, batch: TokenBatch) -> None:
    plain, saving = (Policy(make_lm("qwen2")) for _ in range(2))
    runs: list[str] = []
    for layer in decoder_layers(saving.lm):
        layer.register_forward_hook(lambda *_: runs.append("whole"))
        layer.get_submodule("mlp").register_forward_pre_hook(lambda *_: runs.append("mlp"))
    checkpoint_layers(decoder_layers(saving.lm))
    with torch.no_grad():
        saving(batch)
    assert runs == ["mlp", "whole"] * 2
    for policy in (plain, saving):
        policy(batch)[0].sum().backward()
    assert runs == ["mlp", "whole"] * 4 + ["mlp"] * 2
    for one, other in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_mixed_precision_keeps_weights_and_gradients_in_the_models_type(make_model: MakeModel, batch: TokenBatch) -> None:
    seen: list[torch.dtype] = []
    policy = build_policy(ModelConfig(path=str(make_model())), open_mesh(), FSDPConfig(mixed_precision=True))
    policy.lm.get_submodule("model.layers.1.mlp").register_forward_hook(lambda *values: seen.append(values[-1].dtype))
    log_probs, _ = policy(batch)
    log_probs.sum().backward()
    assert (set(seen), log_probs.dtype) == ({torch.bfloat16}, torch.float32)
    assert {parameter.grad.dtype for parameter in policy.parameters()} == {torch.float32}  # type: ignore[union-attr]


def test_the_head_of_a_value_model_is_float32_under_mixed_precision(make_model: MakeModel, batch: TokenBatch) -> None:
    model = build_value_model(ModelConfig(path=str(make_model())), open_mesh(), FSDPConfig(mixed_precision=True))
    seen: list[torch.dtype] = []
    model.score.register_forward_hook(lambda *values: seen.append(values[-1].dtype))
    model(batch).sum().backward()
    assert seen == [torch.float32]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_the_norms_of_a_float64_model_compute_in_float64(kind: str, make_model: MakeModel) -> None:
    """The library's norms do not: they are right to seven digits."""
    lm = load_model(ModelConfig(path=str(make_model(kind)), dtype="float64"))
    norm: Any = lm.get_submodule("model.norm")
    hidden = torch.randn(1, 5, 16, dtype=torch.float64)
    expected = norm(hidden)
    use_wide_norms(lm)
    torch.testing.assert_close(norm(hidden), expected, rtol=1e-5, atol=1e-6)
    exact = hidden / (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight
    torch.testing.assert_close(norm(hidden), exact, rtol=1e-14, atol=1e-14)


def test_a_norm_of_another_kind_stays() -> None:
    """Such as those that multiply by 1 + weight."""

    class OtherRMSNorm(torch.nn.Module):
        variance_epsilon = 1e-6

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * (1 + self.weight)

    norm = OtherRMSNorm()
    use_wide_norms(norm)
    assert torch.equal(norm(torch.ones(1, 4)), torch.full((1, 4), 2.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("key_heads", "groups", "size", "copies"), [(2, 6, 4, 2), (4, 2, 4, 1), (3, 2, 2, 2), (1, 8, 8, 8), (3, 4, 4, 4), (6, 2, 4, 2)]
)
def test_key_heads_are_repeated_as_few_times_as_it_takes(key_heads: int, groups: int, size: int, copies: int) -> None:
    assert _repeats(key_heads, groups, size) == copies


@pytest.mark.parametrize(("kind", "summed"), [("qwen3", 4), ("llama", 0)])
def test_the_norms_of_heads_are_summed_by_the_plan(kind: str, summed: int, make_lm: MakeLM) -> None:
    open_mesh()
    assert len(cut_layers(make_lm(kind), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))) == summed


def test_a_norm_of_heads_that_the_plan_forgets_is_refused() -> None:
    """Each rank would have a gradient of its own for it, and after a step a weight of its own."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    lm = PhiForCausalLM(PhiConfig(vocab_size=9, num_hidden_layers=1, qk_layernorm=True, **sizes))  # type: ignore[no-untyped-call]
    open_mesh()
    with pytest.raises(ModelError, match=r"^tensor_model.* = 1: .* phi model .* gradient of model.layers.0.self_attn.q_layernorm"):
        cut_layers(lm, init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))


@pytest.mark.parametrize("window", [None, 4])
def test_a_window_of_all_layers_is_no_full_attention(window: int | None) -> None:
    """A model of the library may have one without a list of its layers' types; the mask of shared rows has none."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=9, num_hidden_layers=1, sliding_window=window, **sizes)
    lm = MistralForCausalLM(config)  # type: ignore[no-untyped-call]
    open_mesh()
    assert dist.group.WORLD is not None
    refused = pytest.raises(ModelError, match="the model has layers of sliding_attention")
    with refused if window else nullcontext():
        SequenceParallel(lm, dist.group.WORLD)


def test_what_needs_a_gpu_is_refused_in_one_line(make_model: MakeModel) -> None:
    config = ModelConfig(path=str(make_model()))
    with pytest.raises(ConfigError, match=r"^actor.fsdp_config.offload_policy .* there is no GPU here$"):
        build_policy(config, open_mesh(), FSDPConfig(offload_policy=True))
    with pytest.raises(ConfigError, match=r"^model.attn_implementation = 'flex_attention' needs a GPU; use 'sdpa'$"):
        build_policy(config.model_copy(update={"attn_implementation": "flex_attention"}), open_mesh())
