"""A Hugging Face model directory out of weights in memory: safetensors, config, tokenizer, chat template. Loads as any other."""

from collections.abc import Mapping
from pathlib import Path

import torch

from asyncrl.config import ModelConfig
from asyncrl.training.disk import Disk

_TOKENIZER_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
)


def export_model(
    folder: Path, tensors: Mapping[str, torch.Tensor], config_json: str, source: ModelConfig, *, disk: Disk | None = None
) -> None:
    """Write a model directory into `folder` (made when missing).

    tensors: by Hugging Face name, tied weights once; config_json: the model's config.json; source: where tokenizer, generation
    config and chat template come from. A template given by `model.chat_template` becomes the directory's own.
    """
    disk = disk or Disk()
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
