"""The numbers of a simulated run, and how they are told.

Outcome, Activity -> [report] -> Report -> text, JSON, compare, sweep

Identities, which a test keeps: of the trainer, busy seconds by stage and idle seconds by cause add up to the run; of the engines,
busy and idle slot-seconds add up to run x slots.
"""

from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
from rich.table import Table

from asyncrl.config.simulation import Scenario
from asyncrl.observe.text_tables import as_text
from asyncrl.ports import Json
from asyncrl.simulation.activity import TOOL, TRAINER, Activity, Times, grid_of, idle_causes
from asyncrl.simulation.run import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times in virtual seconds, lengths in tokens. Dicts are name -> number, in the order in which they are told."""

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
    """busy_share (a row is running), mean_rows, least and most busy engine."""
    staleness: dict[str, int]
    """Versions that the oldest token of a trained trajectory was behind -> trajectories."""
    lengths: dict[str, float]
    quantiles: dict[str, dict[str, float]]
    """Of tool and reward latencies, turns and steps: p50, p90, p99, max."""
    groups: dict[str, float]
    """admitted, trained, dropped by reason: of the last life."""
    faults: dict[str, int]
    failure: str = ""

    def as_json(self) -> dict[str, Json]:
        return asdict(self)

    @property
    def figures(self) -> dict[str, float]:
        """The main ones, by name: what is compared and swept."""
        wall = max(self.seconds, 1e-9)
        return {
            "step_s": self.seconds / max(self.steps, 1),
            "tokens_per_s": self.throughput["tokens_per_s"],
            "trajectories_per_s": self.throughput["trajectories_per_s"],
            "slot_utilisation": self.slot_busy_s / (wall * self.slots),
            "engine_busy_share": self.engines["busy_share"],
            "trainer_utilisation": sum(self.trainer_busy_s.values()) / wall,
            "trainer_waits_for_generation": self.trainer_idle_s.get("generation", 0.0) / wall,
            "trainer_waits_for_tools": self.trainer_idle_s.get("tools", 0.0) / wall,
            "length_bias": self.lengths["bias"],
        }


def report_of(outcome: Outcome, activity: Activity) -> Report:
    """`activity` must have observed the whole run."""
    scenario, steps = outcome.machine.scenario, _last_of_each(outcome)
    end_s = max(outcome.seconds, 1e-9)
    grid, slots = grid_of(activity, end_s), scenario.rollout.max_num_seqs * scenario.sim.engine.count
    seconds, causes = grid.seconds, idle_causes(grid)
    idle = ~grid.trainer_busy
    tokens = sum(activity.lengths.values()) * scenario.sim.sessions.tokens_per_id
    trained = sum(step.get("global_seqlen/mean", 0.0) for step in steps)
    sessions = len(steps) * scenario.data.train_batch_size * scenario.rollout.n
    return Report(
        steps=len(steps),
        lives=outcome.num_lives,
        seconds=outcome.seconds,
        throughput={
            "tokens_per_s": tokens / end_s,
            "trained_tokens_per_s": trained * scenario.sim.sessions.tokens_per_id / end_s,
            "trajectories_per_s": sessions / end_s,
            "groups_per_s": len(steps) * scenario.data.train_batch_size / end_s,
            "steps_per_hour": len(steps) * 3600 / end_s,
        },
        trainer_busy_s=_busy_by_stage(grid.trainer, seconds),
        trainer_idle_s={name: float(seconds[idle & flags].sum()) for name, flags in causes.items() if name != TRAINER},
        slot_busy_s=float((grid.rows * seconds).sum()),
        slot_idle_s={name: float(((slots - grid.rows) * seconds)[flags].sum()) for name, flags in causes.items()},
        slots=slots,
        engines=_engines(activity, grid.rows, seconds, scenario),
        staleness=_staleness(outcome),
        lengths=_lengths(activity, steps, scenario),
        quantiles=_quantiles(activity, steps),
        groups=_groups(steps),
        faults={str(kind): count for kind, count in sorted(outcome.hits.items())},
        failure="" if outcome.failure is None else f"{type(outcome.failure).__name__}: {outcome.failure}",
    )


def _last_of_each(outcome: Outcome) -> list[dict[str, float]]:
    """Numbers of each training step, of its last repetition."""
    found = {step["step"]: step for step in outcome.watcher.steps if "training/global_step" in step}
    return [found[number] for number in sorted(found)]


def _busy_by_stage(trainer: "dict[str, np.ndarray]", seconds: Times) -> dict[str, float]:
    """What overlaps (a checkpoint beside a step) counts for the first of them, so that the sum is what the clock says."""
    left, busy = np.ones(len(seconds), bool), {}
    for what, counts in trainer.items():
        busy[what] = float(seconds[left & (counts > 0)].sum())
        left &= counts == 0
    return busy


def _engines(activity: Activity, rows: "np.ndarray", seconds: Times, scenario: Scenario) -> dict[str, float]:
    end_s, count = float(seconds.sum()), scenario.sim.engine.count
    shares = [_busy_share(*activity.work[name, "row"].until(end_s), end_s) for name in activity.engines]
    shares.extend(0.0 for _ in range(count - len(shares)))
    return {
        "busy_share": sum(shares) / count,
        "mean_rows": float((rows * seconds).sum() / max(end_s, 1e-9) / count),
        "least_busy": min(shares),
        "most_busy": max(shares),
    }


def _busy_share(starts: Times, ends: Times, end_s: float) -> float:
    """Of the time, how much some row was running: the union of the intervals, from sorted begins and sorted ends."""
    moments = np.concatenate([starts, ends])
    change = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.lexsort((change, moments))
    running = np.cumsum(change[order])[:-1] > 0
    return float(np.diff(moments[order])[running].sum() / max(end_s, 1e-9))


def _staleness(outcome: Outcome) -> dict[str, int]:
    counts: Counter[int] = Counter()
    for record in outcome.watcher.records:
        rows = [row for group in record.head.groups if group.status == "trained" for row in group.rows]
        counts.update(record.head.version - row.min_global_steps for row in rows)
    return {str(versions): counts[versions] for versions in sorted(counts)}


def _lengths(activity: Activity, steps: list[dict[str, float]], scenario: Scenario) -> dict[str, float]:
    """bias: mean length of what was trained on, over that of all that was generated, drops and repetitions included."""
    tokens = scenario.sim.sessions.tokens_per_id
    generated = float(np.mean([*activity.lengths.values()] or [0])) * tokens
    trained = float(np.mean([step.get("policy_length/mean", 0.0) for step in steps] or [0.0])) * tokens
    return {"generated": generated, "trained": trained, "bias": trained / generated if generated else 0.0}


def _quantiles(activity: Activity, steps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    found = {f"tool {name} s": activity.durations(TOOL, name) for name in activity.kinds(TOOL)}
    found |= {f"reward {name} s": activity.durations("reward", name) for name in activity.kinds("reward")}
    found |= {"step s": np.array([step["timing_s/step"] for step in steps])}
    found |= {"wait for a batch s": np.array([step.get("timing_s/gen", 0.0) for step in steps])}
    return {name: _summary(values) for name, values in found.items() if len(values)}


def _summary(values: Times) -> dict[str, float]:
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(values.max())}


def _groups(steps: list[dict[str, float]]) -> dict[str, float]:
    last = steps[-1] if steps else {}
    return {name.removeprefix("admission/"): value for name, value in last.items() if name.startswith("admission/")}


# --- told -------------------------------------------------------------------------------------------------------------------------


_SLOTS_WAIT = {"generation": "sessions, while other rows run"}
"""What it means for a slot that generation is under way without it."""


def render(report: Report, *, width: int | None = None) -> str:
    """For a terminal, a pipe or a file."""
    head = f"{report.steps} steps in {report.seconds:.1f} virtual s, {report.lives} lives"
    parts: list[str | Table] = [head, _pairs("throughput", report.throughput)]
    parts += [_shares("trainer", report.seconds, report.trainer_busy_s, report.trainer_idle_s)]
    busy, idle = {"rows": report.slot_busy_s}, {_SLOTS_WAIT.get(cause, cause): value for cause, value in report.slot_idle_s.items()}
    parts += [_shares(f"engines ({report.slots} slots)", report.seconds * report.slots, busy, idle)]
    parts += [_pairs("engines", report.engines), _quantile_table(report.quantiles)]
    parts += [_pairs("length, tokens", report.lengths), _pairs("groups", report.groups)]
    if report.staleness:
        parts.append(_pairs("staleness, versions: trajectories", report.staleness))
    if report.faults:
        parts.append(_pairs("faults that came true", report.faults))
    if report.failure:
        parts.append(f"failure: {report.failure}")
    return as_text(parts, width)


def _table(*columns: str) -> Table:
    table = Table(*columns[:1], box=None, pad_edge=False, header_style="")
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def _pairs(title: str, numbers: "dict[str, float] | dict[str, int]") -> Table:
    table = _table(title, "")
    for name, value in numbers.items():
        table.add_row(f"  {name}", f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def _shares(title: str, capacity: float, busy: dict[str, float], idle: dict[str, float]) -> Table:
    table = _table(title, "seconds", "share")
    rows = [(f"  busy: {name}", value) for name, value in busy.items()]
    rows += [(f"  idle: waits for {name}", value) for name, value in idle.items()]
    for name, value in rows:
        table.add_row(name, f"{value:.1f}", f"{value / max(capacity, 1e-9):.1%}")
    return table


def _quantile_table(quantiles: dict[str, dict[str, float]]) -> Table:
    table = _table("latency", "p50", "p90", "p99", "max")
    for name, numbers in quantiles.items():
        table.add_row(f"  {name}", *(f"{value:.3g}" for value in numbers.values()))
    return table
