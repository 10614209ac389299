"""docs/simulation.md: its commands are accepted as they stand, with their scenarios and values."""

import re
import shlex
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.simulation.asked import Asked

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines()]


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 5


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_is_accepted_with_its_scenarios_and_values(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the first run, which would take its minutes."""
    asked: list[Asked] = []

    def keep(what: Asked) -> int:
        asked.append(what)
        return 0

    monkeypatch.setattr("asyncrl.simulation.command.run_asked", keep)
    monkeypatch.chdir(ROOT)
    assert words[:2] == [".venv/bin/asyncrl", "simulate"]
    monkeypatch.setattr("sys.argv", ["asyncrl", *words[1:]])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 0
    assert asked[0].scenarios
