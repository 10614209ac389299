"""A Hugging Face model directory out of weights in memory: safetensors, config, tokenizer, chat template. Loads as any other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.config import ModelConfig
from asyncrl.training.dcp import on_rank_0
from asyncrl.training.disk import Disk
from asyncrl.training.learner import Learner
from asyncrl.training.lora import adapter_alone, export_adapter, whole_model
from asyncrl.training.publication import gather

AnyLearner = Learner[Any]

_TOKENIZER_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
)


def export_policy(learner: AnyLearner, folder: Path, source: ModelConfig, *, disk: Disk | None = None) -> None:
    """The model as it is, adapters merged in, as a directory that loads as any other; the adapters alone are in `folder/adapter`.

    A collective. source: as of `export_model`. Raises OSError, on all ranks, when the disk refuses.
    """
    names, mesh, disk = list(learner.parameters), learner.mesh, disk or Disk()
    tensors = gather(whole_model(names, source), learner.parameters, mesh)
    on_rank_0(mesh, lambda: export_model(folder, tensors, learner.module.config_json(), source, disk=disk))
    if source.lora_rank:
        adapter = gather(adapter_alone(names, source, scaled=False), learner.parameters, mesh)
        on_rank_0(mesh, lambda: export_adapter(folder / "adapter", adapter, source, disk=disk))


def export_model(folder: Path, tensors: Mapping[str, torch.Tensor], config_json: str, source: ModelConfig, *, disk: Disk) -> None:
    """Write a model directory into `folder` (made when missing).

    tensors: by Hugging Face name, tied weights once; config_json: the model's config.json; source: where tokenizer, generation
    config and chat template come from. A template given by `model.chat_template` becomes the directory's own.
    """
    write_model(folder, tensors, config_json, disk=disk)
    for file in _companions(source):
        disk.copy(file, folder / file.name)
    if source.chat_template:
        disk.copy(Path(source.chat_template), folder / "chat_template.jinja")
    disk.sync_folder(folder)


def write_model(folder: Path, tensors: Mapping[str, torch.Tensor], config_json: str, *, disk: Disk) -> None:
    """Weights and config.json alone, into `folder` (made when missing)."""
    disk.make_folder(folder)
    disk.write(folder / "config.json", config_json.encode())
    disk.write_tensors(folder / "model.safetensors", tensors)
    disk.sync_folder(folder)


def _companions(source: ModelConfig) -> list[Path]:
    tokenizer = Path(source.tokenizer_path or source.path)
    files = {file for pattern in _TOKENIZER_PATTERNS for file in tokenizer.glob(pattern)}
    if source.chat_template:
        files = {file for file in files if not file.name.startswith("chat_template.")}
    return sorted(files) + sorted(Path(source.path).glob("generation_config.json"))
