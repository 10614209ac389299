"""`asyncrl simulate` as its user types it: one seed, several files, a sweep, a hunt; and what it says to what cannot be."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from asyncrl import cli
from asyncrl.config import load_run, to_toml
from asyncrl.config.simulation import Scenario
from asyncrl.observe.trace_file import TraceLog
from asyncrl.simulation.asked import parse_faults, parse_seeds, parse_sweep
from asyncrl.simulation.faults import ALL, FaultKind
from asyncrl.simulation.run import simulate as run_scenario

CONFIGS = Path(__file__).parents[2] / "configs" / "sim"
SMALLEST, REFERENCE = str(CONFIGS / "smallest.toml"), str(CONFIGS / "reference.toml")
Said = tuple[int, str, str]
Simulate = Callable[..., Said]
FAILING = ["agent.timeout_s=0.001", "replay.max_failed_groups_in_a_row=1"]
"""What makes a run a failure: no session can end in time, and nothing that was injected explains it."""


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """(exit code, stdout, stderr) of the command in this process."""

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["asyncrl", "simulate", *words])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(exited.value.code, int)
        return exited.value.code, out, err

    return run


# --- one seed ---------------------------------------------------------------------------------------------------------------------


def test_one_seed_prints_and_writes(simulate: Simulate, tmp_path: Path) -> None:
    code, out, _ = simulate(SMALLEST, "--output", str(tmp_path / "out"), "--events", str(tmp_path / "events.txt"))
    assert code == 0
    assert "tokens_per_s" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.txt", "report.json", "trace.json", "timeline.png"}
    assert (tmp_path / "out" / "report.txt").read_text() == out
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert len(np.unique(np.asarray(imread(tmp_path / "out" / "timeline.png")).reshape(-1, 4), axis=0)) > 20
    assert len((tmp_path / "events.txt").read_text().splitlines()) > 100


def test_the_same_seed_says_and_writes_the_same(simulate: Simulate, tmp_path: Path) -> None:
    said = [simulate(SMALLEST, "--seed", "5", "--faults", "all", "--output", str(tmp_path / name)) for name in ("a", "b")]
    assert said[0][:2] == said[1][:2]
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    assert simulate(SMALLEST, "--seed", "6", "--faults", "all")[1] != said[0][1]


def test_json_is_one_object(simulate: Simulate) -> None:
    found = json.loads(simulate(SMALLEST, "--seed", "5", "--faults", "all", "--json")[1])
    assert (found["name"], found["seed"], found["steps"]) == ("smallest", 5, 2)
    assert found["figures"]["tokens_per_s"] > 0


@pytest.mark.long
def test_several_files_are_told_one_after_the_other(simulate: Simulate, tmp_path: Path) -> None:
    code, out, _ = simulate(SMALLEST, REFERENCE, "trainer.total_training_steps=1", "--output", str(tmp_path))
    assert code == 0
    assert [line for line in out.splitlines() if line.endswith(".toml")] == [SMALLEST, REFERENCE]
    assert out.count("1 steps in") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"smallest", "reference"}


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_that_fails_is_told_with_its_last_events_and_how_to_see_it_again(simulate: Simulate, as_json: bool) -> None:
    code, out, err = simulate(SMALLEST, *FAILING, "--seed", "3", "--faults", "site", *(["--json"] if as_json else []))
    assert code == 1
    told = err if as_json else out
    assert "seed 3: TooManyFailuresError at event" in told
    assert "the last 50 events:" in told
    assert f"again: asyncrl simulate {SMALLEST} --seed 3 --faults site {' '.join(FAILING)}" in told
    if as_json:
        assert json.loads(out)["failure"].startswith("TooManyFailuresError: ")


# --- side by side -----------------------------------------------------------------------------------------------------------------


def test_files_that_are_compared_stand_side_by_side(simulate: Simulate, tmp_path: Path) -> None:
    code, out, _ = simulate(SMALLEST, REFERENCE, "--compare", "--output", str(tmp_path))
    head, *rows = out.splitlines()
    assert (code, head.split()) == (0, ["smallest", "reference"])
    assert any(row.startswith("tokens_per_s") and "x)" in row for row in rows)
    assert {path.name for path in tmp_path.iterdir()} == {"table.txt", "reports.json", "shares.png"}
    assert len(np.unique(np.asarray(imread(tmp_path / "shares.png")).reshape(-1, 4), axis=0)) > 20


@pytest.mark.long
def test_a_sweep_is_a_column_a_value_and_a_picture(simulate: Simulate, tmp_path: Path) -> None:
    words = (SMALLEST, "--sweep", "rollout.max_num_seqs=1..4*2", "--output", str(tmp_path), "--json")
    code, out, _ = simulate(*words)
    found = json.loads(out)
    assert code == 0
    assert [each["name"] for each in found] == [f"rollout.max_num_seqs={slots}" for slots in (1, 2, 4)]
    assert found[0]["figures"]["step_s"] > found[2]["figures"]["step_s"]
    assert {path.name for path in tmp_path.iterdir()} == {"table.txt", "reports.json", "shares.png", "sweep.png"}
    assert simulate(*words, "--jobs", "2")[1] == out, "processes change nothing"


def test_a_value_that_is_a_word_can_be_swept(simulate: Simulate, tmp_path: Path) -> None:
    code, out, _ = simulate(SMALLEST, "--sweep", "store.sync=normal,full", "--output", str(tmp_path))
    assert (code, out.splitlines()[0].split()) == (0, ["store.sync=normal", "store.sync=full"])


def test_a_simulation_that_failed_has_no_figures_and_an_exit_code(simulate: Simulate) -> None:
    code, out, err = simulate(SMALLEST, "--sweep", "agent.timeout_s=0.001,100", FAILING[1])
    row = next(line for line in out.splitlines() if line.startswith("step_s"))
    assert (code, row.split()[1]) == (1, "failed")
    assert err.startswith("agent.timeout_s=0.001: TooManyFailuresError")


# --- a hunt -----------------------------------------------------------------------------------------------------------------------


def test_a_hunt_ends_with_its_count(simulate: Simulate) -> None:
    code, out, _ = simulate(SMALLEST, "--seeds", "0..5", "--faults", "all", "--jobs", "1")
    assert (code, out.splitlines()[-1]) == (0, "6 runs, 0 violations")


def test_a_hunt_that_finds_something_shrinks_it(simulate: Simulate) -> None:
    code, out, _ = simulate(SMALLEST, *FAILING, "--seeds", "0..1", "--jobs", "1")
    assert (code, out.splitlines()[-1]) == (1, "1 runs, 1 violations")
    assert "seed 0: TooManyFailuresError at event" in out
    assert f"again: asyncrl simulate {SMALLEST} --seed 0" in out
    assert "the smallest that still fails with TooManyFailuresError" in out


def test_a_hunt_in_json(simulate: Simulate) -> None:
    code, out, _ = simulate(SMALLEST, "--seeds", "0..2", "--faults", "all", "--jobs", "1", "--json")
    found = json.loads(out)
    assert (code, found["runs"], found["violations"], found["findings"], found["shrunk"]) == (0, 3, 0, [], None)


# --- a scenario from a run --------------------------------------------------------------------------------------------------------


def _write_run(folder: Path, *overrides: str) -> None:
    """The folder that a real run like the reference scenario would have left."""
    scenario = load_run(Scenario, Path(REFERENCE), overrides)
    outcome = run_scenario(scenario, seed=0, oracles=False)
    assert outcome.failure is None
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(scenario.train_run()))
    lines = [{"wall_time": step["simulated_s"], **step, "step": int(step["step"])} for step in outcome.watcher.steps]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for record in outcome.watcher.records:
        TraceLog(folder / "trace.jsonl").append(record)


@pytest.mark.long
def test_a_scenario_is_fitted_from_a_run_and_simulated(simulate: Simulate, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _write_run(
        run, "trainer.trace_groups=2", "trainer.total_training_steps=5", "data.train_batch_size=2", "sim.engine.prefill_tokens=4096"
    )
    code, out, _ = simulate("--fit", str(run))
    assert code == 0
    fitted = tmp_path / "fitted.toml"
    assert simulate("--fit", str(run), "--output", str(fitted))[:2] == (0, "")
    assert fitted.read_text() == out
    assert simulate(str(fitted), "trainer.total_training_steps=1")[0] == 0


# --- what cannot be ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no scenario is given: give files that end in .toml"),
        (["--fit", "missing"], "missing does not exist"),
        (["--fit", "runs", SMALLEST], "--fit RUN goes with --output FILE and nothing else"),
        (["--fit", "runs", "--seeds", "0..1"], "--fit RUN goes with --output FILE and nothing else"),
        (["rollout.n=2"], "no scenario is given: give files that end in .toml"),
        ([SMALLEST, "fast"], "'fast' is neither: give files that end in .toml"),
        (["missing.toml"], "missing.toml: no such configuration file"),
        ([SMALLEST, "rollout.m=2"], "unknown key rollout.m; did you mean rollout.n"),
        ([SMALLEST, "--sweep", "slots=1..2"], "--sweep 'slots=1..2': it is section.key=a..b"),
        ([SMALLEST, "--sweep", "rollout.n="], "--sweep 'rollout.n=': it is section.key=a..b"),
        ([SMALLEST, "--sweep", "rollout.n=3..1"], "3 is more than 1; the smaller one comes first"),
        ([SMALLEST, "--sweep", "rollout.n=1..x"], "not numbers"),
        ([SMALLEST, "--sweep", "rollout.n=1.."], "not numbers"),
        ([SMALLEST, "--sweep", "rollout.n=1..4*1"], "these steps lead nowhere"),
        ([SMALLEST, "--sweep", "rollout.n=0..4*2"], "these steps lead nowhere"),
        ([SMALLEST, "--sweep", "rollout.n=1..4+0"], "these steps lead nowhere"),
        ([SMALLEST, "--sweep", "rollout.n=1,,2"], "a value is empty"),
        ([SMALLEST, "--sweep", "sim.reward.latency_s=0.5..2"], "say the step between numbers that are not whole"),
        ([SMALLEST, "--sweep", "rollout.n=1..1000"], "more than 64 values"),
        ([SMALLEST, "--sweep", "rollout.n=1..1e300"], "more than 64 values"),
        ([SMALLEST, "--sweep", "rollout.m=1,2"], "did you mean rollout.n"),
        ([SMALLEST, "--sweep", "rollout.n=1,none"], "rollout.n = 'none'"),
        ([SMALLEST, REFERENCE, "--sweep", "rollout.n=1,2"], "--sweep takes one scenario"),
        ([SMALLEST, "--seeds", "9..1"], "FIRST..LAST"),
        ([SMALLEST, "--seeds", "-3..1"], "FIRST..LAST"),
        ([SMALLEST, "--seeds", "0..3", "--compare"], "does not go with --compare"),
        ([SMALLEST, "--seeds", "0..3", "--seed", "1"], "does not go with --seed"),
        ([SMALLEST, REFERENCE, "--seeds", "0..3"], "does not go with a second scenario"),
        ([SMALLEST, "--keep-going"], "--keep-going has no effect without --seeds"),
        ([SMALLEST, "--seed", "-1"], "Invalid value for '--seed'"),
        ([SMALLEST, "--faults", "earthquake"], "kinds: all, none, await_error"),
        ([SMALLEST, "--order", "random"], "--order 'random': it is one of strict, tasks, all"),
        ([SMALLEST, "--compare"], "needs two scenarios"),
        ([SMALLEST, REFERENCE, "--events", "x"], "--events writes the log of one simulation"),
        ([SMALLEST, "--output", "/dev/null/x"], "--output /dev/null/x: Not a directory"),
        ([SMALLEST, "--events", "/dev/null/x"], "/dev/null/x cannot be written: Not a directory"),
    ],
    ids=lambda case: " ".join(case).replace(str(CONFIGS), "") if isinstance(case, list) else None,
)
def test_what_cannot_be_is_one_line(words: list[str], said: str, simulate: Simulate) -> None:
    code, out, err = simulate(*words)
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("error: ")
    assert said in err
    assert out == ""


@pytest.mark.parametrize("words", [["missing.toml"], [SMALLEST, "--seeds", "x"], [SMALLEST, "--sweep", "rollout.n=2..1"]])
def test_what_cannot_be_is_told_without_torch(words: list[str]) -> None:
    code = "import sys; from asyncrl import cli\ntry: cli.main()\nfinally: assert 'torch' not in sys.modules, 'torch was loaded'"
    done = subprocess.run([sys.executable, "-c", code, "simulate", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_ranges() -> None:
    assert parse_sweep("rollout.n=1..4").values == ("1", "2", "3", "4")
    assert parse_sweep("rollout.n=2..9+3").values == ("2", "5", "8")
    assert parse_sweep("sim.engine.decode_step_s=0.1..0.3+0.1").values == ("0.1", "0.2", "0.3")
    assert parse_sweep("sim.engine.decode_step_s=1e-3..1e-2*10").values == ("0.001", "0.01")
    assert parse_sweep("rollout.n=3..3").values == ("3",)
    assert parse_sweep("store.sync=normal, full").values == ("normal", "full")
    assert parse_seeds("7") == range(7, 8)
    assert parse_seeds("0..9") == range(10)
    assert parse_faults("crash, site") == {FaultKind.CRASH, FaultKind.SITE}
    assert parse_faults("all") == ALL
    assert parse_faults("none") == frozenset()
