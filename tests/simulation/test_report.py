"""The numbers of a simulated run: they add up, they are what happened, they are told; and to look changes nothing."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.activity import TRACK_SESSIONS, Activity
from asyncrl.simulation.faults import ALL, FaultKind
from asyncrl.simulation.grid import grid_of, wait_causes
from asyncrl.simulation.report import Report, report_of
from asyncrl.simulation.report_text import render
from asyncrl.simulation.run import Outcome, simulate

pytestmark = pytest.mark.long

CONFIGS = Path(__file__).parents[2] / "configs" / "sim"
REFERENCE, TOOLS = CONFIGS / "reference.toml", CONFIGS / "tools.toml"
Run = tuple[Outcome, Activity, Report]


def observed(path: Path, *overrides: str, seed: int = 3, faults: frozenset[FaultKind] = frozenset()) -> Run:
    activity = Activity()
    scenario = load_run(Scenario, path, overrides)
    outcome = simulate(scenario, seed=seed, faults=faults, observers=[activity], watcher=activity)
    assert outcome.failure is None
    return outcome, activity, report_of(outcome, activity)


@pytest.fixture(scope="module")
def reference() -> Run:
    return observed(REFERENCE)


SHAPES: dict[str, tuple[Path, tuple[str, ...]]] = {
    "reference": (REFERENCE, ()),
    "few slots": (REFERENCE, ("rollout.max_num_seqs=2",)),
    "engines that differ": (REFERENCE, ("sim.engine.count=3", "rollout.max_num_seqs=3")),
    "few sessions at once": (REFERENCE, ("agent.max_concurrent_sessions=3",)),
    "stale": (REFERENCE, ("trainer.mode=async", "trainer.max_staleness=2", "sim.training.update_call_s=1.0")),
    "slow controller": (REFERENCE, ("sim.times.turn_overhead_s=0.05",)),
    "calls at the same time": (TOOLS, ("data.train_batch_size=2", "trainer.total_training_steps=2")),
}


def check_identities(run: Run) -> None:
    outcome, activity, report = run
    assert sum(report.trainer_busy_s.values()) + sum(report.trainer_idle_s.values()) == pytest.approx(report.seconds, abs=1e-6)
    assert report.slot_busy_s + sum(report.slot_idle_s.values()) == pytest.approx(report.seconds * report.slots, abs=1e-6)
    parts = [*report.trainer_busy_s.values(), *report.trainer_idle_s.values(), *report.slot_idle_s.values()]
    assert min(parts) >= -1e-9
    grid = grid_of(activity, report.seconds)
    assert report.session_s == pytest.approx(
        {name: float(counts @ grid.seconds) for name, counts in grid.at.items() if counts.any()}
    )
    for wait in activity.waits:
        if wait.last is not None:
            assert sum(wait_causes(wait).values()) == pytest.approx(wait.end_s - wait.start_s)
    assert report.seconds <= outcome.seconds or outcome.failure


@pytest.mark.parametrize("shape", SHAPES)
def test_busy_and_idle_time_by_cause_add_up_to_all_of_it(shape: str) -> None:
    path, overrides = SHAPES[shape]
    check_identities(observed(path, *overrides))


@pytest.mark.parametrize("seed", range(12))
def test_they_add_up_whatever_goes_wrong(seed: int) -> None:
    check_identities(observed(REFERENCE, seed=seed, faults=ALL))


@pytest.mark.parametrize("faults", [frozenset[FaultKind](), ALL], ids=["none", "all"])
def test_to_look_changes_nothing(faults: frozenset[FaultKind]) -> None:
    scenario = load_run(Scenario, REFERENCE)
    for seed in range(4):
        activity = Activity()
        seen = simulate(scenario, seed=seed, faults=faults, digest=True, observers=[activity], watcher=activity)
        unseen = simulate(scenario, seed=seed, faults=faults, digest=True)
        assert seen.log.digest == unseen.log.digest
        assert activity.num_sessions > 0


def test_the_trace_of_the_product_is_the_same() -> None:
    scenario = load_run(Scenario, REFERENCE, ["trainer.trace_groups=2"])
    activity = Activity()
    seen = simulate(scenario, seed=0, faults=ALL, observers=[activity], watcher=activity)
    unseen = simulate(scenario, seed=0, faults=ALL)
    assert seen.watcher.records == unseen.watcher.records != []


def test_a_run_of_one_session_at_a_time_by_hand() -> None:
    """Two steps of one session: a call of 0.1 s between two turns, a reward of 0.01 s. Two slots."""
    _, activity, report = observed(CONFIGS / "smallest.toml", "rollout.n=1", "sim.training.save_s=0")
    generate_s = report.session_s["generate"]
    assert report.session_s["tool search"] == pytest.approx(2 * 0.1)
    assert report.session_s["reward"] == pytest.approx(2 * 0.01)
    assert report.slot_busy_s == pytest.approx(generate_s)
    assert report.slot_idle_s["tool search"] == pytest.approx(2 * 0.1), "it keeps one slot free; nobody would use the other"
    commits_s = report.slot_idle_s["last sessions of the batch"] - (generate_s + 2 * (0.1 + 0.01))
    assert 0 < commits_s < 0.05
    assert report.trainer_idle_s["tool search"] == pytest.approx(2 * 0.1)
    assert report.trainer_idle_s["generate"] == pytest.approx(generate_s, abs=0.01), "its checkpoint takes a moment"
    assert report.quantiles["turns"] == {"p50": 2, "p90": 2, "p99": 2, "max": 2}
    assert report.quantiles["tool search s"]["max"] == pytest.approx(0.1)
    assert report.engines["mean_rows"] == pytest.approx(1.0)
    assert len(activity.waits) == 2
    assert {"call that failed", "engine down", "restart"} & report.slot_idle_s.keys() == set()


def test_a_checkpoint_takes_its_time_while_the_next_session_runs() -> None:
    _, _, report = observed(CONFIGS / "smallest.toml", "rollout.n=1")
    assert report.trainer_busy_s["save"] == pytest.approx(2 * 0.5, rel=0.01)
    assert report.trainer_idle_s["tool search"] == pytest.approx(0.1), "of the first; the second is over before the checkpoint"


def test_the_segments_of_a_session_join_each_other(reference: Run) -> None:
    _, activity, report = reference
    assert 0 < len(activity.tracks) <= TRACK_SESSIONS
    for session in activity.tracks:
        assert session.end_s is not None
        begins = [start for _, start, _ in session.segments]
        ends = [end for _, _, end in session.segments]
        assert [session.begin_s, *ends] == [*begins, session.end_s]
    assert report.sessions == 64


def test_busy_slots_are_the_rows_that_ran_and_the_sessions_that_generated(reference: Run) -> None:
    _, activity, report = reference
    rows = sum(sum(each.ends) - sum(each.starts) for (_, what), each in activity.work.items() if what == "row")
    assert report.slot_busy_s == pytest.approx(rows)
    assert report.session_s["generate"] == pytest.approx(rows)
    assert 0 < report.engines["least_busy"] <= report.engines["busy_share"] <= report.engines["most_busy"] <= 1


def test_the_counts_are_those_of_the_controller(reference: Run) -> None:
    outcome, activity, report = reference
    config, last = outcome.machine.scenario, outcome.watcher.steps[-1]
    groups = report.steps * config.data.train_batch_size
    assert report.steps == config.trainer.total_training_steps
    assert report.groups["trained"] == groups
    assert report.throughput["tokens_per_s"] * report.seconds == pytest.approx(last["engine/generated_tokens"])
    assert report.staleness == {"0": last["engine/generated_tokens"]}
    assert report.throughput["trajectories_per_s"] * report.seconds == pytest.approx(groups * config.rollout.n)
    assert sum(report.tools.values()) == last["agents/tools/ok"]
    means = [step["num_turns/mean"] for step in outcome.watcher.steps]
    assert sum(activity.turns) / len(activity.turns) == pytest.approx(sum(means) / len(means))
    assert report.lengths["bias"] == pytest.approx(1.0)


def causes(report: Report, *names: str) -> float:
    """Share of the idle slot-seconds."""
    return sum(report.slot_idle_s.get(name, 0.0) for name in names) / (report.seconds * report.slots)


def _larger(runs: Iterable[float]) -> bool:
    low, high = runs
    return high > 2 * low


def test_a_cause_that_grows_is_told_by_its_name(reference: Run) -> None:
    """Each change makes one thing scarce; what is told of it at least doubles."""
    report = reference[2]
    slow_tools = observed(REFERENCE, "sim.tools.0.latency_s=2.0")[2]
    assert _larger(causes(each, "tool search") for each in (report, slow_tools))
    slow_update = observed(REFERENCE, "sim.training.update_call_s=5.0")[2]
    assert _larger(causes(each, "trainer: update_actor") for each in (report, slow_update))
    slow_rewards = observed(REFERENCE, "sim.reward.latency_s=1.0")[2]
    assert _larger(causes(each, "reward") for each in (report, slow_rewards))
    few_slots = observed(REFERENCE, "rollout.max_num_seqs=2")[2]
    assert _larger(each.session_s["queue for a slot"] for each in (report, few_slots))
    few_sessions = observed(REFERENCE, "agent.max_concurrent_sessions=2")[2]
    assert _larger(causes(each, "begin of sessions") for each in (report, few_sessions))
    slow_controller = observed(REFERENCE, "sim.times.turn_overhead_s=0.05")[2]
    assert _larger(causes(each, "controller") for each in (report, slow_controller))


def test_what_a_trainer_waits_for_is_what_its_last_session_was_at() -> None:
    report = observed(REFERENCE, "sim.tools.0.latency_s=5.0")[2]
    assert report.trainer_idle_s["tool search"] > 0.5 * report.seconds
    wait = report.longest_waits[0]
    assert wait.causes["tool search"] > 0.5 * wait.seconds
    assert sum(wait.causes.values()) == pytest.approx(wait.seconds)


def test_staleness_is_seen_when_it_is_allowed() -> None:
    report = observed(REFERENCE, "trainer.mode=async", "trainer.max_staleness=1", "sim.training.update_call_s=1.0")[2]
    assert set(report.staleness) == {"0", "1"}
    assert report.lengths["tokens_not_trained"] == 0, "a finished run leaves no group open"
    assert report.lengths["bias"] == pytest.approx(1.0)


def test_an_engine_that_is_down_is_no_free_slot() -> None:
    faults = frozenset({FaultKind.ENGINE_DEATH})
    run = observed(REFERENCE, "sim.faults.engine_death=0.002", "sim.engine.count=2", seed=1, faults=faults)
    check_identities(run)
    slots, deaths = run[0].machine.scenario.rollout.max_num_seqs, run[2].faults["engine_death"]
    assert deaths > 0
    assert 0 < run[2].slot_idle_s["engine down"] <= deaths * slots * run[0].machine.scenario.sim.engine.down_s + 1e-6
    assert run[2].session_s["call that failed"] > 0


def test_a_restart_is_told_apart() -> None:
    runs = [observed(REFERENCE, seed=seed, faults=frozenset({FaultKind.CRASH})) for seed in range(6)]
    crashed = [run for run in runs if run[2].lives > 1]
    assert crashed
    for outcome, _, report in crashed:
        restart_s = outcome.machine.scenario.sim.times.restart_s
        assert report.trainer_idle_s["restart"] == pytest.approx((report.lives - 1) * restart_s, rel=0.02)  # and the opening
        assert report.slot_idle_s["restart"] == pytest.approx(report.trainer_idle_s["restart"] * report.slots)


def test_the_text_names_what_it_counts(reference: Run) -> None:
    text = render(reference[2])
    for word in (
        "tokens_per_s",
        "busy: update_actor",
        "last session generated",
        "sessions were at tool search",
        "queue for a slot",
    ):
        assert word in text
    for word in ("tool search s", "longest waits for a batch", "staleness", "bias", "the batch's last sessions"):
        assert word in text
    assert json.loads(json.dumps(reference[2].as_json(), allow_nan=False))["steps"] == 4


def test_the_same_seed_is_told_in_the_same_words(reference: Run) -> None:
    assert render(observed(REFERENCE)[2]) == render(reference[2])
