"""The hunt finds what it should, in the order of the seeds, and tells it so that it can be seen again."""

import io
import os
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.config import parse_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.errors import UnseenError, Violation
from asyncrl.simulation.faults import ALL, FaultKind
from asyncrl.simulation.hunt import HuntResult, hunt, num_jobs, print_hunt, progress_to, replay_of
from asyncrl.simulation.hunt_crew import DIED, TOO_LONG, Crew
from asyncrl.simulation.hunt_runs import RunTask, kind_of, run_task
from asyncrl.simulation.loop import Order

TREE: dict[str, Any] = {
    "data": {"train_batch_size": 2, "max_prompt_length": 16, "max_response_length": 64},
    "rollout": {"n": 2, "max_num_seqs": 4},
    "agent": {"name": "tool_agent"},
    "trainer": {"total_training_steps": 2, "save_freq": 1, "trace_groups": 0},
    "sim": {"prompts": {"count": 8, "prompt_len": 4}, "sessions": {"turns": 2, "turn_len": 8}, "faults": {"crash": 0.3}},
}


def scenario_of(**sim: Any) -> Scenario:
    return parse_run(Scenario, {**TREE, "sim": {**TREE["sim"], **sim}})


GOOD = scenario_of()
MORTAL = scenario_of(max_lives=1)
"""May be started once: every crash makes it fail."""
CRASHES = frozenset({FaultKind.CRASH})


def facts(result: HuntResult) -> list[object]:
    """All of it but the real time."""
    return [result.num_runs, result.findings, result.steps, result.seconds, result.num_lives, result.hits]


def test_a_good_scenario_has_no_violations() -> None:
    result = hunt(GOOD, range(6), jobs=0)
    assert result.is_ok
    assert result.num_runs == 6
    assert result.num_lives > 6  # some were started again
    assert sum(result.hits.values()) > 0


@pytest.mark.parametrize("keeps_going", [False, True])
def test_the_result_does_not_depend_on_the_number_of_processes(keeps_going: bool) -> None:
    here = hunt(MORTAL, range(12), faults=CRASHES, jobs=0, keeps_going=keeps_going)
    there = hunt(MORTAL, range(12), faults=CRASHES, jobs=3, keeps_going=keeps_going)
    assert facts(here) == facts(there)
    assert here.findings
    assert len(here.findings) == 1 or keeps_going
    assert here.num_runs == (12 if keeps_going else here.findings[0].seed + 1)


def test_a_finding_says_where_it_was_and_what_led_to_it() -> None:
    finding = hunt(MORTAL, range(12), faults=CRASHES, jobs=0).findings[0]
    assert finding.kind == "EndlessError"
    assert "sim.max_lives" in finding.message
    assert finding.event >= len(finding.events) > 0
    assert any("fault" in line and "crash" in line for line in finding.events)
    assert "EndlessError" in finding.trace


def test_kinds_of_failures() -> None:
    unseen = UnseenError("nobody has looked at it")
    unseen.__cause__ = KeyError("x")
    assert kind_of(Violation("I4", "x")) == "I4"
    assert kind_of(unseen) == "UnseenError of KeyError"
    assert kind_of(ExceptionGroup("two", [ValueError("a"), KeyError("b")])) == "ValueError"


# --- what a run does to its process -----------------------------------------------------------------------------------------------


class EndsItsProcess:
    """In place of a scenario: the worker that unpacks it is gone."""

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return os._exit, (3,)


def test_a_run_that_ends_its_process_is_a_finding_and_the_others_go_on() -> None:
    deadly: Any = EndsItsProcess()
    tasks = [RunTask(scenario=deadly if seed in (1, 4) else GOOD, seed=seed) for seed in range(6)]
    with Crew(2) as crew:
        reports = list(crew.reports(tasks))
    assert [report.seed for report in reports] == [0, 1, 2, 3, 4, 5]
    assert [report.finding and report.finding.kind for report in reports] == [None, DIED, None, None, DIED, None]
    assert reports[1].finding is not None
    assert "exit status 3" in reports[1].finding.message


def test_a_run_that_takes_too_long_is_a_finding_that_shows_where_it_was() -> None:
    endless = parse_run(Scenario, {**TREE, "trainer": {**TREE["trainer"], "total_training_steps": 10**6}})
    result = hunt(endless, [5], faults=frozenset(), jobs=1, run_limit_s=1.0)
    assert [(finding.seed, finding.kind) for finding in result.findings] == [(5, TOO_LONG)]
    assert "in simulate" in result.findings[0].trace


def test_who_stops_asking_can_ask_for_other_tasks() -> None:
    def task(seed: int) -> RunTask:
        return RunTask(scenario=GOOD, seed=seed)

    with Crew(2) as crew:
        reports = crew.reports(task(seed) for seed in range(50))
        assert next(reports).seed == 0
        reports.close()
        assert [report.seed for report in crew.reports(task(seed) for seed in (7, 8, 9))] == [7, 8, 9]


def test_an_interrupted_hunt_ends_with_what_it_has() -> None:
    def told(result: HuntResult, num_seeds: int) -> None:
        if result.num_runs == 2:
            raise KeyboardInterrupt

    result = hunt(GOOD, range(1000), jobs=2, told=told)
    assert result.is_interrupted
    assert result.num_runs == 2


def test_jobs_are_as_many_as_asked_and_never_more_than_the_work() -> None:
    assert num_jobs(None, 1) == 1
    assert num_jobs(8, 3) == 3
    assert num_jobs(0, 3) == 0


# --- told to a person -------------------------------------------------------------------------------------------------------------


def test_the_last_line_counts() -> None:
    out = io.StringIO()
    print_hunt(hunt(GOOD, range(2), jobs=0), str, file=out)
    assert out.getvalue().splitlines()[-1] == "2 runs, 0 violations"


def test_a_violation_is_told_with_its_events_and_how_to_see_it_again() -> None:
    result, out = hunt(MORTAL, range(12), faults=CRASHES, jobs=0), io.StringIO()
    print_hunt(result, lambda seed: replay_of("a.toml", seed, CRASHES, overrides=["sim.max_lives=1"]), file=out)
    seed, text = result.findings[0].seed, out.getvalue()
    assert text.startswith(f"seed {seed}: EndlessError at event ")
    assert all(line in text for line in result.findings[0].events)
    assert f"again: asyncrl simulate a.toml --seed {seed} --faults crash sim.max_lives=1\n" in text
    assert text.splitlines()[-1] == f"{seed + 1} runs, 1 violations"


def test_what_the_replay_line_says() -> None:
    assert replay_of("a.toml", 3, ALL) == "asyncrl simulate a.toml --seed 3 --faults all"
    assert replay_of("a b.toml", 3, frozenset(), order=Order.ALL) == "asyncrl simulate 'a b.toml' --seed 3 --order all"


def test_progress_is_for_terminals() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    quiet, terminal = io.StringIO(), Terminal()
    for file in (quiet, terminal):
        hunt(GOOD, range(2), jobs=0, told=progress_to(file))
    assert quiet.getvalue() == ""
    assert "2 of 2 runs, 0 violations" in terminal.getvalue()


def test_a_task_is_all_that_a_run_depends_on() -> None:
    task = RunTask(scenario=GOOD, seed=3, faults=ALL)
    assert run_task(task) == run_task(task)
