"""Adapters in a snapshot: merged into the weights of the last whole one, never twice, and all or nothing."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.algorithms.low_rank import merge_all
from asyncrl.errors import EngineError
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.rollout.weights import EngineWeights

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
MakeTiny = Callable[..., PreTrainedModel]


def adapter(model: PreTrainedModel, *stems: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for stem in stems:
        rows, columns = model.state_dict()[f"{stem}.weight"].shape
        tensors[f"{stem}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    return tensors


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_is(model: PreTrainedModel, want: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, want[name]), name


def test_every_adapter_starts_from_the_base(tiny_model: MakeTiny) -> None:
    """A layer that has none any more is what it was."""
    model = tiny_model("qwen2", 1)
    base, weights = state(model), EngineWeights(model)
    for seed, stems in enumerate([(Q, DOWN), (Q, DOWN), (DOWN,)]):
        tensors = adapter(model, *stems, seed=seed)
        weights.load(tensors)
        assert_is(model, merge_all({**base, **tensors}))


def test_a_whole_snapshot_is_a_new_base(tiny_model: MakeTiny) -> None:
    model, other = tiny_model("qwen2", 1), state(tiny_model("qwen2", 2))
    weights = EngineWeights(model)
    weights.load(adapter(model, Q))
    weights.load(other)
    assert_is(model, other)
    tensors = adapter(model, DOWN, seed=3)
    weights.load(tensors)
    assert_is(model, merge_all({**other, **tensors}))


@pytest.mark.parametrize("change", ["unknown", "vector", "half", "columns", "rank", "mixed"])
def test_an_adapter_that_does_not_fit_changes_nothing(tiny_model: MakeTiny, change: str) -> None:
    model = tiny_model("qwen2", 1)
    weights, tensors = EngineWeights(model), adapter(model, DOWN, Q)
    weights.load(adapter(model, Q, seed=7))
    before = state(model)
    match change:
        case "unknown":
            tensors["model.extra.lora_A.weight"] = tensors["model.extra.lora_B.weight"] = torch.zeros(2, 2)
        case "vector":
            tensors["model.norm.lora_A.weight"] = tensors["model.norm.lora_B.weight"] = torch.zeros(2, 2)
        case "half":
            del tensors[f"{Q}.lora_B.weight"]
        case "columns":
            tensors[f"{Q}.lora_A.weight"] = torch.zeros(2, 3)
        case "rank":
            tensors[f"{Q}.lora_B.weight"] = torch.zeros(len(before[f"{Q}.weight"]), 3)
        case "mixed":
            tensors |= before
    with pytest.raises(EngineError, match=r"lora_|adapter"):
        weights.load(tensors)
    assert_is(model, before)


async def test_the_engine_samples_the_same_with_adapters_and_with_merged_weights(
    tiny_model: MakeTiny, request_of: Callable[..., object], snapshot_of: Callable[..., object]
) -> None:
    """The packed copies of the weights are renewed as well."""
    tensors = adapter(tiny_model("qwen2", 1), Q, DOWN)
    whole = merge_all({**state(tiny_model("qwen2", 1)), **tensors})
    found = []
    for published in (tensors, whole):
        async with TorchEngine(tiny_model("qwen2", 1), max_num_seqs=2, context_len=32) as engine:
            before = await engine.generate(request_of(seed=1, max_tokens=8))  # type: ignore[arg-type]
            await engine.publish(1, snapshot_of(published))  # type: ignore[arg-type]
            found.append(await engine.generate(request_of(seed=1, max_tokens=8)))  # type: ignore[arg-type]
    assert found[0] == found[1]
    assert found[0].log_probs != before.log_probs
