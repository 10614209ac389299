"""check_model_files: does a model folder have everything a run needs? Looks at names and small JSON files only; loads no torch.

Place: cli (before anything heavy is imported) -> [model_files]. Whether the files are good is for the loaders to say.
"""

import json
from pathlib import Path

from asyncrl.config import ModelConfig
from asyncrl.errors import ModelError

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")


def check_model_files(config: ModelConfig) -> None:
    """Raises ModelError, one line that names the folder and the missing file, or the key to set."""
    folder = _folder(config.path, "model.path")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path = {config.path!r} has no config.json; it must be a local Hugging Face model folder")
    if not _has_any(folder, _WEIGHTS):
        raise ModelError(f"model.path = {config.path!r} has no weights (*.safetensors)")
    key, path = ("model.tokenizer_path", config.tokenizer_path) if config.tokenizer_path else ("model.path", config.path)
    tokenizer = _folder(path, key)
    if not _has_any(tokenizer, _TOKENIZERS):
        raise ModelError(
            f"{key} = {path!r} has no tokenizer ({', '.join(_TOKENIZERS)}); set model.tokenizer_path to a folder that has one"
        )
    _check_chat_template(config, tokenizer, f"{key} = {path!r}")


def _check_chat_template(config: ModelConfig, tokenizer: Path, where: str) -> None:
    if config.chat_template:
        if not Path(config.chat_template).is_file():
            raise ModelError(f"model.chat_template = {config.chat_template!r}: no such file")
    elif not _has_any(tokenizer, _TEMPLATES) and not _names_template(tokenizer / "tokenizer_config.json", where):
        raise ModelError(f"{where} has no chat template (chat_template.jinja); set model.chat_template to a Jinja file")


def _names_template(path: Path, where: str) -> bool:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: tokenizer_config.json cannot be read: {error}") from error
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def _folder(path: str, key: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{key} = {path!r}: no such folder; models are read from local Hugging Face folders, never fetched")
    return folder


def _has_any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)
