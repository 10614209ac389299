"""A model folder that lacks something is refused in one line, before torch is imported."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError, ModelError
from asyncrl.model_files import check_adapters, check_context, check_model_files, check_weights

FILES = {
    "config.json": "{}",
    "model.safetensors": "",
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"chat_template": "x"}',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_whole_folder_passes(folder: Path) -> None:
    check_model_files(ModelConfig(path=str(folder)))


def test_a_template_file_of_its_own_or_of_the_configuration_passes(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    template = folder / "chat_template.jinja"
    template.write_text("x", encoding="utf-8")
    check_model_files(ModelConfig(path=str(folder)))
    template.rename(folder / "other.jinja")
    check_model_files(ModelConfig(path=str(folder), chat_template=str(folder / "other.jinja")))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "config.json is not that of a model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "no chat template"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{}"), "no chat template"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "cannot be read"),
    ],
)
def test_what_is_missing_is_named(spoil: Callable[[Path], object], message: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        check_model_files(ModelConfig(path=str(folder)))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings", ['{"max_position_embeddings": 128}', '{"text_config": {"max_position_embeddings": 128}}'], ids=["flat", "nested"]
)
def test_a_trajectory_longer_than_the_models_positions_is_refused(settings: str, folder: Path) -> None:
    (folder / "config.json").write_text(settings)
    check_context(ModelConfig(path=str(folder)), 128)
    with pytest.raises(ModelError, match=r"has 128 positions, and a trajectory may have 129 tokens; lower data\.max_prompt_length"):
        check_context(ModelConfig(path=str(folder)), 129)


def test_the_critics_folder_needs_no_tokenizer_and_is_named_by_its_key(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    check_weights(str(folder), key="critic.model_path")
    (folder / "config.json").write_text('{"max_position_embeddings": 128}')
    with pytest.raises(ModelError, match=r"^critic\.model_path = '.*' has 128 positions, and a trajectory may have 129 tokens"):
        check_context(ModelConfig(path=str(folder)), 129, key="critic.model_path")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"^critic\.model_path = '.*' has no weights"):
        check_weights(str(folder), key="critic.model_path")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"^critic\.model_path = '.*' has no config\.json"):
        check_weights(str(folder), key="critic.model_path")
    with pytest.raises(ModelError, match=r"^critic\.model_path = 'absent': no such folder"):
        check_weights("absent", key="critic.model_path")


def test_a_model_that_does_not_say_how_long_it_is_passes(folder: Path) -> None:
    check_context(ModelConfig(path=str(folder)), 10**6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "no/such/model"}, "model.path = 'no/such/model': no such folder"),
        ({"tokenizer_path": "no/such/tokenizer"}, "model.tokenizer_path = 'no/such/tokenizer': no such folder"),
        ({"chat_template": "no.jinja"}, "model.chat_template = 'no.jinja': no such file"),
    ],
)
def test_a_wrong_path_names_its_key(keys: dict[str, str], message: str, folder: Path) -> None:
    with pytest.raises(ModelError) as caught:
        check_model_files(ModelConfig.model_validate({"path": str(folder), **keys}))
    assert str(caught.value).startswith(message)


def test_the_check_needs_no_torch() -> None:
    code = "import sys, asyncrl.model_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_adapters_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the test's environment it is there."""
    check_adapters(ModelConfig(path="-", lora_rank=4))
    monkeypatch.setitem(sys.modules, "peft", None)
    check_adapters(ModelConfig(path="-"))
    with pytest.raises(ConfigError, match=r"model.lora_rank = 4 needs peft, .*: pip install 'asyncrl\[lora\]'"):
        check_adapters(ModelConfig(path="-", lora_rank=4))
