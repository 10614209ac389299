"""docs/simulation.md: its commands are accepted as they stand, and its scenarios are there."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from asyncrl.cli import app
from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.command import parse_faults, parse_seeds
from asyncrl.simulation.sweep import parse_sweep

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines()]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_is_accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert words[0] == ".venv/bin/asyncrl"
    monkeypatch.chdir(ROOT)
    group = typer.main.get_group(app)
    with group.make_context("asyncrl", words[1:]) as context:
        name, command, rest = group.resolve_command(context, [*context.protected_args, *context.args])
        assert command is not None
        with command.make_context(name, rest, parent=context) as given:
            for file in given.params["scenarios"]:
                load_run(Scenario, Path(file))
            parse_faults(given.params["faults"])
            assert not given.params["seeds"] or parse_seeds(given.params["seeds"])
            assert not given.params["sweep"] or parse_sweep(given.params["sweep"])
