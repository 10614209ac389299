"""The picture and the Perfetto trace of a simulated run: something is seen, it is what happened, and neither grows with the run."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.activity import Activity
from asyncrl.simulation.grid import grid_of
from asyncrl.simulation.perfetto import MAX_ENGINES, MAX_POINTS, trace_of
from asyncrl.simulation.report import report_of
from asyncrl.simulation.run import Outcome, simulate
from asyncrl.simulation.timeline import BANDS, BINS, bin_means, draw_timeline, engine_bands

pytestmark = pytest.mark.long

REFERENCE = Path(__file__).parents[2] / "configs" / "sim" / "reference.toml"
Seen = tuple[Outcome, Activity]
Trace = dict[str, Any]


def seen(*overrides: str) -> Seen:
    activity = Activity()
    outcome = simulate(load_run(Scenario, REFERENCE, overrides), seed=3, oracles=False, observers=[activity], watcher=activity)
    assert outcome.failure is None
    return outcome, activity


LARGE = ("sim.engine.count=40", "data.train_batch_size=40", "rollout.max_num_seqs=2")
LONG = (
    "sim.tools.0.latency_s=900",
    "agent.timeout_s=40000",
    "agent.group_timeout_s=40000",
    "agent.tool_timeout_s=9000",
    "replay.sample_timeout_s=1e6",
)


def pixels_of(run: Seen, path: Path) -> "np.ndarray[Any, Any]":
    draw_timeline(*run, path)
    return np.asarray(imread(path))


@pytest.mark.parametrize("overrides", [(), LARGE, LONG], ids=["small", "many engines", "hours"])
def test_a_picture_of_one_size_shows_something(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run = seen(*overrides)
    pixels = pixels_of(run, tmp_path / "timeline.png")
    assert pixels.shape[:2] == (900, 1300)
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20
    assert len(run[1].waits) == 4


def test_the_picture_is_that_of_the_run(tmp_path: Path) -> None:
    one, same, other = (
        pixels_of(run, tmp_path / "a.png") for run in (seen(), seen(), seen("sim.tools.0.latency_s=1.0", "sim.engine.count=2"))
    )
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("overrides", [(), LARGE], ids=["small", "many engines"])
def test_what_is_drawn_adds_up_to_what_happened(overrides: tuple[str, ...]) -> None:
    outcome, activity = seen(*overrides)
    scenario, report = outcome.machine.scenario, report_of(outcome, activity)
    edges = np.linspace(0.0, report.seconds, BINS + 1)
    count, slots, bin_s = scenario.sim.engine.count, scenario.rollout.max_num_seqs, report.seconds / BINS
    bands = engine_bands(activity, edges, count, slots)
    assert bands.shape == (min(count, BANDS), BINS)
    assert -1e-9 <= bands.min() <= bands.max() <= 1 + 1e-9
    engines = np.bincount(np.arange(count) * len(bands) // count)
    assert float((bands.sum(axis=1) * engines).sum()) * slots * bin_s == pytest.approx(report.slot_busy_s)
    grid = grid_of(activity, report.seconds)
    for name, counts in grid.at.items():
        assert float(bin_means(grid, counts, edges).sum()) * bin_s == pytest.approx(report.session_s.get(name, 0.0), abs=1e-6)


def loaded(run: Seen) -> Trace:
    trace: Trace = json.loads(json.dumps(trace_of(*run), allow_nan=False))
    return trace


def check_format(trace: Trace) -> None:
    """What ui.perfetto.dev needs; names of tracks, time that goes forward, and spans of a track that do not overlap."""
    named, used = set(), set()
    until: dict[tuple[int, int], int] = {}
    last = 0
    for event in trace["traceEvents"]:
        place = event["pid"], event["tid"]
        assert event["ph"] in ("M", "X", "C")
        assert type(event["name"]) is str
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            named.add(place)
            continue
        assert type(event["ts"]) is int
        assert event["ts"] >= last
        last = event["ts"]
        used.add(place)
        if event["ph"] == "X":
            assert event["ts"] >= until.get(place, 0), "two spans of a track at the same time"
            until[place] = event["ts"] + event["dur"]
            assert event["dur"] >= 0
        else:
            assert [type(value) for value in event["args"].values()] == [int]
    assert used <= named


@pytest.mark.parametrize("overrides", [(), LARGE], ids=["small", "many engines"])
def test_it_is_a_trace_that_perfetto_opens(overrides: tuple[str, ...]) -> None:
    run = seen(*overrides)
    trace = loaded(run)
    check_format(trace)
    counters = {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert {"busy slots", "generate", "queue for a slot", "tool search", "reward", "running", "finished", "training"} <= counters
    num_engines = run[0].machine.scenario.sim.engine.count
    assert ("engine 0" in counters) == (num_engines <= MAX_ENGINES)
    stages = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1}
    assert {"wait for a batch", "update_actor", "publish", "save"} <= stages


def test_a_counter_says_how_many_slots_were_busy() -> None:
    run = seen()
    events = [event for event in loaded(run)["traceEvents"] if event["ph"] == "C"]
    both = {name: [event for event in events if event["name"] == name] for name in ("busy slots", "engine 0")}
    area = {
        name: sum(now["args"][name] * (after["ts"] - now["ts"]) for now, after in itertools.pairwise(found))
        for name, found in both.items()
    }
    rows = [each for (_, what), each in run[1].work.items() if what == "row"]
    assert area["busy slots"] == pytest.approx(1e6 * sum(sum(each.ends) - sum(each.starts) for each in rows), rel=1e-4)
    assert area["engine 0"] == area["busy slots"]


def test_a_trace_has_a_limit() -> None:
    events = loaded(seen(*LARGE))["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "C"]
    assert max(names.count(name) for name in set(names)) <= MAX_POINTS
