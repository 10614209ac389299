"""docs/rewards.md: its examples load and score, its commands are run as they stand, its keys exist, its numbers are true."""

import asyncio
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli, preflight
from asyncrl.config import TrainRun, keys_of, load_run, parse_run
from asyncrl.ports import RewardRequest
from asyncrl.rewards.judge_prompt import load_prompt
from asyncrl.rewards.managers import overlong_penalty
from asyncrl.rewards.scoring import Scorer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
Ask = Callable[..., RewardRequest]
Opened = Callable[..., AbstractAsyncContextManager[Scorer]]


def fenced(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


EXAMPLES = {example["reward"]["manager"]: example for example in map(tomllib.loads, fenced("toml"))}
COMMANDS = [shlex.split(line) for block in fenced("sh") for line in block.splitlines()]


def test_every_manager_has_a_row_and_all_but_the_plain_one_an_example() -> None:
    managers = set(re.findall(r"'(\w+)'", str(dict(keys_of(TrainRun))["reward.manager"].annotation)))
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == managers
    assert set(EXAMPLES) == managers - {"naive"}


@pytest.mark.parametrize("manager", EXAMPLES)
def test_an_example_is_a_valid_configuration(manager: str) -> None:
    example = EXAMPLES[manager]
    data = {"train_files": "rows.jsonl", **example.get("data", {})}
    assert parse_run(TrainRun, {**example, "data": data, "model": {"path": "model"}}).reward.manager == manager


async def test_the_example_function_scores_as_gdpo_wants_it(project: Callable[[str], Path], opened: Opened, ask: Ask) -> None:
    (source,) = fenced("python")
    project(source)
    gdpo = EXAMPLES["gdpo"]
    rules = {"components": gdpo["algorithm"]["gdpo_reward_keys"]}
    async with opened(gdpo["reward"]["function"], manager="gdpo", rules=rules) as scorer:
        result = await scorer.score(ask(" 12 ", 12))
    assert (result.score, result.extra) == (1.0, {"right": 1.0, "short": 1.0})


def test_the_example_template_is_filled(tmp_path: Path, ask: Ask) -> None:
    (source,) = fenced("jinja")
    (tmp_path / "judge.jinja").write_text(source)
    assert "Reference: 12\nAnswer: twelve\n" in load_prompt(str(tmp_path / "judge.jinja")).message(ask("twelve", 12))


def test_the_numbers_of_the_penalty_are_true() -> None:
    limit, buffer = EXAMPLES["dapo"]["data"]["max_response_length"], EXAMPLES["dapo"]["reward"]["overlong_buffer_len"]
    begins, tokens, cost = re.findall(r"= (\d+) tokens; .*?so that (\d+) tokens cost ([\d.]+)\.", PAGE, re.DOTALL)[0]
    assert int(begins) == limit - buffer
    assert overlong_penalty(int(tokens), max_response_length=limit, buffer_len=buffer, factor=1.0) == -float(cost)


def test_every_key_that_is_named_exists() -> None:
    known = {key for key, _ in keys_of(TrainRun)}
    named = set(re.findall(r"`((?:reward|agent|algorithm)\.[\w.]+)", PAGE))
    assert len(named) >= 7
    assert named - known == set()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_runs_as_it_stands(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the rows and the model of the quick start left out, which `make train` makes."""
    checked: list[TrainRun] = []

    def check_rewards(run: TrainRun) -> preflight.RunInputs:
        asyncio.run(preflight._check_reward(run))
        checked.append(run)
        rows: Any = [{}] * 64
        return preflight.RunInputs(train_rows=rows, val_rows=None)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("asyncrl.preflight.check_train", check_rewards)
    monkeypatch.setattr(sys, "argv", ["asyncrl", *words[1:]])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert (words[0], exited.value.code) == (".venv/bin/asyncrl", 0), capsys.readouterr().err
    assert checked[0].reward.manager == next(word for word in words if "manager" in word).partition("=")[2]
    assert f'manager = "{checked[0].reward.manager}"' in capsys.readouterr().out
    assert load_run(TrainRun, ROOT / words[2], [word for word in words[3:] if "=" in word]) == checked[0]
