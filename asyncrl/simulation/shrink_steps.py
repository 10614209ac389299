"""Steps of the shrinking: what could be smaller in a scenario, the greatest step first.

shrink -> [shrink_steps] -> changes: dotted keys of the scenario, and their new values
"""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy

from asyncrl.config.distribution import Distribution
from asyncrl.config.simulation import Scenario
from asyncrl.ports import Json
from asyncrl.simulation.faults import FaultKind

Changes = dict[str, Json]
"""Dotted key -> value."""

COUNTS = (
    ("trainer.total_training_steps", 1),
    ("data.train_batch_size", 1),
    ("rollout.n", 1),
    ("sim.prompts.count", 1),
    ("sim.engine.count", 1),
    ("rollout.max_num_seqs", 1),
    ("sim.sessions.tokens_per_id", 1),
)
"""Whole numbers, and the least that each may be."""
LENGTHS = ("sim.sessions.turns", "sim.sessions.turn_len", "sim.prompts.prompt_len")
"""Distributions that are at least 1."""
TIMES = ("sim.reward.latency_s", "sim.journal.commit_s", "sim.journal.sync_s")
"""Distributions that may be 0."""
SECONDS = (
    "sim.times.offload_s",
    "sim.times.turn_overhead_s",
    "sim.training.stage_s",
    "sim.training.save_s",
    "sim.training.publish_s",
    "sim.training.snapshot_s",
    "sim.engine.prefill_call_s",
    "sim.engine.prefill_token_s",
    "sim.engine.decode_row_s",
)
"""Numbers that may be 0."""


def fewer_faults(now: Callable[[], frozenset[FaultKind]]) -> Iterator[frozenset[FaultKind]]:
    """None at all, half of them, all but one; `now`: those that are left at this moment."""
    if now():
        yield frozenset()
    for half in (0, 1):
        kinds = sorted(now())
        if len(kinds) > 3:
            yield frozenset(kinds[half::2])
    for kind in sorted(now()):
        if kind in now():
            yield now() - {kind}


def smaller_values(now: Callable[[], Scenario]) -> Iterator[Changes]:
    """Changes of the scenario, each of which makes it smaller. `now`: what it is at the moment."""
    yield {"agent.name": "single_turn"}
    if now().sim.tools:
        yield {"sim.tools": [{"name": now().sim.tools[0].name, "latency_s": 0.0, "result_len": 1}]}
    for key, least in COUNTS:
        for divisor in (0, 4, 2):
            value = value_at(now(), key)
            yield {key: max(least, value // divisor) if divisor else least}
        yield {key: max(least, value_at(now(), key) - 1)}
    for keys, least in ((LENGTHS, 1), (TIMES, 0)):
        for key in keys:
            middle = _middle(value_at(now(), key))
            for number in (least, 2 * least, round(middle, 6)):
                is_constant = value_at(now(), key).kind == "constant"
                if number < _middle(value_at(now(), key)) or (number == middle and not is_constant):
                    yield {key: number}
    for key in SECONDS:
        yield {key: 0.0}
    yield {"trainer.save_freq": -1}
    yield {"store.journal": False}


def _middle(distribution: Distribution) -> float:
    d = distribution
    match d.kind:
        case "constant":
            return d.value
        case "uniform":
            return (d.low + d.high) / 2
        case "empirical":
            return d.values[len(d.values) // 2] if d.values else 0.0
        case _:
            return d.mean


# --- keys


def tree_of(scenario: Scenario) -> dict[str, Json]:
    """As its TOML file has it: what was set, and nothing else."""
    tree: dict[str, Json] = scenario.model_dump(mode="json", exclude_unset=True)
    return tree


def with_changes(tree: Mapping[str, Json], changes: Changes) -> dict[str, Json]:
    changed = deepcopy(dict(tree))
    for key, value in changes.items():
        *sections, last = key.split(".")
        node = changed
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return changed


def value_at(scenario: Scenario, key: str) -> Json:
    value: Json = scenario
    for part in key.split("."):
        value = getattr(value, part)
    return value


def written(value: Json) -> str:
    """In TOML, as an override has it."""
    match value:
        case dict():
            return "{ " + ", ".join(f"{key} = {written(entry)}" for key, entry in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(written, value)) + "]"
        case _:
            return json.dumps(value)
