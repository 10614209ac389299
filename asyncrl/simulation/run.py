"""simulate: a whole run of a scenario, life after life, from one seed.

scenario, seed -> [simulate] -> Outcome
"""

from dataclasses import dataclass

from asyncrl.config.simulation import Scenario
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.life import live
from asyncrl.simulation.loop import Order, VirtualLoop
from asyncrl.simulation.machine import Machine
from asyncrl.simulation.oracles import Oracles
from asyncrl.simulation.seams import Seams
from asyncrl.simulation.watcher import Watcher
from asyncrl.simulation.world import SimWorld
from asyncrl.stopping import Stop
from asyncrl.world import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a simulated run ended."""

    seed: int
    machine: Machine
    watcher: Watcher
    log: EventLog
    steps: int
    """Callbacks that the loop ran."""


def simulate(scenario: Scenario, *, seed: int, order: Order = Order.TASKS, oracles: bool = True) -> Outcome:
    machine, watcher, log = Machine(scenario=scenario), Watcher(), EventLog()
    asked = Oracles() if oracles else None
    if asked is not None:
        asked.begin_run(machine, log)
    steps = 0
    while not machine.is_finished:
        steps += _one_life(machine, watcher, log, seed, order, asked)
    return Outcome(seed=seed, machine=machine, watcher=watcher, log=log, steps=steps)


def _one_life(machine: Machine, watcher: Watcher, log: EventLog, seed: int, order: Order, oracles: Oracles | None) -> int:
    machine.num_lives += 1
    loop = VirtualLoop(derive_seed(seed, machine.num_lives), order=order, start_s=machine.now_s)
    log.now = loop.time
    loop.before_step = log.step
    config = machine.scenario
    world = SimWorld(loop, run_seed=config.trainer.seed, log=log, call_s=config.sim.times.offload_s)
    seams = Seams()
    if oracles is not None:
        loop.after_turn = oracles.after_turn
        seams = _Told(oracles)
    try:
        loop.run_until_complete(live(machine, world, seams, watcher, Stop(), oracles))
        if oracles is not None:
            oracles.end_life(None, crashed=False)
    finally:
        machine.now_s = loop.time()
        loop.close()
    return loop.steps


class _Told(Seams):
    def __init__(self, oracles: Oracles) -> None:
        self.busy = oracles.busy  # type: ignore[method-assign]
        self.generated = oracles.generated  # type: ignore[method-assign]
        self.updated = oracles.updated  # type: ignore[method-assign]
