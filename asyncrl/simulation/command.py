"""`asyncrl simulate`: what its options ask for, done and told.

cli -> [command] -> simulate | hunt | shrink | fit -> report, timeline, perfetto, sweep

Returns the exit code: 1 when a violation was found.
"""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.errors import ConfigError, RunFolderError
from asyncrl.simulation.activity import Activity
from asyncrl.simulation.faults import ALL, FaultKind
from asyncrl.simulation.hunt import finding_lines, hunt, num_jobs, print_hunt, progress_to, replay_of
from asyncrl.simulation.hunt_runs import RunTask, run_task
from asyncrl.simulation.loop import Order
from asyncrl.simulation.perfetto import trace_of
from asyncrl.simulation.report import Report, report_of
from asyncrl.simulation.report_text import render
from asyncrl.simulation.run import Outcome, simulate
from asyncrl.simulation.shrink import shrink
from asyncrl.simulation.sweep import as_json, draw_sweep, parse_sweep, side_by_side
from asyncrl.simulation.timeline import draw_timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """As given. output: a folder for pictures, trace and tables; events: a file for the whole event log."""

    files: tuple[Path, ...]
    overrides: tuple[str, ...] = ()
    seed: int = 0
    seeds: str = ""
    faults: str = "none"
    order: Order = Order.TASKS
    jobs: int | None = None
    keep_going: bool = False
    compare: bool = False
    sweep: str = ""
    output: Path | None = None
    events: Path | None = None
    as_json: bool = False
    width: int | None = None


def run_command(options: SimulateOptions) -> int:
    """Raises ConfigError for what cannot be done."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # the controller's own lines, thousands of times, of a world that is not there
    faults = parse_faults(options.faults)
    if options.output is not None:
        _make_folder(options.output)
    if options.seeds:
        return _hunt(options, faults)
    if options.compare or options.sweep or len(options.files) > 1:
        return _side_by_side(options, faults)
    return _one(options, faults)


def parse_faults(text: str) -> frozenset[FaultKind]:
    """`all`, `none`, or kinds with commas. Raises ConfigError."""
    if text in ("all", "none"):
        return ALL if text == "all" else frozenset()
    try:
        return frozenset(FaultKind(name.strip()) for name in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--faults {text!r}: {error}; kinds: all, none, {', '.join(FaultKind)}") from None


def parse_seeds(text: str) -> range:
    """`a..b`, both included, or one number. Raises ConfigError."""
    first, dots, last = text.partition("..")
    try:
        seeds = range(int(first), int(last if dots else first) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds or seeds.start < 0:
        raise ConfigError(f"--seeds {text!r}: it is FIRST..LAST, such as 0..999")
    return seeds


# --- one seed ---------------------------------------------------------------------------------------------------------------------


def _one(options: SimulateOptions, faults: frozenset[FaultKind]) -> int:
    outcome, activity, report = _simulated(options, options.files[0], options.overrides, faults)
    if options.events is not None:
        _written(options.events, lambda path: outcome.log.write(path))
    if options.output is not None:
        _write_all(options.output, outcome, activity, report)
    print(json.dumps(report.as_json()) if options.as_json else render(report, width=options.width), end="\n" * options.as_json)
    if outcome.failure is None:
        return 0
    again = replay_of(str(options.files[0]), options.seed, faults, order=options.order, overrides=options.overrides)
    found = run_task(RunTask(scenario=outcome.machine.scenario, seed=options.seed, faults=faults, order=options.order)).finding
    print("\n".join(finding_lines(found, again)) if found else report.failure, file=sys.stderr)
    return 1


def _simulated(
    options: SimulateOptions, file: Path, overrides: Sequence[str], faults: frozenset[FaultKind]
) -> tuple[Outcome, Activity, Report]:
    scenario, activity = load_run(Scenario, file, overrides), Activity()
    keep = None if options.events is not None else 50
    outcome = simulate(
        scenario,
        seed=options.seed,
        order=options.order,
        faults=faults,
        keep_events=keep,
        observers=[activity],
        watcher=activity,
        oracles=bool(faults),
    )
    return outcome, activity, report_of(outcome, activity)


def _write_all(folder: Path, outcome: Outcome, activity: Activity, report: Report) -> None:
    _written(folder / "report.json", lambda path: path.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8"))
    _written(folder / "trace.json", lambda path: path.write_text(json.dumps(trace_of(outcome, activity)), encoding="utf-8"))
    _written(folder / "timeline.png", lambda path: draw_timeline(outcome, activity, path))


# --- several ----------------------------------------------------------------------------------------------------------------------


def _side_by_side(options: SimulateOptions, faults: frozenset[FaultKind]) -> int:
    if options.events is not None:
        raise ConfigError("--events writes the log of one simulation: give one scenario, without --compare and --sweep")
    sweep = parse_sweep(options.sweep) if options.sweep else None
    if sweep is not None and len(options.files) > 1:
        raise ConfigError("--sweep takes one scenario; --compare takes several")
    if sweep is None and len(options.files) < 2:
        raise ConfigError("--compare needs two scenarios or more")
    if sweep is None:
        asked = [(file.stem, file, list(options.overrides)) for file in options.files]
    else:
        asked = [(f"{sweep.key}={value}", options.files[0], [*options.overrides, f"{sweep.key}={value}"]) for value in sweep.values]
    for _, file, overrides in asked:
        load_run(Scenario, file, overrides)  # a value that cannot be is told before an hour of others
    reports = [_simulated(options, file, overrides, faults)[2] for _, file, overrides in asked]
    names = [name for name, _, _ in asked]
    if options.as_json:
        print(json.dumps(as_json(names, reports)))
    else:
        print(side_by_side(names, reports, ratios=sweep is None, width=options.width), end="")
    if options.output is not None:
        folder, text = options.output, json.dumps(as_json(names, reports), indent=1)
        _written(folder / "reports.json", lambda path: path.write_text(f"{text}\n", encoding="utf-8"))
        if sweep is not None:
            _written(folder / "sweep.png", lambda path: draw_sweep(sweep, reports, path))
    failures = [f"{name}: {report.failure}" for name, report in zip(names, reports, strict=True) if report.failure]
    print("\n".join(failures), file=sys.stderr, end="\n" * bool(failures))
    return int(bool(failures))


# --- the hunt ---------------------------------------------------------------------------------------------------------------------


def _hunt(options: SimulateOptions, faults: frozenset[FaultKind]) -> int:
    if len(options.files) > 1 or options.compare or options.sweep or options.events or options.output:
        raise ConfigError("--seeds hunts in one scenario; --compare, --sweep, --output and --events go with --seed")
    file, seeds = options.files[0], parse_seeds(options.seeds)
    scenario = load_run(Scenario, file, options.overrides)

    def replay(seed: int) -> str:
        return replay_of(str(file), seed, faults, order=options.order, overrides=options.overrides)

    told = progress_to(sys.stderr)
    result = hunt(scenario, seeds, faults=faults, order=options.order, jobs=options.jobs, keeps_going=options.keep_going, told=told)
    shrunk = None
    if result.findings and not result.is_interrupted:
        first = result.findings[0]
        task = RunTask(scenario=scenario, seed=first.seed, faults=faults, order=options.order)
        shrunk = shrink(task, first, jobs=num_jobs(options.jobs, len(seeds)))
    print_hunt(result, replay, shrunk=shrunk)
    return 0 if result.is_ok else 1


# --- files ------------------------------------------------------------------------------------------------------------------------


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"--output {folder}: {error.strerror}; give a folder that can be written") from error


def _written(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}") from error
    print(f"wrote {path}", file=sys.stderr)
