"""check_model_files: does a model folder have everything a run needs? Looks at names and small JSON files only; loads no torch.
check_adapters: is the library there that makes them?

Place: cli (before anything heavy is imported) -> [model_files]. Whether the files are good is for the loaders to say.
"""

import importlib.util
import json
from pathlib import Path

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError, ModelError
from asyncrl.ports import Json

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")


def check_model_files(config: ModelConfig) -> None:
    """Raises ModelError, one line that names the folder and the missing file, or the key to set."""
    check_weights(config.path)
    key, path = ("model.tokenizer_path", config.tokenizer_path) if config.tokenizer_path else ("model.path", config.path)
    tokenizer = _folder(path, key)
    if not _has_any(tokenizer, _TOKENIZERS):
        raise ModelError(
            f"{key} = {path!r} has no tokenizer ({', '.join(_TOKENIZERS)}); set model.tokenizer_path to a folder that has one"
        )
    _check_chat_template(config, tokenizer, f"{key} = {path!r}")


def check_weights(path: str, *, key: str = "model.path") -> None:
    """Raises ModelError, one line that names the key and the folder, when it lacks config.json or weights."""
    folder = _folder(path, key)
    _settings(folder, path, key)
    if not _has_any(folder, _WEIGHTS):
        raise ModelError(f"{key} = {path!r} has no weights (*.safetensors)")


def check_adapters(config: ModelConfig) -> None:
    """Raises ConfigError when adapters are asked for and peft, an extra that no other run needs, is not installed."""
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise ConfigError(f"model.lora_rank = {config.lora_rank} needs peft, which is not installed: pip install 'asyncrl[lora]'")


def check_context(config: ModelConfig, context_len: int, *, key: str = "model.path") -> None:
    """Raises ModelError when prompt plus response can be longer than the model has positions (which some models do not say)."""
    settings = _settings(Path(config.path), config.path, key)
    inner = settings.get("text_config")
    positions = settings.get("max_position_embeddings") or (
        inner.get("max_position_embeddings") if isinstance(inner, dict) else None
    )
    if isinstance(positions, int) and 0 < positions < context_len:
        raise ModelError(
            f"{key} = {config.path!r} has {positions} positions, and a trajectory may have {context_len} tokens; lower "
            "data.max_prompt_length and data.max_response_length to that sum at most, and rollout.max_model_len where it is set"
        )


def _settings(folder: Path, path: str, key: str) -> dict[str, Json]:
    """config.json of the model. Raises ModelError when it is not there, or is no JSON object."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{key} = {path!r} has no config.json; it must be a local Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{key} = {path!r}: config.json cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{key} = {path!r}: config.json is not that of a model: it is no JSON object")
    return settings


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
