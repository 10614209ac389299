"""docs/async.md: its commands are accepted as they stand, and what it names exists."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from asyncrl.cli import app
from asyncrl.config import TrainRun, keys_of, load_run
from asyncrl.ports import IncidentKind

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "async.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line, comments=True) for line in re.findall(r"^(?:.*`)?(\.venv/bin/asyncrl [^`\n]+)", PAGE, re.MULTILINE)]
IN_CODE = re.findall(r"`([^`\n]+)`", PAGE)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_is_accepted_and_its_configuration_loads(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    group = typer.main.get_group(app)
    with group.make_context("asyncrl", words[1:]) as context:
        name, command, rest = group.resolve_command(context, words[1:])
        assert command is not None
        with command.make_context(name, rest, parent=context) as parsed:
            config, overrides = parsed.params.get("config"), parsed.params.get("overrides") or []
    if config:
        run = load_run(TrainRun, Path(config), overrides)
        assert run.max_staleness > 0
        assert run.algorithm.rollout_correction.rollout_is == "token"
    else:
        assert name == "inspect"


def test_the_page_has_commands_of_each_kind_and_is_short() -> None:
    assert [words[1] for words in COMMANDS] == ["train", "train", "train", "inspect"]
    assert len(PAGE.splitlines()) <= 120


def test_every_key_of_the_page_exists() -> None:
    """In backticks and with a section of ours, alone or with a value; and in the rule of admission."""
    known = {key for key, _ in keys_of(TrainRun)}
    sections = "|".join(TrainRun.model_fields)
    named = {found[1] for code in IN_CODE if (found := re.match(rf"((?:{sections})\.[\w.]+)(?: = \S+)?$", code))}
    assert len(named) > 20
    assert named | {"data.train_batch_size"} <= known


def test_the_table_of_limits_has_every_deadline_of_a_run() -> None:
    """Those of a judge and of a scenario are told elsewhere."""
    limits = {key for key, _ in keys_of(TrainRun) if key.endswith("timeout_s") and not key.startswith("reward.limits.")}
    assert limits == set(re.findall(r"^\| `([\w.]+timeout_s)` \|", PAGE, re.MULTILINE))


def test_every_kind_of_incident_is_told() -> None:
    kinds = re.search(r"^Kinds: (.+?)\.\s", PAGE, re.MULTILINE | re.DOTALL)
    assert kinds is not None
    assert re.findall(r"`(\w+)`", kinds[1]) == [str(kind) for kind in IncidentKind]
