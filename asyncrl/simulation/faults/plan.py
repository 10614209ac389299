"""FaultPlan: the seams of one life, with the faults that its seed has armed.

simulate -> [FaultPlan] -> edges, loop (resumes), world (sites), store, journal

Every fault is an event of the log, with what it hit. `hits` counts those of the life: the verdict on its end asks.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import FrameType

from asyncrl.config.simulation import SimFaultsConfig
from asyncrl.simulation.draws import unit
from asyncrl.simulation.errors import InjectedError
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.faults.awaits import AwaitCoverage
from asyncrl.simulation.faults.graves import Graves
from asyncrl.simulation.faults.kinds import FaultKind, ResumeFault
from asyncrl.simulation.faults.process import ProcessFaults
from asyncrl.simulation.faults.rates import Rate
from asyncrl.simulation.faults.resumes import ResumeFaults
from asyncrl.simulation.faults.sites import SiteFaults
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.simulation.seams import EngineDeath, Observer, SavePart, Seams, Witness
from asyncrl.stopping import Stop
from asyncrl.world import derive_seed

SLOWER = 100.0
"""Times that a straggler's work takes."""
GONE_S = 1e4
"""Seconds of a commit when the disk is as good as gone: beyond every deadline."""
GONE_SHARE = 0.02
"""Of the slow commits."""
SYNC_HANG_S = 3600.0
"""Seconds that a sync tool hangs in its thread."""
HANGS_S = (0.0, 1.0, 100.0, 2000.0)
"""Seconds that an engine stands still: not at all, or up to so many."""
DEATHS = ((0.2, EngineDeath.AND_AT_START), (0.4, EngineDeath.WITH_WEIGHTS))
"""(up to which draw, how): the others at once."""
LOUDNESS = (0.2, 1.0, 3.0)
"""Times its rate that a kind is armed with: a seed may see much of one fault and little of another."""
OF_A_LIFE = frozenset({FaultKind.CRASH, FaultKind.SIGTERM, FaultKind.CHECKPOINT_DAMAGE})
"""Kinds whose rate is of whole lives: those that are armed have it as it is."""
EVALUATION = "val-"
"""Uids of evaluations begin so."""
AWAITS = (FaultKind.AWAIT_ERROR, FaultKind.AWAIT_CANCEL, FaultKind.AWAIT_HANG)


def armed_kinds(seed: int, asked: frozenset[FaultKind]) -> dict[FaultKind, float]:
    """Which of the kinds that were asked for this seed has, and how loud each. A single one is always armed."""
    drawn = {kind: derive_seed(seed, "armed", kind.value) for kind in FaultKind if kind in asked}
    chosen = {kind: number for kind, number in drawn.items() if len(drawn) == 1 or unit(number) < 0.5}
    loud = {kind: LOUDNESS[int(unit(number, 1) * len(LOUDNESS))] for kind, number in chosen.items()}
    return {kind: 1.0 if kind in OF_A_LIFE else times for kind, times in loud.items()}


