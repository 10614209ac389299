"""`asyncrl simulate` as its user types it: one seed, several files, a sweep, a hunt; and what it says to what cannot be."""

import json
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.simulation.command import SimulateOptions, parse_faults, parse_seeds, run_command
from asyncrl.simulation.faults import ALL, FaultKind
from asyncrl.simulation.sweep import parse_sweep

CONFIGS = Path(__file__).parents[2] / "configs" / "sim"
SMALLEST = CONFIGS / "smallest.toml"


def test_one_seed_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events.txt"
    options = SimulateOptions(files=(SMALLEST,), output=tmp_path / "out", events=events)
    assert run_command(options) == 0
    assert "tokens_per_s" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.json", "trace.json", "timeline.png"}
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert len(events.read_text().splitlines()) > 100


def test_the_same_seed_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):
        assert run_command(SimulateOptions(files=(SMALLEST,), seed=5, faults="all", as_json=True)) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert json.loads(said[0])["steps"] > 0


def test_several_files_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(SimulateOptions(files=(SMALLEST, CONFIGS / "reference.toml"), compare=True)) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["smallest", "reference"]
    assert any(row.startswith("tokens_per_s") and "x)" in row for row in rows)


def test_a_sweep_is_a_column_a_value_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = SimulateOptions(files=(SMALLEST,), sweep="rollout.max_num_seqs=1..4*2", output=tmp_path, as_json=True)
    assert run_command(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found] == [f"rollout.max_num_seqs={slots}" for slots in (1, 2, 4)]
    assert found[0]["figures"]["step_s"] > found[2]["figures"]["step_s"]
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_a_hunt_ends_with_its_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(SimulateOptions(files=(SMALLEST,), seeds="0..5", faults="all", jobs=1)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "6 runs, 0 violations"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sweep": "slots=1..2"}, "--sweep 'slots=1..2'"),
        ({"sweep": "rollout.n=3..1"}, "key=a..b"),
        ({"sweep": "rollout.n=1..1000"}, "1 to 64 are allowed"),
        ({"sweep": "rollout.m=1,2"}, "did you mean rollout.n"),
        ({"seeds": "9..1"}, "FIRST..LAST"),
        ({"seeds": "0..3", "compare": True}, "hunts in one scenario"),
        ({"faults": "earthquake"}, "kinds: all, none, await_error"),
        ({"compare": True}, "needs two scenarios"),
        ({"compare": True, "events": Path("x")}, "--events"),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_command(SimulateOptions(files=(SMALLEST,), **options))  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranges() -> None:
    assert parse_sweep("rollout.n=1..4").values == ("1", "2", "3", "4")
    assert parse_sweep("sim.engine.decode_step_s=0.1..0.3+0.1").values == ("0.1", "0.2", "0.3")
    assert parse_sweep("store.sync=normal,full").values == ("normal", "full")
    assert parse_seeds("7") == range(7, 8)
    assert parse_faults("crash, site") == {FaultKind.CRASH, FaultKind.SITE}
    assert parse_faults("all") == ALL
