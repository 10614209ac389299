"""Faults of the whole controller: killed at any turn of the loop, in each part of a checkpoint, or while it recovers; asked to stop
at any turn, perhaps twice.

loop (each turn) -> [ProcessFaults] -> Crash, Stop
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

from asyncrl.simulation.errors import Crash
from asyncrl.simulation.faults.kinds import FaultKind
from asyncrl.simulation.faults.rates import NEVER, Rate, distance
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.simulation.seams import SavePart
from asyncrl.stopping import Stop

STARTING_TURNS = 40
"""Turns within which a controller that goes on from a checkpoint has started."""
RECOVERY_TURNS = 400
"""Turns within which it has repeated its recorded steps, mostly."""
SECOND_SIGNAL_TURNS = 200
"""Turns within which an impatient person signals again."""

MEAN_PASSES = 100
"""Passes through sites until a crash at one."""


class Loss(StrEnum):
    """What of the journal a crash may take: what was not acknowledged, or, when the power fails, what was not synced."""

    PROCESS = "process"
    POWER = "power"


class ProcessFaults:
    """Of one life. `expected_turns`: how many it would have without faults, more or less."""

    def __init__(
        self,
        loop: VirtualLoop,
        stop: Stop,
        rates: Mapping[FaultKind, Rate],
        expected_turns: int,
        note: Callable[[FaultKind, str], None],
    ) -> None:
        self._loop = loop
        self._stop = stop
        self._note = note
        self._crash_turn = self._stop_turn = NEVER
        self._crash_part: SavePart | None = None
        self._crash_pass = NEVER
        self._loss = Loss.PROCESS
        self._plan_crash(rates[FaultKind.CRASH], expected_turns)
        self._plan_stop(rates[FaultKind.SIGTERM], expected_turns)
        self.next_turn = min(self._crash_turn, self._stop_turn)
        """The turn of the loop at which `ring` wants to be called."""

    def _plan_crash(self, rate: Rate, expected_turns: int) -> None:
        if not rate.hits():
            return
        self._loss = Loss.POWER if rate.draw() < 0.5 else Loss.PROCESS
        where = rate.draw()
        if where < 0.2:
            within = STARTING_TURNS if rate.draw() < 0.5 else RECOVERY_TURNS
            self._crash_turn = 1 + int(rate.draw() * within)
        elif where < 0.35:
            self._crash_part = list(SavePart)[int(rate.draw() * len(SavePart))]
        elif where < 0.5:
            self._crash_pass = distance(1 / MEAN_PASSES, rate.draw())
        else:
            self._crash_turn = 1 + int(rate.draw() * expected_turns)

    def _plan_stop(self, rate: Rate, expected_turns: int) -> None:
        if not rate.hits():
            return
        self._stop_turn = 1 + int(rate.draw() * expected_turns)
        if rate.draw() < 0.25:  # the second signal is not heard by us: it ends the process
            self._crash_turn = min(self._crash_turn, self._stop_turn + 1 + int(rate.draw() * SECOND_SIGNAL_TURNS))

    def ring(self) -> None:
        """Do what is due. Raises Crash."""
        if self._loop.turns >= self._crash_turn:
            self._crash(f"at turn {self._loop.turns}")
        if self._loop.turns >= self._stop_turn:
            self._stop_turn = NEVER
            self._note(FaultKind.SIGTERM, f"at turn {self._loop.turns}")
            self._loop.call_soon(self._stop.request)
        self.next_turn = min(self._crash_turn, self._stop_turn)

    def passing(self, site: str) -> None:
        """The controller passes through a site, where much hangs on what it has done and what it has not."""
        self._crash_pass -= 1
        if not self._crash_pass:
            self._loop.fail(self._crash(f"at {site}", is_raised=False))

    def saving(self, part: SavePart) -> None:
        """A checkpoint has come so far."""
        if self._crash_part is part:
            self._loop.fail(self._crash(f"with a checkpoint {part}", is_raised=False))

    def _crash(self, where: str, *, is_raised: bool = True) -> Crash:
        self._note(FaultKind.CRASH, f"{where}, {self._loss}")
        crash = Crash(self._loss)
        if is_raised:
            raise crash
        return crash
