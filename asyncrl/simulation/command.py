"""`asyncrl simulate`: what was asked for, done and told.

cli -> Asked -> [command] -> simulate | hunt | shrink | fit -> report, timeline, perfetto, comparison

Every way returns the exit code: 1 when a violation was found, or a run failed.
"""

import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from asyncrl.config.simulation import Scenario
from asyncrl.errors import RunFolderError
from asyncrl.ports import Json
from asyncrl.simulation.activity import Activity
from asyncrl.simulation.asked import Asked, Named
from asyncrl.simulation.comparison import as_json, draw_shares, draw_sweep, side_by_side
from asyncrl.simulation.fit import fit_text
from asyncrl.simulation.hunt import HuntResult, finding_lines, hunt, num_jobs, print_hunt, progress_to, replay_of
from asyncrl.simulation.hunt_runs import Finding, RunTask, finding_of
from asyncrl.simulation.perfetto import trace_of
from asyncrl.simulation.report import Report, report_of
from asyncrl.simulation.report_text import render
from asyncrl.simulation.run import Outcome, simulate
from asyncrl.simulation.shrink import Shrunk, shrink
from asyncrl.simulation.timeline import draw_timeline

LARGE = 8192
"""Sessions of a step above which the oracles stay out of a run without faults: it is there for its numbers."""

INTERRUPTED = 130
"""Exit code of a hunt that Ctrl-C ended before it found anything: it has not passed. 128 + SIGINT, as shells have it."""


def run_asked(asked: Asked) -> int:
    """Raises RunFolderError for a file that cannot be written."""
    torch.set_num_threads(1)
    if asked.fit is not None:
        return _fit(asked.fit, asked.output)
    if asked.output is not None:
        _make_folder(asked.output)
    if asked.seeds is not None:
        return _hunt(asked, asked.scenarios[0], asked.seeds)
    if asked.compares or asked.sweep is not None:
        return _side_by_side(asked)
    return max([_one(asked, named) for named in asked.scenarios])


def _fit(run: Path, output: Path | None) -> int:
    text = fit_text(run)
    if output is None:
        print(text, end="")
    else:
        _written(output, partial(_write_text, text))
    return 0


# --- one after the other ----------------------------------------------------------------------------------------------------------


def _one(asked: Asked, named: Named) -> int:
    outcome, activity, report = _simulated(asked, named.scenario, keep=asked.events is None)
    if asked.events is not None:
        _written(asked.events, outcome.log.write)
    if asked.output is not None:
        folder = asked.output if len(asked.scenarios) == 1 else asked.output / named.name
        _make_folder(folder)
        _write_all(folder, outcome, activity, report)
    found = finding_of(outcome)
    if asked.as_json:
        print(json.dumps({"name": named.name, "seed": asked.seed, "figures": report.figures, **report.as_json()}))
    else:
        heading = f"{named.file}\n" if len(asked.scenarios) > 1 else ""
        print(f"{heading}{render(report, width=asked.width)}", end="\n" if heading else "")
    if found is None:
        return 0
    print("\n".join(finding_lines(found, _again(asked, named, asked.seed))), file=sys.stderr if asked.as_json else sys.stdout)
    return 1


def _simulated(asked: Asked, scenario: Scenario, *, keep: bool) -> tuple[Outcome, Activity, Report]:
    """keep: only the last events."""
    activity = Activity()
    outcome = simulate(
        scenario,
        seed=asked.seed,
        order=asked.order,
        faults=asked.faults,
        keep_events=50 if keep else None,
        observers=[activity],
        watcher=activity,
        oracles=bool(asked.faults) or scenario.data.train_batch_size * scenario.rollout.n <= LARGE,
    )
    return outcome, activity, report_of(outcome, activity)


def _again(asked: Asked, named: Named, seed: int) -> str:
    return replay_of(str(named.file), seed, asked.faults, order=asked.order, overrides=named.overrides)


