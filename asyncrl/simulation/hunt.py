"""The hunt: a scenario under many seeds, in several processes; what it finds, told so that anybody can see it again.

scenario, seeds, faults -> [hunt] -> Crew -> HuntResult -> print_hunt

The result is the same for any number of processes: it holds what a single one would have found, seed after seed.
"""

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from asyncrl.config.simulation import Scenario
from asyncrl.simulation.faults import FaultKind
from asyncrl.simulation.faults.kinds import ALL
from asyncrl.simulation.hunt_crew import Crew
from asyncrl.simulation.hunt_runs import Finding, RunReport, RunTask
from asyncrl.simulation.loop import Order
from asyncrl.simulation.shrink import Shrunk

RUN_LIMIT_S = 60.0
"""Real seconds of a run, of which the reference scenario takes a hundredth; after that it counts as a finding."""
TOLD_EVERY_S = 0.5
"""Between two progress lines."""


@dataclass(slots=True, kw_only=True)
class HuntResult:
    """What a hunt did and found. Runs after the one it stopped at do not count."""

    num_runs: int = 0
    findings: list[Finding] = field(default_factory=list)
    """In the order of the seeds."""
    steps: int = 0
    """Callbacks that were run: steps of tasks, and events of the edges."""
    seconds: float = 0.0
    """Virtual."""
    num_lives: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    """Faults that came true, by kind."""
    wall_s: float = 0.0
    is_interrupted: bool = False

    @property
    def is_ok(self) -> bool:
        return not self.findings

    def add(self, report: RunReport) -> None:
        self.num_runs += 1
        self.steps += report.steps
        self.seconds += report.seconds
        self.num_lives += report.num_lives
        self.hits.update(report.hits)
        if report.finding is not None:
            self.findings.append(report.finding)


Told = Callable[[HuntResult, int], None]
"""(the result so far, number of seeds): told after each run."""


def hunt(
    scenario: Scenario,
    seeds: Sequence[int],
    *,
    faults: frozenset[FaultKind] = ALL,
    order: Order = Order.TASKS,
    oracles: bool = True,
    jobs: int | None = None,
    keeps_going: bool = False,
    run_limit_s: float = RUN_LIMIT_S,
    told: Told | None = None,
) -> HuntResult:
    """Run `scenario` under each of `seeds`, up to the first finding, or (`keeps_going`) all of them.

    jobs: worker processes; None: one a core; 0: none, everything in this process, where nothing bounds a run.
    Ctrl-C ends it with what it has; `is_interrupted` says so.
    """
    result, began = HuntResult(), time.monotonic()
    tasks = (RunTask(scenario=scenario, seed=seed, faults=faults, order=order, oracles=oracles) for seed in seeds)
    with Crew(num_jobs(jobs, len(seeds)), limit_s=run_limit_s) as crew:
        try:
            for report in crew.reports(tasks):
                result.add(report)
                if told is not None:
                    told(result, len(seeds))
                if result.findings and not keeps_going:
                    break
        except KeyboardInterrupt:
            result.is_interrupted = True
    result.wall_s = time.monotonic() - began
    return result


def num_jobs(asked: int | None, num_tasks: int) -> int:
    """Worker processes: what was asked for, or one a core that this process may use; never more than there is work."""
    return min(len(os.sched_getaffinity(0)) if asked is None else asked, num_tasks)


# --- told to a person


def progress_to(file: TextIO) -> Told:
    """One line that is written over, on a terminal; nothing elsewhere."""
    began = last = time.monotonic()

    def told(result: HuntResult, num_seeds: int) -> None:
        nonlocal last
        now, is_last = time.monotonic(), result.num_runs == num_seeds
        if not file.isatty() or (now - last < TOLD_EVERY_S and not is_last):
            return
        last = now
        rate = result.num_runs / max(now - began, 1e-9)
        file.write(f"\r{result.num_runs} of {num_seeds} runs, {len(result.findings)} violations, {rate:.1f} runs/s\033[K")
        file.write("\r\033[K" if is_last else "")
        file.flush()

    return told


def print_hunt(
    result: HuntResult, replay: Callable[[int], str], *, shrunk: Shrunk | None = None, file: TextIO | None = None
) -> None:
    """Each finding with what led to it, what faults there were, and as the last line `N runs, V violations`.

    replay: the command line that runs a seed again (`replay_of`).
    """
    out = sys.stdout if file is None else file
    for finding in result.findings:
        print("\n".join(finding_lines(finding, replay(finding.seed))), file=out)
    if shrunk is not None:
        print("\n".join(shrunk_lines(shrunk)), file=out)
    faults = ", ".join(f"{kind} {number}" for kind, number in sorted(result.hits.items())) or "none"
    print(f"faults that came true: {faults}", file=out)
    print(
        f"{result.num_lives} lives, {result.steps} steps, {result.seconds:.0f} virtual seconds in {result.wall_s:.1f} s", file=out
    )
    if result.is_interrupted:
        print("interrupted: the other seeds were not run", file=out)
    print(f"{result.num_runs} runs, {len(result.findings)} violations", file=out)


def finding_lines(finding: Finding, replay: str) -> Iterator[str]:
    """A finding for a person: where, the last events, what it was, and how to see it again."""
    yield f"seed {finding.seed}: {finding.kind} at event {finding.event}, {finding.at_s:.6f} virtual s"
    if finding.events:
        yield f"  the last {len(finding.events)} events:"
        yield from (f"    {line}" for line in finding.events)
    yield from (f"  {line}" for line in finding.trace.splitlines())
    yield from (f"  {line}" for line in finding.message.splitlines() if line not in finding.trace)
    yield f"  again: {replay}"


def shrunk_lines(shrunk: Shrunk) -> Iterator[str]:
    """The smallest scenario, as what to give on the command line."""
    yield f"the smallest that still fails with {shrunk.finding.kind} ({shrunk.num_runs} runs): seed {shrunk.seed}"
    yield from (f"  {override}" for override in shrunk.overrides)
    yield f"  {shrunk.finding.message.partition(chr(10))[0]}"


def replay_of(
    path: str, seed: int, faults: frozenset[FaultKind], *, order: Order = Order.TASKS, overrides: Sequence[str] = ()
) -> str:
    """The command line that runs a seed again."""
    parts = ["asyncrl", "simulate", path, "--seed", str(seed)]
    if faults:
        parts += ["--faults", "all" if faults == ALL else ",".join(sorted(faults))]
    if order is not Order.TASKS:
        parts += ["--order", str(order)]
    return shlex.join([*parts, *overrides])
