"""How well a fitted scenario explains the very run that it was fitted from: the one prediction that can be checked at once.

scenario -> simulate -> [own_run] -> the head of its file

Nothing is adjusted by it. A large difference says that the run did something the models have no word for.
"""

from asyncrl.config.simulation import Scenario
from asyncrl.simulation.loop import Order
from asyncrl.simulation.run import simulate

SESSIONS = 1024
"""Of the simulation: about a second. The run itself may have had fewer; more of them tell less of chance."""
MOST_SESSIONS = 8 * SESSIONS
"""Of a batch that is still simulated."""
MOST_STEPS = 40


def simulated_step_s(scenario: Scenario) -> dict[str, float] | None:
    """Mean `gen` (the wait for a batch) and `step` after the first step; None for a batch that is too large to try."""
    a_step = scenario.data.train_batch_size * scenario.rollout.n
    if a_step > MOST_SESSIONS:
        return None
    told = {"total_training_steps": 1 + min(MOST_STEPS, max(1, SESSIONS // a_step)), "trace_groups": 0, "invariants": "off"}
    short = scenario.model_copy(update={"trainer": scenario.trainer.model_copy(update=told)})
    outcome = simulate(short, seed=0, order=Order.STRICT, oracles=False, keep_events=0)
    if outcome.failure is not None:
        raise outcome.failure
    steps = outcome.watcher.steps[1:]
    return {name: sum(step[f"timing_s/{name}"] for step in steps) / len(steps) for name in ("gen", "step")}
