"""Member: one place in the pool. Its engines live one after the other, each made anew, until it is given up.

EnginePool -> [Member.run] -> maker -> open -> newest weights -> serve -> death -> close -> again

Invariants:
1. An engine serves only with the newest weights, and paused when the pool is.
2. One engine is closed, or its closing has run into its deadline, before the next one is made: both would not fit into a GPU.
3. `max_restarts` in a row without an answer in between is the end; so every wait for an engine has one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.errors import EngineError
from asyncrl.ports import Incident, IncidentKind, Report, RolloutEngine
from asyncrl.rollout.pool.life import Life
from asyncrl.rollout.pool.limits import PoolLimits
from asyncrl.rollout.pool.orders import Orders
from asyncrl.rollout.pool.tally import Tally
from asyncrl.waiting import back_off, no_stray_cancel, within
from asyncrl.wording import named_message_of

FIRST_BACK_OFF_S = 1.0
"""Before the second restart in a row, and twice as much before each further one: what ended the last two may still be there."""
LONGEST_BACK_OFF_S = 30.0


class Phase(StrEnum):
    """What a member is at."""

    STARTING = "starting"
    SERVING = "serving"
    CLOSING = "closing"
    RESTING = "resting"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """For whoever looks at the pool. version: of the weights, None when it does not serve. cause: of its last death or failed
    start, "" when there was none."""

    number: int
    phase: Phase
    is_slow: bool
    version: int | None
    load: int
    num_restarts: int
    cause: str


class Member:
    """`changed`: told when its load or version is another, when it takes requests no more or again, and when it is given up."""

    def __init__(
        self,
        number: int,
        maker: Callable[[], RolloutEngine],
        *,
        limits: PoolLimits,
        orders: Orders,
        changed: Callable[["Member"], None],
        report: Report,
    ) -> None:
        self.number = number
        self.name = f"engine {number}"
        self.phase = Phase.STARTING
        self.life: Life | None = None
        self.cause = ""
        self.num_restarts = 0
        self.context_len = 0
        self.first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._maker = maker
        self._limits = limits
        self._orders = orders
        self._changed = changed
        self._report = report
        self._tally = Tally()
        self._num_in_a_row = 0
        self._is_ending = False
        self._task: asyncio.Task[None] | None = None

    # --- for the router

    @property
    def takes_requests(self) -> bool:
        return self.life is not None and self.life.takes_requests

    @property
    def load(self) -> int:
        return 0 if self.life is None else self.life.load

    @property
    def version(self) -> int:
        """Of an engine that serves."""
        assert self.life is not None
        return self.life.engine.version

    @property
    def is_live(self) -> bool:
        """Has it an engine that serves, slow or not?"""
        return self.life is not None and self.life.failure is None

    @property
    def is_slow(self) -> bool:
        return self.life is not None and self.life.is_slow

    @property
    def is_under_deadline(self) -> bool:
        """Is its silence bounded already, by the watch or by a publication?"""
        return self.life is not None and (self.life.is_slow or self.life.is_publishing)

    # --- figures

    @property
    def beats(self) -> int:
        """Of all its engines so far."""
        return self._tally.beats(None if self.life is None else self.life.engine)

    def stats(self) -> dict[str, float]:
        """Of all its engines so far; of what stands now, those of the one that serves."""
        return self._tally.stats(None if self.life is None else self.life.engine)

    def state(self) -> MemberState:
        return MemberState(
            number=self.number,
            phase=self.phase,
            is_slow=self.is_slow,
            version=self.version if self.is_live else None,
            load=self.load,
            num_restarts=self.num_restarts,
            cause=self.cause,
        )

    # --- life after life

    def start(self, group: asyncio.TaskGroup) -> None:
        self._task = group.create_task(self._run(), name=self.name)

    def end(self, reason: str) -> None:
        """Fail who waits, and close the engine. A closing that is under way is not interrupted: it has its deadline."""
        self._is_ending = True
        if self._task is not None and self.phase is not Phase.CLOSING:
            self._task.cancel()
        if self.life is not None:
            self.life.die(reason)

    async def ended(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        with no_stray_cancel(self.name):
            await self._live()
            while not self._is_ending and self._may_restart():
                self.phase = Phase.RESTING
                if self._num_in_a_row > 1:
                    await back_off(min(FIRST_BACK_OFF_S * 2 ** (self._num_in_a_row - 2), LONGEST_BACK_OFF_S))
                await self._live()

    async def _live(self) -> None:
        """From the making of an engine to its end. Its `cause` is set then; the first start's own error is raised where the pool is
        opened."""
        self.phase = Phase.STARTING
        try:
            with no_stray_cancel(f"the start of {self.name}"):
                engine = await self._open()
        except Exception as error:  # whatever a start raises is told, counted, and in the end the reason why nothing is served
            self.cause = f"its start failed: {named_message_of(error)}"
            self._first_start_failed(error)
            return
        try:
            life = Life(engine, self.name, self._limits, changed=self._life_changed, report=self._report)
            if await self._obey(life):
                self._serve(life)
            await life.died.wait()
            self.cause = str(life.failure)
            self._first_start_failed(EngineError(f"{self.name} died as it started: {self.cause}"))
        finally:
            self.phase = Phase.CLOSING
            self._bury()
            await self._close(engine)

    async def _open(self) -> RolloutEngine:
        late = f"{self.name} did not start within rollout.start_timeout_s = {self._limits.start_timeout_s:g} s"
        async with within(self._limits.start_timeout_s, lambda: late):
            engine = self._maker()
            await engine.__aenter__()
        return engine

    def _first_start_failed(self, error: Exception) -> None:
        """If it was the first."""
        if not self.first_start.done():
            self.first_start.set_exception(error)
            self.first_start.exception()  # looked at: of several, only the first is raised
            self._is_ending = True

    async def _obey(self, life: Life) -> bool:
        """Bring an engine to what is ordered. Returns, without an await after the last check, whether it can serve; it has died
        otherwise."""
        orders, weights, is_paused = self._orders, None, False
        while not life.is_dead():
            if orders.is_open:
                await orders.decided()
            elif orders.newest is not weights and orders.newest is not None:
                weights = orders.newest
                refusal = await life.take(weights)
                if refusal is not None:
                    life.die(f"it does not take version {weights.version}: {refusal}")
            elif orders.is_paused != is_paused:
                is_paused = orders.is_paused
                await self._stand(life, is_paused)
            else:
                return True
        return False

    async def _stand(self, life: Life, is_paused: bool) -> None:
        try:
            await (life.pause() if is_paused else life.resume())
        except EngineError as error:
            life.die(f"it could not be {'paused' if is_paused else 'resumed'}: {error}")

    def _serve(self, life: Life) -> None:
        engine = life.engine
        if self.context_len and engine.context_len < self.context_len:
            life.die(f"its context is of {engine.context_len} tokens, and it was of {self.context_len}")
            return
        self.context_len = engine.context_len
        self.life = life
        self.phase = Phase.SERVING
        if not self.first_start.done():
            self.first_start.set_result(None)
        self._changed(self)

    def _bury(self) -> None:
        """What it did stays in the counts."""
        life, self.life = self.life, None
        if life is not None:
            self._tally.add(life.engine)
            if life.has_answered:
                self._num_in_a_row = 0

    async def _close(self, engine: RolloutEngine) -> None:
        limit_s = self._limits.close_timeout_s
        late = f"{self.name} did not close within {limit_s:g} s; it is left behind"
        try:
            async with within(limit_s, lambda: late):
                await engine.__aexit__(None, None, None)
        except Exception as error:  # it is dead, and the next one does not depend on how it went
            text = str(error) if isinstance(error, TimeoutError) else f"{self.name} did not close: {named_message_of(error)}"
            self._report(Incident(kind=IncidentKind.FAILURE, what="engine", text=text))

    def _may_restart(self) -> bool:
        limit = self._limits.max_restarts
        if self._num_in_a_row >= limit:
            self.phase = Phase.GIVEN_UP
            tries = f"after {limit} restarts in a row without an answer" if limit else "at its first death"
            text = f"{self.name} is given up {tries} (rollout.max_restarts): {self.cause}"
            self._report(Incident(kind=IncidentKind.FAILURE, what="engine", text=text, limit="rollout.max_restarts"))
            self._changed(self)
            return False
        self._num_in_a_row += 1
        self.num_restarts += 1
        text = f"{self.name} is started anew (restart {self._num_in_a_row} of {limit} in a row): {self.cause}"
        self._report(Incident(kind=IncidentKind.RETRY, what="engine", text=text))
        return True

    def _life_changed(self) -> None:
        self._changed(self)
