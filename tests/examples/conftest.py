"""The quick start's tokenizer and model, made once."""

from pathlib import Path

import pytest

from asyncrl.agents.chat_template import ChatTemplate, load_chat_template
from asyncrl.config import ModelConfig
from asyncrl.examples.calculator import demonstrations
from asyncrl.examples.demonstrator import MECHANICS
from asyncrl.examples.tiny_model import build_model, save_model, train_tokenizer
from asyncrl.ports import Json
from asyncrl.tools import load_tools


@pytest.fixture(scope="session")
def schemas() -> list[Json]:
    return [tool.schema for tool in load_tools(["calculator"]).values()]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, schemas: list[Json]) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = train_tokenizer(demonstrations(MECHANICS, 300, seed=1, name="mechanics"), schemas)
    save_model(build_model(tokenizer, seed=1), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def template(model_folder: Path, schemas: list[Json]) -> ChatTemplate:
    return load_chat_template(ModelConfig(path=str(model_folder)), schemas)
