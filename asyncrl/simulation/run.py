"""simulate: a whole run of a scenario, life after life, from one seed.

scenario, seed, faults -> [simulate] -> Outcome

A life ends by itself, by a fault that explains its end, or as a failure of the run. After the first two the next one goes on from
the newest whole checkpoint with all that the journal has kept; a run without a journal begins anew. Faults cease after some lives,
so that a run that recovers comes to its end.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from asyncrl.config.simulation import Scenario
from asyncrl.simulation.draws import unit
from asyncrl.simulation.errors import Crash, EndlessError, SimulationError, Violation
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.faults import FaultKind, FaultPlan, ResumeFault, armed_kinds
from asyncrl.simulation.faults.awaits import AwaitCoverage
from asyncrl.simulation.faults.ends import ends_run, is_explained
from asyncrl.simulation.faults.graves import Graves
from asyncrl.simulation.faults.process import Loss
from asyncrl.simulation.life import live
from asyncrl.simulation.loop import Order, VirtualLoop
from asyncrl.simulation.machine import Machine
from asyncrl.simulation.oracles import Oracles
from asyncrl.simulation.seams import Observer
from asyncrl.simulation.vary import varied
from asyncrl.simulation.watcher import Watcher
from asyncrl.simulation.world import SimWorld
from asyncrl.stopping import Stop
from asyncrl.world import derive_seed

FAULTY_LIVES = 12
"""Lives after which faults cease."""
MAY_BE_LEFT = ("guest: ", "sim: ")
"""Tasks that may outlive the controller: guests that hold on to their cancellation, and the simulator's own."""
LOOK_TURNS = 1024
"""Turns between two looks at how much time has passed."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a simulated run ended. `failure`: what should not have been; None when all is well."""

    seed: int
    machine: Machine
    watcher: Watcher
    log: EventLog
    failure: BaseException | None = None
    steps: int = 0
    """Callbacks that the loops ran: steps of tasks, and events of the edges."""
    num_resumes: int = 0
    """With `at`: resumes of all tasks of the first life."""
    hits: Counter[FaultKind] = field(default_factory=Counter)
    """Faults that came true."""

    @property
    def is_ok(self) -> bool:
        return self.failure is None

    @property
    def num_lives(self) -> int:
        return self.machine.num_lives

    @property
    def seconds(self) -> float:
        """Virtual."""
        return self.machine.now_s


def simulate(
    scenario: Scenario,
    *,
    seed: int,
    order: Order = Order.TASKS,
    faults: frozenset[FaultKind] = frozenset(),
    oracles: bool = True,
    keep_events: int | None = 50,
    digest: bool = False,
    observers: Sequence[Observer] = (),
    watcher: Watcher | None = None,
    at: ResumeFault | Sequence[ResumeFault] | None = None,
    awaits: AwaitCoverage | None = None,
) -> Outcome:
    """Run the scenario, as the seed varies it, to its end. What is found is in the outcome, never raised; nothing is logged.

    faults: kinds that may happen, of which the seed arms some, by the scenario's rates. at: besides, one fault at a resume of the
    first life, or several in their order. awaits: told where faults at awaits were thrown. Raises ConfigError for a value in
    `sim.vary` that cannot be.
    """
    machine, log = Machine(scenario=varied(scenario, seed)), EventLog(keep=keep_events, digests=digest)
    outcome = Outcome(seed=seed, machine=machine, watcher=watcher or Watcher(), log=log)
    run = _Run(outcome, scenario, order, armed_kinds(seed, faults), Oracles() if oracles else None, observers, awaits)
    try:
        with _quiet():
            run.to_end((at,) if isinstance(at, ResumeFault) else tuple(at or ()))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as failure:  # a finding: whoever asked for the run looks at it
        outcome.failure = failure
        log.note("failure", f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}")
    return outcome


