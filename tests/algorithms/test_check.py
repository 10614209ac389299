"""The check command: exit codes, its lines, and that a changed number is found by its case."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.algorithms.check import NAMES, check_file, main
from asyncrl.algorithms.checking import Json

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"

Change = Callable[[Json], None]


def _run(folder: Path) -> tuple[int, list[str]]:
    out = io.StringIO()
    return main([str(folder)], out), out.getvalue().splitlines()


def _write(folder: Path, name: str, **header: Json) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(header), encoding="utf-8")
    return path


def _workload(name: str = "one", lengths: object = (1, 1000), workload: object = (24_577, 25_576_000)) -> Json:
    return {"id": name, "kind": "workload", "inputs": {"lengths": lengths}, "outputs": {"workload": workload}}


def _correction(**changes: Json) -> Json:
    """A case with ratios 2 and 1/2 of a token each, by reference into the table of inputs."""
    params = {"rollout_is": "token", "rollout_is_threshold": "1.5", "rollout_rs": None}
    outputs = {"weights": [[1.5, 0.5]], "response_mask": [[1, 1]], "metrics": {"kl": 0.0, "rollout_is_std": 0.50004}}
    return {"id": "two", "params": params, "inputs": "A", "outputs": outputs, **changes}


TABLE = {"A": {"old_log_prob": [[-1.0, -2.0]], "rollout_log_prob": [[-1.69314718, -1.30685282]], "response_mask": [[1, 1]]}}


def test_a_folder_with_some_of_the_files_passes_and_says_which_are_absent(tmp_path: Path) -> None:
    _write(tmp_path, "balancing", cases=[_workload()])
    _write(tmp_path, "rollout_correction", inputs=TABLE, cases=[_correction()])
    (tmp_path / "other.json").write_text("no JSON", encoding="utf-8")
    code, lines = _run(tmp_path)
    assert code == 0
    assert lines[NAMES.index("balancing")] == "balancing.json: 1 cases, 1 passed, worst error 0 of its tolerance"
    assert lines[NAMES.index("rollout_correction")].startswith("rollout_correction.json: 1 cases, 1 passed, worst error ")
    assert [line for line in lines if line.endswith("absent, skipped")] == [
        f"{name}.json: absent, skipped" for name in NAMES if name not in ("balancing", "rollout_correction")
    ]


def test_a_failed_case_is_named_with_what_differs(tmp_path: Path) -> None:
    _write(tmp_path, "balancing", cases=[_workload("good"), _workload("bad", workload=(24_577, 25_576_001))])
    code, lines = _run(tmp_path)
    assert code == 1
    assert "balancing.json: 2 cases, 1 passed, worst error inf of its tolerance" in lines
    assert "  case bad: workload[1]: 25576000, expected 25576001, off by 1 where 0 is allowed" in lines


def test_a_case_that_raises_has_failed_and_the_others_are_computed(tmp_path: Path) -> None:
    cases = [_workload("bad", lengths=("x",)), _workload("good")]
    report = check_file(_write(tmp_path, "balancing", cases=cases))
    assert [(case.id, bool(case.differences)) for case in report.cases] == [("bad", True), ("good", False)]
    assert report.cases[0].differences[0].startswith("TypeError: ")


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"outputs": {"weights": [[1.5, 0.6]]}}, "weights[0, 1]: 0.5"),
        ({"outputs": {"weights": [[1.5]]}}, "weights: shape [1, 2], expected [1, 1]"),
        ({"outputs": {"response_mask": [[1, 0]]}}, "response_mask[0, 1]: 1, expected 0"),
        ({"outputs": {"metrics": {"kl": 1e-4}}}, "metric kl: "),
        ({"outputs": {"metrics": {"kul": 0.0}}}, "metric kul: absent, expected 0.0"),
        ({"outputs": {"metrics": {"rollout_is_std": 0.51}}}, "metric rollout_is_std: "),
        ({"params": {"rollout_is": None}}, "weights: absent, expected"),
        ({"params": {"rollout_is": "token", "rollout_is_threshold": "x"}}, "ValueError: rollout_is_threshold = 'x'"),
        ({"outputs": {}}, "nothing was compared"),
    ],
)
def test_a_difference_of_the_correction_is_found(tmp_path: Path, changes: Json, difference: str) -> None:
    code, lines = _run(_write(tmp_path, "rollout_correction", inputs=TABLE, cases=[_correction(**changes)]).parent)
    assert code == 1
    assert any(line.startswith(f"  case two: {difference}") for line in lines), lines


def test_many_failures_are_cut_short(tmp_path: Path) -> None:
    cases = [_workload(f"bad-{number}", workload=(1, 2)) for number in range(40)]
    _, lines = _run(_write(tmp_path, "balancing", cases=cases).parent)
    assert sum(line.startswith("  case ") for line in lines) == 30
    assert lines[-1] == "  and 10 more cases"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "error: balancing.json: cannot be read as JSON: "),
        ("[]", "error: balancing.json: has no list of cases"),
        ('{"cases": [1]}', "error: balancing.json: case number 0 is no object"),
        (
            '{"cases": [{"id": "x", "kind": "shape", "inputs": {}, "outputs": {}}]}',
            "case x: unknown kind 'shape'; known are partition,",
        ),
        ('{"cases": [{"id": "x", "inputs": {}, "outputs": {}}]}', "case x: unknown kind ''; known are partition,"),
        ('{"cases": [{"id": "x", "kind": "workload", "inputs": "A", "outputs": {}}]}', "case x: its inputs are no object"),
        ('{"cases": [{"id": "x", "kind": "workload", "inputs": {}}]}', "case x: its outputs are no object"),
    ],
)
def test_bad_input_is_said_in_a_line_with_file_and_case(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "balancing.json").write_text(text, encoding="utf-8")
    code, lines = _run(tmp_path)
    assert code == 2
    assert any(line.startswith("error: balancing.json: ") and complaint in line for line in lines), lines


def test_a_failure_weighs_more_than_what_could_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "kl.json").write_text("{", encoding="utf-8")
    _write(tmp_path, "balancing", cases=[_workload(workload=(1, 2))])
    assert _run(tmp_path)[0] == 1


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_a_folder_without_any_of_the_files_is_bad_input(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    code, lines = _run(tmp_path / folder)
    assert code == 2
    assert len(lines) == 1
    assert "has none of advantages.json, " in lines[0]


# --- balancing ------------------------------------------------------------------------------------------------------------------


def _partition(changes: Json) -> Json:
    outputs = {"partition_sums_desc": [16, 14], "max": 16, "min": 14, "contiguous_tokens": {"min": 9, "max": 21}}
    params = {"k": 2, "equal_size": False, "measure": "tokens"}
    return {
        "id": "p",
        "kind": "partition",
        "params": params,
        "inputs": {"lengths": [8, 7, 6, 5, 4]},
        "outputs": {**outputs, **changes},
    }


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"partition_sums_desc": [17, 13], "max": 17, "min": 13}, True),  # ours is better
        ({"partition_sums_desc": [15, 15], "max": 15, "min": 15}, False),  # the optimum, which differencing misses
        ({"partition_sums_desc": [16, 13]}, False),
        ({"partition_sums_desc": [16, 7, 7]}, False),
        ({"min": 13}, False),
        ({"contiguous_tokens": {"min": 9, "max": 22}}, False),
    ],
)
def test_a_partition_passes_when_it_is_no_heavier(tmp_path: Path, changes: Json, passes: bool) -> None:
    assert _run(_write(tmp_path, "balancing", cases=[_partition(changes)]).parent)[0] == (0 if passes else 1)


@pytest.mark.parametrize(
    ("count", "cap", "group_size", "passes"),
    [(2, 20, 2, True), (3, 20, 2, True), (1, 20, 2, False), (2, 17, 2, False), (2, 20, 4, False)],
)
def test_micro_batches_pass_when_they_are_no_more(tmp_path: Path, count: int, cap: int, group_size: int, passes: bool) -> None:
    work = [2 * (24_576 * 9 + 81), 2 * (24_576 * 5 + 25) + 2 * 24_577]
    case = {
        "id": "m",
        "kind": "micro_batches",
        "params": {"max_tokens": cap, "group_size": group_size},
        "inputs": {"lengths": [5, 5, 1, 1, 9, 9]},
        "outputs": {"num_micro_batches": count, "workload_sums_desc": work, "max_tokens_used": 18},
    }
    assert _run(_write(tmp_path, "balancing", cases=[case]).parent)[0] == (0 if passes else 1)


# --- the stored numbers ---------------------------------------------------------------------------------------------------------


def _stored(name: str) -> Path:
    path = FIXTURES / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no {name}.json in ../shared/fixtures")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_stored_numbers_come_out(name: str) -> None:
    report = check_file(_stored(name))
    assert [f"{case.id}: {case.differences}" for case in report.failed] == []
    assert not report.unreadable
    assert report.cases


def _first_number(tree: Json) -> tuple[Json, Json]:
    """(container, key) of the first number in outputs, depth first."""
    items = enumerate(tree) if isinstance(tree, list) else tree.items()
    for key, value in items:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return tree, key
        if isinstance(value, list | dict) and value:
            return _first_number(value)
    raise AssertionError("no number")


@pytest.mark.parametrize("name", NAMES)
def test_one_changed_number_of_a_copy_fails_its_case_and_not_its_neighbours(name: str, tmp_path: Path) -> None:
    copy = tmp_path / f"{name}.json"
    shutil.copy(_stored(name), copy)
    stored = json.loads(copy.read_text(encoding="utf-8"))
    middle = len(stored["cases"]) // 2
    stored["cases"] = stored["cases"][middle - 1 : middle + 2]
    case = stored["cases"][1]
    container, key = _first_number(case["outputs"])
    container[key] -= 0.25 * max(abs(container[key]), 1)
    copy.write_text(json.dumps(stored), encoding="utf-8")
    code, lines = _run(tmp_path)
    assert code == 1
    assert [line.split(":")[0] for line in lines if line.startswith("  case ")] == [f"  case {case['id']}"]


def test_who_reads_may_stop_early(tmp_path: Path) -> None:
    """As `head` does: no traceback."""
    _write(tmp_path, "balancing", cases=[_workload()])
    command = [sys.executable, "-m", "asyncrl.algorithms.check", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
