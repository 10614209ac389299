"""asyncrl trace: what is shown by default, each format, and one line for what is not there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.journal.sqlite import open_journal
from asyncrl.observe.run_folder import RunFolder
from asyncrl.observe.trace_file import Record, TraceLog

Make = Callable[..., Record]
Shown = Callable[..., str]


@pytest.fixture
def run_folder(folder: RunFolder, make_record: Make) -> Path:
    """A run with a trace of three steps."""
    log = TraceLog(folder.trace)
    for record in (make_record(1, "a"), make_record(2, "b", "c"), make_record(5, "d", "e")):
        log.append(record)
    return folder.path


@pytest.fixture
def trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """trace(*arguments): exit code, stdout and stderr of `asyncrl trace`."""

    def act(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["asyncrl", "trace", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(exited.value.code, int)
        return exited.value.code, out, err

    return act


Trace = Callable[..., tuple[int, str, str]]


def groups_in(out: str) -> list[str]:
    return list(dict.fromkeys(line["uid"] for line in map(json.loads, out.splitlines()) if line["uid"] is not None))


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ([], ["e"]),
        (["--step", "2"], ["b", "c"]),
        (["--group", "a"], ["a"]),
        (["--group", "c", "--step", "2"], ["c"]),
    ],
    ids=["newest", "step", "group", "both"],
)
def test_the_groups_asked_for_are_shown(run_folder: Path, trace: Trace, options: list[str], groups: list[str]) -> None:
    code, out, _ = trace(run_folder, "--format", "jsonl", *options)
    assert code == 0
    assert groups_in(out) == groups
    assert {line["step"] for line in map(json.loads, out.splitlines())} == {{"a": 1, "b": 2, "c": 2, "e": 5}[groups[0]]}


def test_a_json_line_says_everything_of_a_field(run_folder: Path, trace: Trace) -> None:
    _, out, _ = trace(run_folder, "--format", "jsonl")
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[1] == {
        "kind": "field",
        "step": 5,
        "incarnation": 0,
        "version": 4,
        "uid": "e",
        "topology": {
            "actor": {
                "world": 4,
                "dp": 2,
                "sp": 2,
                "tp": 1,
                "pp": 1,
                "cp": 1,
                "replicas": 1,
                "dynamic_cp": False,
                "backend": "fsdp",
            },
            "rollout": {
                "world": 8,
                "dp": 1,
                "sp": 1,
                "tp": 8,
                "pp": 1,
                "cp": 1,
                "replicas": 1,
                "dynamic_cp": False,
                "backend": "fsdp",
            },
        },
        "stage": "agents",
        "access": "write",
        "field": "responses",
        "producer": "agents",
        "consumers": ["old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor", "observe"],
        "dtype": "int64",
        "device": "cpu",
        "layout": "ragged",
        "shape": [],
        "lengths": [5, 5],
        "valid_lengths": [5, 5],
        "mask_sums": [3, 3],
        "keys": ["e_0_0", "e_1_0"],
        "global_steps": [4, 4],
        "min_global_steps": [3, 3],
        "max_global_steps": [4, 4],
        "is_padding": [False, False],
    }
    assert (lines[0]["stage"], lines[0]["keys"], lines[0]["mask_sums"]) == ("dataset", [], None)
    assert (lines[2]["stage"], lines[2]["mask_sums"]) == ("update_actor", [3, 3]), "of the rows, where a stage had no mask"
    assert [line["name"] for line in lines[3:]] == ["session 0", "turn 0", "slow", "fast", "reward", "update_actor"]


def test_a_table_names_stages_fields_and_spans(run_folder: Path, trace: Trace) -> None:
    _, out, _ = trace(run_folder)
    assert out.startswith("group e  prompt 1  trained  step 5  weight version 4  actor world 4 dp 2 sp 2")
    words = [line.split() for line in out.splitlines()]
    assert ["e_0_0", "2", "5", "7", "3", "4", "3", "4", "False", "3"] in words
    (agents,) = [line for line in words if line[:4] == ["agents", "write", "responses", "agents"]]
    assert agents[-6:] == ["5", "x2", "5", "x2", "3", "x2"]
    assert any(line[:4] == ["session", "0", "turn", "turn"] for line in words)


def test_a_perfetto_trace_goes_into_a_file(run_folder: Path, trace: Trace, tmp_path: Path) -> None:
    code, out, _ = trace(run_folder, "--format", "perfetto", "--output", tmp_path / "trace.json")
    assert (code, out) == (0, "")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}x"], "runx does not exist; with a trace.jsonl in {parent}: run; did you mean run?"),
        (["{run}/checkpoints"], "checkpoints does not exist; with a trace.jsonl in {run}: nothing"),
        (["{parent}"], "has no trace.jsonl: its run had trainer.trace_groups = 0, "),
        (["{parent}"], "or it was no training; folders in it that have one: run"),
        (["{run}/trace.jsonl"], "{run}/trace.jsonl is a file; give the folder of a run, such as {run}"),
        (["a" * 5000], " cannot be looked at: File name too long"),
        (["{run}", "--step", "3"], "has no step 3; it has steps 1-2, 5"),
        (["{run}", "--group", "x"], "has no group 'x'; it has a (step 1), b (step 2), c (step 2), d (step 5), e (step 5)"),
        (["{run}", "--group", "a", "--step", "2"], "has no group 'a' in step 2; it has b (step 2), c (step 2)"),
        (["{run}", "--format", "xml"], "'xml' is not one of 'table', 'jsonl', 'perfetto'"),
        (["{run}", "--output", "{run}"], "--output {run}: cannot be written"),
    ],
    ids=[
        "folder",
        "folder in a run",
        "no trace",
        "a level too high",
        "file",
        "long name",
        "step",
        "group",
        "group in step",
        "format",
        "output",
    ],
)
def test_what_is_not_there_is_one_line_that_says_what_is(run_folder: Path, trace: Trace, arguments: list[str], said: str) -> None:
    places = {"run": run_folder, "parent": run_folder.parent}
    code, out, err = trace(*(argument.format(**places) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said.format(**places) in err


def test_no_file_of_the_run_is_replaced(run_folder: Path, trace: Trace) -> None:
    file = RunFolder(path=run_folder).trace
    before = file.read_bytes()
    (run_folder / "hf").mkdir()
    for output in (file, run_folder / "hf" / ".." / file.name):
        code, _, err = trace(run_folder, "--output", output)
        said = f"--output {output}: is a file of the run already, which nothing may replace; give it another name"
        assert (code, err) == (2, f"error: {said}\n")
    assert file.read_bytes() == before
    assert trace(run_folder, "--output", run_folder / "shown.txt")[0] == 0
    outside = run_folder.parent / "shown.txt"
    outside.write_text("old")
    assert trace(run_folder, "--output", outside)[0] == 0
    assert outside.read_text().startswith("group ")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_name_that_the_terminal_cannot_show_is_escaped(run_folder: Path, encoding: str) -> None:
    folder = run_folder.rename(run_folder.with_name("größe \x1b[1m名"))
    open_journal(folder / "journal.db").close()
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "inspect", folder], capture_output=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


@pytest.mark.parametrize("command", ["trace", "inspect"])
def test_without_an_output_nothing_goes_wrong(run_folder: Path, command: str) -> None:
    open_journal(run_folder / "journal.db").close()
    words = [sys.executable, "-m", "asyncrl.cli", command, str(run_folder)]
    code = f"import os; os.close(1); os.execv({words[0]!r}, {words!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_trace_without_a_whole_record_says_so(folder: RunFolder, make_record: Make, trace: Trace) -> None:
    TraceLog(folder.trace).append(make_record(1, "a"))
    folder.trace.write_bytes(folder.trace.read_bytes()[:-10])
    code, _, err = trace(folder.path)
    assert (code, err) == (2, f"error: {folder.trace} has no whole step yet\n")


def test_many_steps_and_groups_are_cut_short(folder: RunFolder, make_record: Make, trace: Trace) -> None:
    log = TraceLog(folder.trace)
    for step in range(1, 40, 2):
        log.append(make_record(step, f"u{step}"))
    assert "it has steps 1, 3, 5, 7, ..., 33, 35, 37, 39\n" in trace(folder.path, "--step", 2)[2]
    assert "it has u25 (step 25), " in trace(folder.path, "--group", "x")[2]
    assert trace(folder.path, "--group", "x")[2].endswith("u39 (step 39), and 12 older ones\n")
