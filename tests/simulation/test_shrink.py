"""Shrinking ends at a small scenario that fails in the same way, and can be given on the command line."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from asyncrl.config import load_run, parse_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.faults import ALL, FaultKind
from asyncrl.simulation.hunt_runs import Finding, RunTask, run_task
from asyncrl.simulation.shrink import shrink
from asyncrl.simulation.shrink_steps import fewer_faults, smaller_values, tree_of, value_at, with_changes, written

TREE: dict[str, Any] = {
    "data": {"train_batch_size": 4, "max_prompt_length": 16, "max_response_length": 64},
    "rollout": {"n": 3, "max_num_seqs": 4},
    "agent": {"name": "tool_agent"},
    "trainer": {"total_training_steps": 3, "save_freq": 1, "trace_groups": 0},
    "sim": {
        "max_lives": 1,
        "prompts": {"count": 16, "prompt_len": 4},
        "sessions": {"turns": {"kind": "uniform", "low": 1, "high": 3}, "turn_len": 8},
        "faults": {"crash": 1.0, "journal_fail": 0.0},
    },
}
MORTAL = parse_run(Scenario, TREE)
"""May be started once: every crash makes it fail."""


def failing(scenario: Scenario = MORTAL) -> tuple[RunTask, Finding]:
    for seed in range(50):
        task = RunTask(scenario=scenario, seed=seed, faults=ALL)
        finding = run_task(task).finding
        if finding is not None:
            return task, finding
    raise AssertionError("no seed fails")


def test_the_smallest_that_still_fails(tmp_path: Path) -> None:
    task, finding = failing()
    shrunk = shrink(task, finding, jobs=0, max_runs=250, num_seeds=3)
    small = shrunk.task.scenario
    assert shrunk.finding.kind == finding.kind
    assert len(shrunk.task.faults) == 1
    assert small.trainer.total_training_steps == small.data.train_batch_size == 1
    assert value_at(small, "sim.sessions.turn_len").value <= 2
    path = tmp_path / "mortal.toml"
    path.write_text(tomli_w.dumps(TREE))
    again = load_run(Scenario, path, shrunk.overrides)
    assert again == small
    replayed = run_task(RunTask(scenario=again, seed=shrunk.seed, faults=shrunk.task.faults)).finding
    assert replayed == shrunk.finding


@pytest.mark.long
def test_shrinking_takes_no_more_runs_than_it_may() -> None:
    task, finding = failing()
    shrunk = shrink(task, finding, jobs=0, max_runs=10)
    assert shrunk.num_runs <= 10
    assert run_task(shrunk.task).finding == shrunk.finding


def test_steps_go_down_only() -> None:
    for change in smaller_values(lambda: MORTAL):
        for key, value in change.items():
            before = value_at(MORTAL, key)
            if isinstance(before, int | float):
                assert value <= before, key
    assert all(faults < ALL for faults in fewer_faults(lambda: ALL))
    assert list(fewer_faults(lambda: frozenset({FaultKind.CRASH}))) == [frozenset(), frozenset()]


def test_changes_leave_the_tree_alone_and_are_what_the_scenario_then_has() -> None:
    tree = tree_of(MORTAL)
    changed = with_changes(tree, {"sim.engine.count": 2, "sim.sessions.turns": 1})
    assert tree == tree_of(MORTAL)
    scenario = parse_run(Scenario, changed)
    assert (scenario.sim.engine.count, scenario.sim.sessions.turns.value) == (2, 1)
    assert parse_run(Scenario, tree) == MORTAL


@pytest.mark.parametrize(
    ("value", "text"), [(1, "1"), (0.5, "0.5"), (True, "true"), ("a", '"a"'), ([{"name": "x", "n": 1}], '[{ name = "x", n = 1 }]')]
)
def test_values_are_written_as_toml(value: Any, text: str) -> None:
    assert written(value) == text
