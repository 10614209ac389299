"""The numbers of a simulated run: they add up, they are what happened, and they are told."""

import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.activity import Activity, grid_of
from asyncrl.simulation.perfetto import trace_of
from asyncrl.simulation.report import Report, render, report_of
from asyncrl.simulation.run import Outcome, simulate
from asyncrl.simulation.timeline import draw_timeline

REFERENCE = Path(__file__).parents[2] / "configs" / "sim" / "reference.toml"


@pytest.fixture(scope="module")
def simulated() -> tuple[Outcome, Activity, Report]:
    scenario, activity = load_run(Scenario, REFERENCE, ["trainer.trace_groups=4"]), Activity()
    outcome = simulate(scenario, seed=3, observers=[activity])
    assert outcome.failure is None
    return outcome, activity, report_of(outcome, activity)


def test_busy_and_idle_time_add_up_to_all_of_it(simulated: tuple[Outcome, Activity, Report]) -> None:
    outcome, _, report = simulated
    assert sum(report.trainer_busy_s.values()) + sum(report.trainer_idle_s.values()) == pytest.approx(outcome.seconds)
    assert report.slot_busy_s + sum(report.slot_idle_s.values()) == pytest.approx(outcome.seconds * report.slots)


def test_busy_slots_are_the_rows_that_ran(simulated: tuple[Outcome, Activity, Report]) -> None:
    _, activity, report = simulated
    rows = sum(activity.durations(name, "row").sum() for name in activity.engines)
    assert report.slot_busy_s == pytest.approx(rows)
    assert 0 < report.engines["least_busy"] <= report.engines["busy_share"] <= report.engines["most_busy"] <= 1


def test_the_counts_are_those_of_the_controller(simulated: tuple[Outcome, Activity, Report]) -> None:
    outcome, _, report = simulated
    config = outcome.machine.scenario
    assert report.steps == config.trainer.total_training_steps
    assert report.groups["trained"] == report.steps * config.data.train_batch_size
    assert report.staleness == {"0": report.steps * config.data.train_batch_size * config.rollout.n}
    assert report.lengths["bias"] == pytest.approx(1.0)


def test_staleness_is_seen_when_it_is_allowed() -> None:
    scenario, activity = load_run(Scenario, REFERENCE, ["trainer.trace_groups=4", "sim.max_staleness=1"]), Activity()
    outcome = simulate(scenario, seed=3, observers=[activity])
    assert outcome.failure is None
    assert set(report_of(outcome, activity).staleness) == {"0", "1"}


def test_work_that_a_crash_took_along_ends_with_it() -> None:
    activity = Activity()
    activity.busy("engine 0", "row", 1.0, 9.0)
    grid = grid_of(activity, 4.0)
    assert float((grid.rows * grid.seconds).sum()) == 3.0
    assert grid.edges.tolist() == [0.0, 1.0, 4.0]


def test_the_table_names_what_it_counts(simulated: tuple[Outcome, Activity, Report]) -> None:
    text = render(simulated[2])
    for word in ("tokens_per_s", "busy: update", "waits for generation", "tool search s", "staleness", "bias"):
        assert word in text
    json.dumps(simulated[2].as_json())


def test_the_picture_shows_something(simulated: tuple[Outcome, Activity, Report], tmp_path: Path) -> None:
    from matplotlib.image import imread

    draw_timeline(simulated[0], simulated[1], tmp_path / "timeline.png")
    pixels = np.asarray(imread(tmp_path / "timeline.png"))
    assert pixels.shape[0] > 300
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20


def test_perfetto_has_tracks_whose_events_do_not_overlap(simulated: tuple[Outcome, Activity, Report]) -> None:
    outcome, activity, _ = simulated
    events = trace_of(outcome, activity)["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"trainer", "engine", "engine 0", "tool", "session 0"} <= names
    until: dict[tuple[int, int], int] = {}
    nested = {event["pid"] for event in events if event["ph"] == "M" and str(event["args"]["name"]).startswith("group ")}
    for event in (event for event in events if event["ph"] == "X" and event["pid"] not in nested):
        track = event["pid"], event["tid"]
        assert event["ts"] >= until.get(track, 0), "two events of a track at the same time"
        until[track] = event["ts"] + event["dur"]
