"""Which oracle catches a planted bug, and at which seed.

    python -m tests.simulation.planted.search [--seeds 500] [names of bugs]

prints a table, and ends with exit code 1 when a bug was not caught, or when a seed fails without any bug.
"""

import argparse
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from asyncrl.config.simulation import Scenario
from asyncrl.simulation.errors import Violation
from asyncrl.simulation.faults import ALL
from asyncrl.simulation.run import simulate
from asyncrl.simulation.vary import varied
from tests.simulation.planted import agents, engines, recovery, replay, retries, steps, store  # noqa: F401  (each adds its bugs)
from tests.simulation.planted.bug import BUGS, Bug, Plant

MAX_SEEDS = 500
"""A bug that is not caught by then is not caught."""
FEW = 40
"""Seeds without a bug of each changed scenario."""

SCENARIO = Scenario.model_validate(
    {
        "data": {"train_batch_size": 2, "max_prompt_length": 16, "max_response_length": 96},
        "rollout": {"n": 2, "max_num_seqs": 3},
        "agent": {"name": "tool_agent", "max_concurrent_sessions": 3, "max_concurrent_tools": 2},
        "trainer": {"total_training_steps": 4, "save_freq": 1, "trace_groups": 0},
        "sim": {
            "prompts": {"count": 16, "prompt_len": 6},
            "sessions": {"turns": {"kind": "uniform", "low": 1, "high": 3}, "turn_len": {"kind": "uniform", "low": 6, "high": 12}},
            "tools": [{"name": "search", "latency_s": {"kind": "exponential", "mean": 0.2}, "result_len": 3}],
            "faults": {"crash": 0.5, "sigterm": 0.3, "await_error": 0.03, "await_cancel": 0.03, "tool_hang": 0.03},
        },
    }
)
"""Small, with every place narrow: two groups of two sessions, three slots, three sessions and two tool calls at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """`by`: the invariant that was broken, or the kind of error; `text`: its first line."""

    seed: int
    by: str
    text: str


def changed(scenario: Scenario, changes: tuple[str, ...]) -> Scenario:
    return varied(
        scenario.model_copy(update={"sim": scenario.sim.model_copy(update={"vary": tuple((one,) for one in changes)})}), 0
    )


OF_THE_PLANT = ("AttributeError", "NameError", "TypeError")
"""Errors by which a bug is no bug, but a call of what is not there."""


def run(seed: int, *plants: Plant | None, changes: tuple[str, ...] = ()) -> Catch | None:
    """One run with these planted, in the scenario with these changes. None: nothing was found."""
    with ExitStack() as stack:
        for plant in plants:
            if plant is not None:
                stack.enter_context(plant())
        failure = simulate(changed(SCENARIO, changes), seed=seed, faults=ALL).failure
    if failure is None:
        return None
    by = failure.invariant if isinstance(failure, Violation) else type(failure).__name__
    return Catch(seed=seed, by=by, text=str(failure).partition("\n")[0])


def first_catch(bug: Bug, seeds: Iterable[int]) -> Catch | None:
    """The first seed that fails with the bug. Raises AssertionError when it fails without it, too: then it was not the bug; and
    when the bug does not fit the product any more, and fails by itself."""
    catch = next((found for seed in seeds if (found := run(seed, bug.provoke, bug.plant, changes=bug.changes)) is not None), None)
    if catch is not None:
        assert catch.by not in OF_THE_PLANT, f"the bug itself does not fit the product any more: {catch}"
        without = run(catch.seed, bug.provoke, changes=bug.changes)
        assert without is None, f"seed {catch.seed} fails without any bug: {without}"
    return catch


def table(catches: dict[str, Catch | None]) -> str:
    """One line a bug."""
    width = max(map(len, catches))
    lines = [f"{'bug':{width}}  seed  caught by  what it said"]
    for name, catch in catches.items():
        if catch is None:
            lines.append(f"{name:{width}}     -  NOTHING    {BUGS[name].what}")
        else:
            lines.append(f"{name:{width}}  {catch.seed:4}  {catch.by:9}  {catch.text[:110]}")
    num_caught = sum(catch is not None for catch in catches.values())
    return "\n".join([*lines, f"{num_caught} of {len(catches)} planted bugs caught"])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted.search")
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS)
    parser.add_argument("bugs", nargs="*", default=[])
    options = parser.parse_args(arguments)
    seeds = range(options.seeds)
    catches = {name: first_catch(BUGS[name], seeds) for name in options.bugs or BUGS}
    sys.stdout.write(f"{table(catches)}\n")
    provoked = sorted({(bug.provoke, bug.changes) for bug in BUGS.values()}, key=str)
    runs = ((seed, provoke, changes) for provoke, changes in provoked for seed in seeds[: FEW if changes else None])
    false = [catch for seed, provoke, changes in runs if (catch := run(seed, provoke, changes=changes)) is not None]
    for catch in false[:8]:
        sys.stdout.write(f"without any bug, seed {catch.seed} fails: {catch.by} {catch.text}\n")
    sys.stdout.write(f"the same without a bug: {len(false)} failures\n")
    return int(bool(false) or None in catches.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