@contextmanager
def _quiet() -> Iterator[None]:
    """The controller's own lines, thousands of them, are of a world that is not there; its events have a log of their own."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class _Run:
    def __init__(
        self,
        outcome: Outcome,
        usual: Scenario,
        order: Order,
        armed: dict[FaultKind, float],
        oracles: Oracles | None,
        observers: Sequence[Observer],
        awaits: AwaitCoverage | None = None,
    ) -> None:
        self._awaits = awaits
        outcome.watcher.is_live = awaits is not None
        self._outcome = outcome
        self._order = order
        self._armed = armed
        self._oracles = oracles
        self._observers = observers
        self._machine = outcome.machine
        self._scenario = outcome.machine.scenario
        self._usual = usual
        """As it is before a seed varies it."""
        self._graves = Graves()

    def to_end(self, at: Sequence[ResumeFault]) -> None:
        """Raises what no fault explains."""
        machine, asked = self._machine, self._oracles
        if self._armed:
            self._outcome.log.note("armed", " ".join(f"{kind}x{loud:g}" for kind, loud in self._armed.items()))
        if asked is not None:
            asked.begin_run(machine)
        while not (machine.is_finished or machine.is_given_up):
            self._live(at if machine.num_lives == 0 else ())
        if asked is not None:
            asked.end_run(self._outcome.watcher.told)

    def _live(self, at: Sequence[ResumeFault]) -> None:
        machine, log = self._machine, self._outcome.log
        machine.num_lives += 1
        if machine.num_lives > self._scenario.sim.max_lives:
            raise EndlessError(f"the controller was started {machine.num_lives - 1} times (sim.max_lives) and is not at its end")
        if self._begins_anew():
            machine.begin_anew()
            self._graves = Graves()
            if self._oracles is not None:
                self._oracles.begin_run(machine)
        life = _Life(self, self._outcome, derive_seed(self._outcome.seed, "life", machine.num_lives), at)
        log.now = life.loop.time
        log.note("life", f"{machine.num_lives} from step {machine.newest.step}")
        error = life.run()
        log.note("end", f"life {machine.num_lives}: {_told(error)}")
        if error is not None:
            machine.is_given_up = ends_run(error, self._outcome.hits, machine.num_lives, self._scenario.trainer.max_step_tries)
            if not (machine.is_given_up or is_explained(error, life.plan.hits)):
                raise error

    def _begins_anew(self) -> bool:
        """Without a journal nothing is left of a run; and one that saves at its end alone forgets its steps as it goes."""
        machine, scenario = self._machine, self._scenario
        if machine.is_new:
            return False
        is_purged = not scenario.trainer.save_freq and machine.journal.steps().purged > machine.newest.step
        return not scenario.store.journal or is_purged

    # --- what a life is made of

    def _armed_now(self) -> dict[FaultKind, float]:
        return self._armed if self._machine.num_lives <= FAULTY_LIVES else {}

    def expected_turns(self) -> int:
        """Turns of the loop in a life without faults, more or less, where a fault may end this one early; else 0."""
        armed = self._armed_now()
        ends_early = FaultKind.CRASH in armed or FaultKind.SIGTERM in armed
        return _turns_of(self._usual.model_dump_json()) if ends_early else 0

    def plan(self, loop: VirtualLoop, stop: Stop, seed: int, at: Sequence[ResumeFault], expected_turns: int) -> FaultPlan:
        """The faults of a life."""
        return FaultPlan(
            self._armed_now(),
            self._scenario.sim.faults,
            loop,
            self._outcome.log,
            seed=seed,
            run_seed=self._outcome.seed,
            stop=stop,
            graves=self._graves,
            expected_turns=expected_turns,
            at=at,
            awaits=self._awaits,
            observers=self._observers,
            witness=self._oracles,
        )

    @property
    def has_sites(self) -> bool:
        """Does anything happen where the controller passes through a site?"""
        return FaultKind.SITE in self._armed or FaultKind.CRASH in self._armed or self._awaits is not None

    @property
    def order(self) -> Order:
        return self._order

    @property
    def oracles(self) -> Oracles | None:
        return self._oracles


class _Life:
    """One start of the controller's process, on what the lives before have left."""

    def __init__(self, run: _Run, outcome: Outcome, seed: int, at: Sequence[ResumeFault]) -> None:
        self._outcome = outcome
        self._machine = machine = outcome.machine
        self._oracles = run.oracles
        self._seed = seed
        self._stop = Stop()
        self._trainer_before = outcome.watcher.trainer
        expected_turns = run.expected_turns()  # a run of its own, which may fail: before there is a loop to be closed
        self.loop = VirtualLoop(seed, order=run.order, start_s=machine.now_s)
        self.plan = run.plan(self.loop, self._stop, seed, at, expected_turns)
        self.loop.before_step = outcome.log.step
        self.loop.after_turn = self._after_turn
        self._look_turn = min(LOOK_TURNS, self.plan.process.next_turn)
        scenario = machine.scenario
        self._world = SimWorld(
            self.loop,
            run_seed=scenario.trainer.seed,
            log=outcome.log,
            call_s=scenario.sim.times.offload_s,
            calls_s={"model": scenario.sim.training.stage_s},
            at_site=self.plan.site if run.has_sites else None,
        )

    def run(self) -> BaseException | None:
        """The life to its end: what ended it. Raises what an oracle finds in that end."""
        error: BaseException | None = None
        try:
            self.loop.run_until_complete(
                live(self._machine, self._world, self.plan, self._outcome.watcher, self._stop, self._oracles)
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as ended:  # whether it may end so is for the run to say
            error = ended
        try:
            # What ended in the middle of a turn has nothing to say about its end.
            is_cut_short = self.loop.is_closed() or isinstance(error, SimulationError)
            if not is_cut_short:
                self._check_end(error)
            if self._oracles is not None:
                self._oracles.end_life(error, crashed=is_cut_short)
        finally:
            self._leave(error)
        return error

    def _after_turn(self) -> None:
        if self._oracles is not None:
            self._oracles.after_turn()
        if self.loop.turns >= self._look_turn:
            self._look()

    def _look(self) -> None:
        limit_s = self._machine.scenario.sim.max_s
        if self.loop.time() > limit_s:
            raise EndlessError(f"sim.max_s = {limit_s:g} virtual seconds have passed, and the run is not at its end")
        if self.loop.turns >= self.plan.process.next_turn:
            self.plan.process.ring()
        self._look_turn = min(self.loop.turns + LOOK_TURNS, self.plan.process.next_turn)

    def _check_end(self, error: BaseException | None) -> None:
        """The controller has ended by itself: nothing of it is left, and where nothing failed, there is a checkpoint of its end."""
        left = [name for task in self.loop.tasks_left if not (name := task.get_name()).startswith(MAY_BE_LEFT)]
        if left:
            raise EndlessError(f"the controller has ended, and tasks of it have not: {left[:8]}")
        trainer = self._outcome.watcher.trainer
        if error is not None or trainer is None or trainer is self._trainer_before:
            return
        if trainer.step != self._machine.newest.step:
            raise Violation("checkpoint", f"the run has ended after step {trainer.step}, and there is no checkpoint of it")

    def _leave(self, error: BaseException | None) -> None:
        """What remains: the time, and of the journal what it must keep and perhaps more."""
        machine, outcome, scenario = self._machine, self._outcome, self._machine.scenario
        outcome.steps += self.loop.steps
        outcome.num_resumes += self.plan.resumes.num_resumes
        outcome.watcher.end(self.loop.time())
        machine.now_s = self.loop.time() + (0.0 if machine.is_finished else scenario.sim.times.restart_s)
        is_power_loss = isinstance(error, Crash) and error.args == (Loss.POWER,)
        disk = machine.journal
        least = disk.num_synced if is_power_loss else disk.num_acked
        kept = least + int(unit(self._seed, 5) * (disk.num_entries - least + 1))
        disk.keep(kept)
        if self._oracles is not None:
            self._oracles.survived(kept)
        may_be_damaged = not machine.is_finished and sum(checkpoint.is_whole for checkpoint in machine.checkpoints) > 1
        if may_be_damaged and self.plan.strikes(FaultKind.CHECKPOINT_DAMAGE, "the newest checkpoint"):
            machine.damage_newest()
        outcome.hits.update(self.plan.hits)
        self.loop.abandon()


def _told(error: BaseException | None) -> str:
    return "by itself" if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@lru_cache(maxsize=64)
def _turns_of(scenario: str) -> int:
    """Turns of the loop that the scenario, as JSON, takes without a fault."""
    outcome = Outcome(seed=0, machine=Machine(scenario=Scenario.model_validate_json(scenario)), watcher=Watcher(), log=EventLog())
    life = _Life(_Run(outcome, outcome.machine.scenario, Order.TASKS, {}, None, ()), outcome, 0, ())
    life.run()
    return life.loop.turns
