"""A snapshot against the headers of the model that the engine serves."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.errors import EngineError, ModelError
from asyncrl.rollout.publication.check import HEAD, ModelHeaders, fitting, read_headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

EMBEDDING = "model.embed_tokens.weight"


def _weights(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("shard_size", ["50GB", "10KB"])
def test_a_models_own_weights_fit(
    make_lm: "Callable[..., PreTrainedModel]", tmp_path: Path, kind: str, is_tied: bool, shard_size: str
) -> None:
    model = make_lm(kind, tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    headers = read_headers(str(tmp_path))
    assert headers.is_tied == is_tied
    weights = _weights(model)
    assert fitting(headers, weights) == weights


def _headers(*, is_tied: bool = False, **more: tuple[int, ...]) -> ModelHeaders:
    return ModelHeaders(shapes={EMBEDDING: (4, 2), HEAD: (4, 2), "norm": (2,), **more}, is_tied=is_tied)


def _tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {EMBEDDING: torch.ones(4, 2), HEAD: torch.zeros(4, 2), "norm": torch.ones(2), **more}


def test_a_tied_head_may_be_absent_or_equal_and_is_not_sent() -> None:
    tensors = _tensors()
    del tensors[HEAD]
    assert fitting(_headers(is_tied=True), tensors) == tensors
    for equal in (tensors[EMBEDDING], tensors[EMBEDDING].clone()):
        assert list(fitting(_headers(is_tied=True), {**tensors, HEAD: equal})) == [EMBEDDING, "norm"]
    tensors[EMBEDDING][0, 0] = torch.nan
    fitting(_headers(is_tied=True), {**tensors, HEAD: tensors[EMBEDDING].clone()})
    with pytest.raises(EngineError, match=r"'lm_head\.weight' values of its own.* tied to the embedding"):
        fitting(_headers(is_tied=True), _tensors())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (_tensors(extra=torch.zeros(1)), "has tensors that the engine's model lacks: 'extra'"),
        (
            {"norm": torch.ones(2), HEAD: torch.zeros(4, 2)},
            r"lacks parameters of the engine's model: 'model\.embed_tokens\.weight'",
        ),
        ({EMBEDDING: torch.ones(4, 2), "norm": torch.ones(2)}, r"lacks parameters of the engine's model: 'lm_head\.weight'"),
        (_tensors(norm=torch.ones(3)), r"'norm' has shape \[3\], the engine's model \[2\]"),
        ({"norm.lora_A.weight": torch.ones(1, 2)}, "has tensors that the engine's model lacks"),
    ],
)
def test_what_does_not_fit_is_named(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        fitting(_headers(), tensors)


def test_buffers_of_old_checkpoints_are_not_asked_for(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}, tmp_path / "model.safetensors")
    assert read_headers(str(tmp_path)) == ModelHeaders(shapes={"w": (2,)}, is_tied=True)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read_headers(str(tmp_path))
    save_file({HEAD: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_headers(str(tmp_path))
