"""What the controller's own loop spends on a turn: the rest of the time that the edges leave unexplained, found by simulating.

scenario without it, mean wait for a batch -> [residual] -> sim.times.turn_overhead_s

No counter tells it. The fitted scenario, simulated, waits for a batch less long than the run did; the overhead of a turn is what
makes both equal. So the scenario explains its own run, and a change of slots or of latencies is left to the model.
"""

from dataclasses import dataclass

from asyncrl.config.simulation import Scenario
from asyncrl.simulation.loop import Order
from asyncrl.simulation.run import simulate

SESSIONS = 1024
"""Of a simulation for it: about a second, whatever the run. The run itself may have had fewer; more of them tell less of chance."""
MOST_STEPS = 40
MOST_ROUNDS = 8
CLOSE = 0.005
"""Share of the wait to which both must be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """turn_overhead_s, and the wait for a batch without it (`explained_s`) and with it (`simulated_s`), beside the run's."""

    turn_overhead_s: float
    measured_s: float
    explained_s: float
    simulated_s: float


def residual_of(scenario: Scenario, measured_s: float) -> Residual:
    """measured_s: mean of timing_s/gen. 0 where the edges alone explain as much or more."""
    short = _short(scenario)
    explained_s = _wait_s(short, 0.0)
    if explained_s >= measured_s * (1 - CLOSE):
        return Residual(turn_overhead_s=0.0, measured_s=measured_s, explained_s=explained_s, simulated_s=explained_s)
    low, high = (0.0, explained_s), _beyond(short, measured_s, explained_s)
    best = high
    for number in range(MOST_ROUNDS):
        if abs(best[1] - measured_s) <= CLOSE * measured_s:
            break
        # The secant is quick, and halves see to it that it does not creep.
        share = (measured_s - low[1]) / (high[1] - low[1]) if number % 2 == 0 else 0.5
        overhead_s = low[0] + share * (high[0] - low[0])
        point = (overhead_s, _wait_s(short, overhead_s))
        low, high = (low, point) if point[1] >= measured_s else (point, high)
        best = min(best, point, key=lambda each: abs(each[1] - measured_s))
    return Residual(turn_overhead_s=best[0], measured_s=measured_s, explained_s=explained_s, simulated_s=best[1])


def _short(scenario: Scenario) -> Scenario:
    """The same run with as many steps as are needed, and nothing that only costs time here."""
    a_step = scenario.data.train_batch_size * scenario.rollout.n
    steps = 1 + min(MOST_STEPS, max(1, SESSIONS // a_step))
    told = {"total_training_steps": steps, "trace_groups": 0, "invariants": "off"}
    trainer = scenario.trainer.model_copy(update=told)
    return scenario.model_copy(update={"trainer": trainer})


def _beyond(scenario: Scenario, measured_s: float, explained_s: float) -> tuple[float, float]:
    """An overhead that is too long, and the wait with it. All turns of a step one after the other take the wait at least."""
    overhead_s = (measured_s - explained_s) / (scenario.data.train_batch_size * scenario.rollout.n)
    while (wait_s := _wait_s(scenario, overhead_s)) < measured_s:
        overhead_s *= 2
    return overhead_s, wait_s


def _wait_s(scenario: Scenario, overhead_s: float) -> float:
    """Mean wait for a batch after the first step."""
    times = scenario.sim.times.model_copy(update={"turn_overhead_s": overhead_s})
    told = scenario.model_copy(update={"sim": scenario.sim.model_copy(update={"times": times})})
    outcome = simulate(told, seed=0, order=Order.STRICT, oracles=False, keep_events=0)
    if outcome.failure is not None:
        raise outcome.failure
    waits = [step["timing_s/gen"] for step in outcome.watcher.steps[1:]]
    return sum(waits) / len(waits)
