"""docs/simulation.md: its commands are accepted as they stand, with their scenarios and values, and its table is true."""

import re
import shlex
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.activity import Activity
from asyncrl.simulation.asked import Asked
from asyncrl.simulation.report import report_of
from asyncrl.simulation.run import simulate

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


@pytest.mark.long
def test_the_table_is_what_comes_out() -> None:
    """To the rounding of the page, and one in the last digit."""
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d,]+) \| (\d+) % \| (\d+) % \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for engines, *cells in rows:
        activity = Activity()
        scenario = load_run(Scenario, ROOT / "configs" / "sim" / "tools.toml", [f"sim.engine.count={engines}"])
        outcome = simulate(scenario, seed=0, oracles=False, observers=[activity], watcher=activity)
        found = report_of(outcome, activity).figures
        measured = [found["step_s"], found["tokens_per_s"], 100 * found["slots_busy"], 100 * found["trainer_busy"]]
        assert [float(cell.replace(",", "")) for cell in cells] == [pytest.approx(value, abs=1.0) for value in measured]
