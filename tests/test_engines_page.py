"""docs/engines.md: its commands are accepted as they stand, and the keys and files that it names exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from asyncrl.config import TrainRun, keys_of, load_run, parse_run
from asyncrl.config.keys import leaves
from asyncrl.rollout.vllm.serve import _parser

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^\.venv-vllm/bin/asyncrl train (.+)$", PAGE, re.MULTILINE)]
IN_CODE = re.findall(r"`([^`\n]+)`", PAGE)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_opens_the_engine_that_it_is_shown_for(words: list[str]) -> None:
    run = load_run(TrainRun, ROOT / words[0], words[1:])
    assert run.rollout.name in ("vllm", "openai")
    assert run.rollout.transfer == "shm"


def test_the_server_takes_its_arguments() -> None:
    (line,) = re.findall(r"^\.venv-vllm/bin/python -m asyncrl\.rollout\.vllm\.serve (.+)$", PAGE, re.MULTILINE)
    options = _parser().parse_args(shlex.split(line))
    run = load_run(TrainRun, ROOT / "configs" / "quickstart.toml", [])
    assert options.model == run.model.path
    assert options.context_len == run.max_model_len


def test_the_layout_is_a_valid_one() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    tree = tomllib.loads(text)
    run = parse_run(TrainRun, {"data": {"train_files": "x"}, "model": {"path": "y"}, **tree}, where="docs/engines.md")
    assert len(run.rollout.vllm.devices) == run.rollout.num_engines == run.cluster.num_ranks
    assert {key for key, _ in leaves(tree)} <= {key for key, _ in keys_of(TrainRun)}


def test_every_key_of_the_page_exists() -> None:
    known = {key for key, _ in keys_of(TrainRun)}
    named = {code.partition(" = ")[0] for code in IN_CODE if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*( = \S+)?", code)}
    keys = {name for name in named if name.split(".")[0] in TrainRun.model_fields and "." in name}
    assert len(keys) > 10
    assert keys - known == {"rollout.vllm"} & keys


def test_every_file_of_the_page_exists() -> None:
    files = re.findall(r"\]\(([\w/.]+)\)", PAGE)
    assert files
    assert [name for name in files if not (ROOT / "docs" / name).is_file()] == []
    assert all((ROOT / code).is_file() for code in IN_CODE if code.startswith(("benchmarks/", "tests/", "configs/")))