def _write_all(folder: Path, outcome: Outcome, activity: Activity, report: Report) -> None:
    _written(folder / "report.txt", partial(_write_text, render(report)))
    _written(folder / "report.json", partial(_write_text, f"{json.dumps(report.as_json(), indent=1)}\n"))
    _written(folder / "trace.json", partial(_write_text, json.dumps(trace_of(outcome, activity))))
    _written(folder / "timeline.png", partial(draw_timeline, outcome, activity))


# --- side by side -----------------------------------------------------------------------------------------------------------------


def _side_by_side(asked: Asked) -> int:
    names = [named.name for named in asked.scenarios]
    reports = _reports(asked)
    table = side_by_side(names, reports, ratios=asked.sweep is None, width=asked.width)
    found = json.dumps(as_json(names, reports), indent=None if asked.output is None else 1)
    print(found if asked.as_json else table, end="\n" * asked.as_json)
    if asked.output is not None:
        _written(asked.output / "table.txt", partial(_write_text, table))
        _written(asked.output / "reports.json", partial(_write_text, f"{found}\n"))
        _written(asked.output / "shares.png", partial(draw_shares, names, reports))
        if asked.sweep is not None:
            _written(asked.output / "sweep.png", partial(draw_sweep, asked.sweep, reports))
    failed = [f"{named.name}: {report.failure}" for named, report in zip(asked.scenarios, reports, strict=True) if report.failure]
    print("\n".join(failed), file=sys.stderr, end="\n" * bool(failed))
    return int(bool(failed))


def _reports(asked: Asked) -> list[Report]:
    """In the order of the scenarios. One at a time unless more processes were asked for: a large one takes gigabytes."""
    work = partial(_report, asked)
    scenarios = [named.scenario for named in asked.scenarios]
    if (asked.jobs or 1) == 1:
        return [work(scenario) for scenario in scenarios]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # everything is imported once, by who has no threads
    with ProcessPoolExecutor(asked.jobs, mp_context=context) as processes:
        return list(processes.map(work, scenarios))


def _report(asked: Asked, scenario: Scenario) -> Report:
    """In a process of its own, or in this one."""
    torch.set_num_threads(1)
    return _simulated(asked, scenario, keep=True)[2]


# --- the hunt ---------------------------------------------------------------------------------------------------------------------


def _hunt(asked: Asked, named: Named, seeds: Sequence[int]) -> int:
    result = hunt(
        named.scenario,
        seeds,
        faults=asked.faults,
        order=asked.order,
        jobs=asked.jobs,
        keeps_going=asked.keeps_going,
        told=progress_to(sys.stderr),
    )
    shrunk = None
    if result.findings and not result.is_interrupted:
        first = result.findings[0]
        task = RunTask(scenario=named.scenario, seed=first.seed, faults=asked.faults, order=asked.order)
        shrunk = shrink(task, first, jobs=num_jobs(asked.jobs, len(seeds)))
    if asked.as_json:
        print(json.dumps(_hunt_json(asked, named, result, shrunk)))
    else:
        print_hunt(result, partial(_again, asked, named), shrunk=shrunk)
    if result.is_ok and result.is_interrupted:
        return INTERRUPTED
    return 0 if result.is_ok else 1


def _hunt_json(asked: Asked, named: Named, result: HuntResult, shrunk: Shrunk | None) -> dict[str, Json]:
    def told(finding: Finding) -> dict[str, Json]:
        return {**asdict(finding), "again": _again(asked, named, finding.seed)}

    return {
        "runs": result.num_runs,
        "violations": len(result.findings),
        "lives": result.num_lives,
        "steps": result.steps,
        "virtual_s": result.seconds,
        "faults": dict(sorted(result.hits.items())),
        "is_interrupted": result.is_interrupted,
        "findings": [told(finding) for finding in result.findings],
        "shrunk": None if shrunk is None else {"overrides": list(shrunk.overrides), "finding": asdict(shrunk.finding)},
    }


# --- files ------------------------------------------------------------------------------------------------------------------------


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"--output {folder}: {error.strerror}; give a folder that can be written") from error


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _written(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}") from error
    print(f"wrote {path}", file=sys.stderr)
