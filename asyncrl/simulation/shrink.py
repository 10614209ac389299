"""Shrinking: from a scenario that fails to the smallest that still fails in the same way.

finding -> [shrink] -> Crew -> Shrunk, as overrides for the command line

Greedy: one step at a time (fewer faults, groups, sessions, turns, shorter times: `shrink_steps.py`), each kept when one of a few
seeds fails with the same kind; until no step helps, or the runs are used up. What comes out has been run, in the form in which it
is told.
"""

from contextlib import closing
from dataclasses import dataclass, replace

from asyncrl.config import parse_run
from asyncrl.config.simulation import Scenario
from asyncrl.errors import ConfigError
from asyncrl.simulation.hunt_crew import Crew
from asyncrl.simulation.hunt_runs import Finding, RunTask
from asyncrl.simulation.shrink_steps import Changes, fewer_faults, smaller_values, tree_of, with_changes, written

MAX_RUNS = 1000
"""Runs that a shrinking may take: the later ones are the small ones."""
NUM_SEEDS = 8
"""Other seeds that a smaller scenario is tried with: it has fewer moments at which the same thing can happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """`task` fails with `finding`; `overrides` of the original scenario, seed and faults of `task` give it."""

    task: RunTask
    finding: Finding
    changes: Changes
    num_runs: int

    @property
    def seed(self) -> int:
        return self.task.seed

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(f"{key}={written(value)}" for key, value in sorted(self.changes.items()))


def shrink(
    task: RunTask,
    finding: Finding,
    *,
    jobs: int = 1,
    run_limit_s: float = 60.0,
    max_runs: int = MAX_RUNS,
    num_seeds: int = NUM_SEEDS,
) -> Shrunk:
    """The smallest that was found. `task` must fail with `finding`. jobs: as for `hunt`."""
    with Crew(jobs, limit_s=run_limit_s) as crew:
        search = _Search(task, finding, crew, max_runs, num_seeds)
        search.run()
        return search.best


class _Search:
    def __init__(self, task: RunTask, finding: Finding, crew: Crew, max_runs: int, num_seeds: int) -> None:
        self._tree = tree_of(task.scenario)
        self._crew = crew
        self._left = max_runs
        self._num_seeds = num_seeds
        self._tried: set[str] = set()
        self.best = Shrunk(task=task, finding=finding, changes={}, num_runs=0)

    def run(self) -> None:
        """Until a whole round of steps has brought nothing."""
        while self._round():
            pass

    def _round(self) -> bool:
        has_helped = False
        for faults in fewer_faults(lambda: self.best.task.faults):
            has_helped |= self._try(replace(self.best.task, faults=faults), self.best.changes)
        for change in smaller_values(lambda: self.best.task.scenario):
            changes = {**self.best.changes, **change}
            scenario = self._scenario(changes)
            if scenario is not None and scenario != self.best.task.scenario:
                has_helped |= self._try(replace(self.best.task, scenario=scenario), changes)
        return has_helped and self._left > 0

    def _scenario(self, changes: Changes) -> Scenario | None:
        """As the command line would read it; None when it refuses."""
        try:
            return parse_run(Scenario, with_changes(self._tree, changes))
        except ConfigError:
            return None

    def _try(self, task: RunTask, changes: Changes) -> bool:
        """Keep this smaller one if it fails in the same way. One that did not is not tried again."""
        name = f"{sorted(task.faults)} {task.scenario.model_dump_json()}"
        if name in self._tried:
            return False
        self._tried.add(name)
        seeds = [task.seed, *(seed for seed in range(self._num_seeds) if seed != task.seed)][: self._left]
        with closing(self._crew.reports(replace(task, seed=seed) for seed in seeds)) as reports:
            for report in reports:
                self._left -= 1
                self.best = replace(self.best, num_runs=self.best.num_runs + 1)
                found = report.finding
                if found is not None and found.kind == self.best.finding.kind:
                    self.best = replace(self.best, task=replace(task, seed=report.seed), finding=found, changes=changes)
                    return True
        return False
