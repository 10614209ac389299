"""The numbers of a simulated run.

Outcome, Activity -> [report] -> Report -> report_text, JSON, compare, sweep

Identities, which a test keeps: of the trainer, busy seconds by stage and idle seconds by cause add up to the run; of the engines,
busy and idle slot-seconds add up to run x slots; of the sessions, seconds by state add up to their lives.
"""

from array import array
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.config.simulation import Scenario
from asyncrl.ports import Json
from asyncrl.simulation.activity import Activity
from asyncrl.simulation.grid import Grid, Times, grid_of, slot_seconds, trainer_seconds, wait_causes
from asyncrl.simulation.run import Outcome
from asyncrl.simulation.session_times import TOOL_PREFIX

LONGEST_WAITS = 5
"""Steps of which the session is named that they waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongWait:
    """The trainer waited `seconds` for the batch of `step`, at last for one session; `causes`: what that was at meanwhile."""

    step: int
    seconds: float
    session: str
    num_turns: int
    causes: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times in virtual seconds, lengths in tokens of the model. Dicts are name -> number, in the order in which they are told."""

    steps: int
    lives: int
    seconds: float
    throughput: dict[str, float]
    trainer_busy_s: dict[str, float]
    trainer_idle_s: dict[str, float]
    slot_busy_s: float
    slot_idle_s: dict[str, float]
    slots: int
    engines: dict[str, float]
    """busy_share (of the time, with a row), mean_rows while busy, least and most busy engine."""
    sessions: int
    """That began."""
    session_s: dict[str, float]
    """State -> seconds of all sessions together."""
    longest_waits: tuple[LongWait, ...]
    staleness: dict[str, int]
    """Versions that a trained token was behind -> tokens."""
    lengths: dict[str, float]
    quantiles: dict[str, dict[str, float]]
    """Of turns and steps, and of every call as its session waited for it: p50, p90, p99, max."""
    groups: dict[str, float]
    """admitted, trained, dropped by reason: of the last life."""
    tools: dict[str, int]
    """`tool outcome` -> calls."""
    faults: dict[str, int]
    failure: str = ""

    def as_json(self) -> dict[str, Json]:
        return asdict(self)

    @property
    def figures(self) -> dict[str, float]:
        """The main ones, by name: what is compared and swept. {} of a run without a step."""
        if not self.steps:
            return {}
        wall, slot_s = self.seconds, self.seconds * self.slots
        idle = {name: value / slot_s for name, value in self.slot_idle_s.items()}
        stages = sum(value for name, value in idle.items() if name.startswith("trainer: "))
        return {
            "seconds": wall,
            "step_s": wall / self.steps,
            **self.throughput,
            "slots_busy": self.slot_busy_s / slot_s,
            "slots_idle_tools": sum(value for name, value in idle.items() if name.startswith(TOOL_PREFIX)),
            "slots_idle_batch_tail": idle.get("last sessions of the batch", 0.0),
            "slots_idle_trainer": stages,
            "engines_busy": self.engines["busy_share"],
            "mean_rows": self.engines["mean_rows"],
            "trainer_busy": sum(self.trainer_busy_s.values()) / wall,
            "queue_s_a_session": self.session_s.get("queue for a slot", 0.0) / max(self.sessions, 1),
            "length_bias": self.lengths["bias"],
        }


def report_of(outcome: Outcome, activity: Activity) -> Report:
    """`activity` must have been the run's watcher and one of its observers."""
    scenario, steps = outcome.machine.scenario, _last_of_each(outcome)
    end_s = run_end_s(outcome, activity)
    grid = grid_of(activity, end_s)
    trainer_busy_s, trainer_idle_s = trainer_seconds(grid, activity.waits)
    slot_busy_s, slot_idle_s = slot_seconds(grid, scenario)
    return Report(
        steps=len(steps),
        lives=outcome.num_lives,
        seconds=end_s,
        throughput=_throughput(activity, steps, scenario, end_s),
        trainer_busy_s=trainer_busy_s,
        trainer_idle_s=trainer_idle_s,
        slot_busy_s=slot_busy_s,
        slot_idle_s=slot_idle_s,
        slots=scenario.rollout.max_num_seqs * scenario.sim.engine.count,
        engines=_engines(activity, grid, scenario),
        sessions=activity.num_sessions,
        session_s={name: value for name, counts in grid.at.items() if (value := float(counts @ grid.seconds)) > 0},
        longest_waits=_longest_waits(activity),
        staleness={str(versions): activity.staleness[versions] for versions in sorted(activity.staleness)},
        lengths=_lengths(activity),
        quantiles=_quantiles(activity, steps),
        groups=_groups(steps),
        tools=dict(sorted(activity.sessions.outcomes.items())),
        faults={str(kind): count for kind, count in sorted(outcome.hits.items())},
        failure="" if outcome.failure is None else f"{type(outcome.failure).__name__}: {outcome.failure}",
    )


