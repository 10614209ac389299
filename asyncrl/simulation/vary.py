"""What a seed draws of its scenario: one override of each list in `sim.vary`.

scenario, seed -> [varied] -> the scenario that is run
"""

import json
from functools import lru_cache

from asyncrl.config.loading import apply_override, parse_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.draws import unit
from asyncrl.world import derive_seed


def varied(scenario: Scenario, seed: int) -> Scenario:
    """Raises ConfigError for a value that cannot be."""
    chosen = tuple(taken for taken in overrides_of(scenario, seed) if taken)
    return _changed(scenario.model_dump_json(exclude_unset=True), chosen) if chosen else scenario


def overrides_of(scenario: Scenario, seed: int) -> list[str]:
    """One of each list; "" where nothing is changed."""
    drawn = [unit(derive_seed(seed, "vary", number)) for number in range(len(scenario.sim.vary))]
    return [values[int(u * len(values))] for u, values in zip(drawn, scenario.sim.vary, strict=True)]


@lru_cache(maxsize=1024)
def _changed(scenario: str, overrides: tuple[str, ...]) -> Scenario:
    tree = json.loads(scenario)  # what was written, and no more: a change must not leave a default without effect
    tree.get("sim", {}).pop("vary", None)
    for override in overrides:
        apply_override(tree, override)
    return parse_run(Scenario, tree, where="sim.vary")