class FaultPlan(Seams):
    """`armed`: kind -> times its rate. `seed`: of this life; `run_seed`: of all. `at`: faults at its resumes.
    `awaits` is told of each."""

    def __init__(
        self,
        armed: dict[FaultKind, float],
        rates: SimFaultsConfig,
        loop: VirtualLoop,
        log: EventLog,
        *,
        seed: int,
        run_seed: int = 0,
        stop: Stop,
        graves: Graves | None = None,
        expected_turns: int = 0,
        at: Sequence[ResumeFault] = (),
        awaits: AwaitCoverage | None = None,
        observers: Sequence[Observer] = (),
        witness: Witness | None = None,
    ) -> None:
        super().__init__(observers, witness)
        self.hits: Counter[FaultKind] = Counter()
        self.loop = loop
        self.graves = Graves() if graves is None else graves
        self.haunts = FaultKind.LATE_WRITE in armed or FaultKind.TAG_REPLAY in armed
        """The store is a HauntedQueue."""
        self._log = log
        self.saved_step = 0
        """The last step of which a checkpoint was begun."""
        self._awaits = awaits
        self._stop = stop
        shares = {kind: min(1.0, getattr(rates, kind.value) * armed.get(kind, 0.0)) for kind in FaultKind}
        self.rates = {kind: Rate(share, derive_seed(seed, kind.value)) for kind, share in shares.items()}
        shares_of_awaits = {kind: shares[kind] for kind in AWAITS}
        self.resumes = ResumeFaults(derive_seed(seed, "resumes"), shares_of_awaits, at=at, hit=self._note_resume, coverage=awaits)
        if self.resumes.is_armed:
            loop.wrap = self.resumes.wrap
        self._sites = SiteFaults(self.rates[FaultKind.SITE], run_seed)
        self.process = ProcessFaults(loop, stop, self.rates, expected_turns, self.note)

    def note(self, kind: FaultKind, what: str) -> None:
        """A fault comes true."""
        self.hits[kind] += 1
        self._log.note("fault", f"{kind} {what}")

    def _note_resume(self, kind: FaultKind, task: str, frames: list[FrameType]) -> None:
        if self._awaits is not None:
            self._awaits.met(kind, frames)
        if kind is FaultKind.SIGTERM:
            self.loop.call_soon(self._stop.request)
        frame = frames[-1]
        file = frame.f_code.co_filename.rpartition("/")[2]
        self.note(kind, f"task {task!r} at {file}:{frame.f_lineno} {frame.f_code.co_qualname}")

    def strikes(self, kind: FaultKind, what: str) -> bool:
        """Is this chance of a fault one? It is noted then."""
        if not self.rates[kind].hits():
            return False
        self.note(kind, what)
        return True

    # --- edges

    def slowed(self, edge: str, seconds: float) -> float:
        kind = FaultKind.JOURNAL_SLOW if edge == "commit" else FaultKind.STRAGGLER
        if not self.strikes(kind, edge):
            return seconds
        if kind is FaultKind.JOURNAL_SLOW and self.rates[kind].draw() < GONE_SHARE:
            return seconds + GONE_S
        return seconds * SLOWER

    async def tool(self, name: str) -> None:
        if self.strikes(FaultKind.TOOL_ERROR, name):
            raise InjectedError(f"tool {name}")
        if self.strikes(FaultKind.TOOL_HANG, name):
            await _hang()

    def sync_tool(self, name: str) -> float:
        if self.strikes(FaultKind.TOOL_ERROR, name):
            raise InjectedError(f"tool {name}")
        return SYNC_HANG_S if self.strikes(FaultKind.TOOL_HANG, name) else 0.0

    async def reward(self) -> None:
        if self.strikes(FaultKind.REWARD_ERROR, "reward"):
            raise InjectedError("reward")
        if self.strikes(FaultKind.REWARD_HANG, "reward"):
            await _hang()

    def engine_dies(self) -> EngineDeath | None:
        kind = FaultKind.ENGINE_DEATH
        if not self.rates[kind].hits():
            return None
        drawn = self.rates[kind].draw()
        death = next((death for share, death in DEATHS if drawn < share), EngineDeath.AT_ONCE)
        self.note(kind, f"engine, {death}")
        return death

    def hangs(self, request_id: str) -> float | None:
        if request_id.startswith(EVALUATION):
            return 0.0 if self.strikes(FaultKind.EVAL_HANG, request_id) else None
        if not self.strikes(FaultKind.ENGINE_HANG, request_id):
            return None
        draw = self.rates[FaultKind.ENGINE_HANG].draw
        return HANGS_S[int(draw() * len(HANGS_S))] * draw()

    def journal_fails(self) -> bool:
        return self.strikes(FaultKind.JOURNAL_FAIL, "journal")

    async def site(self, name: str) -> None:
        if self._awaits is not None:
            await asyncio.sleep(0)
            return
        self.process.passing(name)
        pause_s = self._sites.pause_s(name)
        if pause_s is not None:
            self.note(FaultKind.SITE, f"{name} for {pause_s:.3f} s")
            await asyncio.sleep(pause_s)

    def save_begins(self, step: int) -> None:
        super().save_begins(step)
        self.saved_step = step

    def saving(self, part: SavePart) -> None:
        self.process.saving(part)


async def _hang() -> None:
    """Never returns."""
    await asyncio.get_running_loop().create_future()