def run_end_s(outcome: Outcome, activity: Activity) -> float:
    """When the last life was over; never 0, so that shares of it are numbers."""
    return max(activity.lives[-1][1] if activity.lives else outcome.seconds, 1e-9)


def _last_of_each(outcome: Outcome) -> list[dict[str, float]]:
    """Numbers of each training step, of its last repetition."""
    found = {step["step"]: step for step in outcome.watcher.steps if "training/global_step" in step}
    return [found[number] for number in sorted(found)]


def _throughput(activity: Activity, steps: list[dict[str, float]], scenario: Scenario, end_s: float) -> dict[str, float]:
    """Of whole steps, each once; tokens_per_s: sampled by the policy, whatever became of them."""
    groups = len(steps) * scenario.data.train_batch_size
    return {
        "tokens_per_s": (sum(activity.generated_lens) + activity.open_tokens) / end_s,
        "trajectories_per_s": groups * scenario.rollout.n / end_s,
        "groups_per_s": groups / end_s,
        "steps_per_hour": len(steps) * 3600 / end_s,
    }


def _engines(activity: Activity, grid: Grid, scenario: Scenario) -> dict[str, float]:
    end_s, count = float(grid.edges[-1]), scenario.sim.engine.count
    rows = [intervals for (_, what), intervals in activity.work.items() if what == "row"]
    busy_s = [_union_s(np.minimum(each.starts, end_s), np.minimum(each.ends, end_s)) for each in rows]
    busy_s += [0.0] * (count - len(busy_s))
    return {
        "busy_share": sum(busy_s) / (count * end_s),
        "mean_rows": float(grid.rows @ grid.seconds) / max(sum(busy_s), 1e-9),
        "least_busy": min(busy_s) / end_s,
        "most_busy": max(busy_s) / end_s,
    }


def _union_s(starts: Times, ends: Times) -> float:
    """Seconds in which at least one of the intervals held."""
    starts, ends = np.sort(starts), np.sort(ends)
    reach = ends[:-1]  # the k-th end is before the k+1-th begin exactly where nothing holds between them
    gaps = np.maximum(starts[1:] - reach, 0.0)
    return float(ends[-1] - starts[0] - gaps.sum()) if len(starts) else 0.0


def _longest_waits(activity: Activity) -> tuple[LongWait, ...]:
    found = [
        LongWait(
            step=wait.step,
            seconds=wait.end_s - wait.start_s,
            session=wait.last.name,
            num_turns=wait.last.num_turns,
            causes=wait_causes(wait),
        )
        for wait in activity.waits
        if wait.last is not None
    ]
    return tuple(sorted(found, key=lambda wait: (-wait.seconds, wait.step))[:LONGEST_WAITS])


def _lengths(activity: Activity) -> dict[str, float]:
    """bias: mean length of what was trained on, over that of all whose group was trained or failed, repetitions included."""
    generated, trained = (np.array(column) for column in (activity.generated_lens, activity.trained_lens))
    means = [float(column.mean()) if len(column) else 0.0 for column in (generated, trained)]
    return {
        "generated": means[0],
        "trained": means[1],
        "bias": means[1] / means[0] if means[0] else 0.0,
        "tokens_not_trained": max(float(generated.sum() + activity.open_tokens - trained.sum()), 0.0),
    }


def _quantiles(activity: Activity, steps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    found: dict[str, npt.ArrayLike] = {"turns": activity.turns, "tokens of a session": activity.trained_lens}
    found |= {f"{name} s": latencies for name, latencies in sorted(activity.sessions.latencies.items())}
    found |= {"step s": [step["timing_s/step"] for step in steps]}
    found |= {"wait for a batch s": array("d", (wait.end_s - wait.start_s for wait in activity.waits))}
    return {name: _summary(np.asarray(values, dtype=np.float64)) for name, values in found.items() if len(np.asarray(values))}


def _summary(values: Times) -> dict[str, float]:
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(values.max())}


def _groups(steps: list[dict[str, float]]) -> dict[str, float]:
    last = steps[-1] if steps else {}
    return {name.removeprefix("admission/"): value for name, value in last.items() if name.startswith("admission/")}
