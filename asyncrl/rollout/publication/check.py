"""Does a snapshot fit the model that an engine serves? Names and shapes against the headers of the model's safetensors files.

Asked before the first number moves: an engine that has taken half a snapshot is good for nothing any more.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from asyncrl.errors import EngineError, ModelError
from asyncrl.wording import message_of, names_shown

HEAD = "lm_head.weight"
IGNORED = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints have and no engine loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeaders:
    """Shapes of a model's weights by name, and whether its head is its embedding."""

    shapes: Mapping[str, tuple[int, ...]]
    is_tied: bool


def read_headers(model: str) -> ModelHeaders:
    """Of the model folder. Raises ModelError when it has no safetensors, or one that cannot be read."""
    folder = Path(model)
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise ModelError(f"{model!r} has no *.safetensors: what an engine is given is checked against their headers")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        shapes |= _shapes(path)
    kept = {name: shape for name, shape in shapes.items() if not name.endswith(IGNORED)}
    return ModelHeaders(shapes=kept, is_tied=_is_tied(folder, kept))


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {message_of(error)}") from error


def _is_tied(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """A config may leave the key out where its value is the default of its kind of model."""
    if HEAD not in shapes:
        return True
    from transformers import AutoConfig  # seconds to import, and the trainer has done so

    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ModelError(f"{str(folder)!r}: config.json cannot be read: {message_of(error)}") from error
    return bool(config.get_text_config().tie_word_embeddings)


def fitting(headers: ModelHeaders, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is to be sent of a snapshot: all of it, but for a head that is the embedding. Changes nothing.

    Raises EngineError for unexpected and missing names, other shapes, and a tied head that is not equal to an embedding.
    """
    sent, shapes = dict(tensors), dict(headers.shapes)
    if headers.is_tied:
        head = sent.pop(HEAD, None)
        shapes.pop(HEAD, None)
        if head is not None and not any(_is_same(head, tensor) for tensor in sent.values()):
            raise EngineError(f"snapshot gives {HEAD!r} values of its own, and in the engine's model it is tied to the embedding")
    if unexpected := sorted(sent.keys() - shapes.keys()):
        raise EngineError(f"snapshot has tensors that the engine's model lacks: {names_shown(unexpected, limit=3)}")
    if missing := sorted(shapes.keys() - sent.keys()):
        raise EngineError(f"snapshot lacks parameters of the engine's model: {names_shown(missing, limit=3)}")
    for name, tensor in sent.items():
        if tuple(tensor.shape) != shapes[name]:
            raise EngineError(f"snapshot tensor {name!r} has shape {list(tensor.shape)}, the engine's model {list(shapes[name])}")
    return sent


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, where NaN equals NaN: a diverged model is the reader's business, not a broken tie."""
    if one is other:
        return True
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
