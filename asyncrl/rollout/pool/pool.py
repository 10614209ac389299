"""EnginePool: several engines as one RolloutEngine, each of which is brought back when it dies.

session -> [EnginePool.generate] -> the session's engine, or the one with the least load
trainer -> [EnginePool.publish] -> all engines; one that is coming back gets the newest weights before it serves

It owns which engine a request goes to, the engines' watching and restarts, and what weights they must have; not the retrying of
sessions: the requests of an engine that dies fail, and the session runner tries again.

Invariants:
1. When `publish` has returned, no engine samples from older weights, and none ever will.
2. A request is at one engine, or waits here for one, or has its answer or error. No wait here is for ever: each engine that is down
   comes back or is given up, within its limits; when all are given up, everyone gets EngineError with the last cause.
3. An engine that is slow, dead or on its way back gets no request.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation, Incident, Report, RolloutEngine, WeightSnapshot, ignore_incident
from asyncrl.rollout.pool.life import Life
from asyncrl.rollout.pool.limits import PoolLimits
from asyncrl.rollout.pool.member import Member, MemberState, Phase
from asyncrl.rollout.pool.orders import Orders, Weights
from asyncrl.rollout.pool.routing import Router
from asyncrl.rollout.pool.tally import SHARES, total
from asyncrl.wording import first_of

CLOSED = "the pool of engines was closed"


class EnginePool:
    """A RolloutEngine over as many engines as there are `makers`. Each maker is called at every start of its engine, on the loop.

    An engine's error at the first start is raised where the pool is opened; later ones count as restarts.
    """

    def __init__(
        self, makers: Sequence[Callable[[], RolloutEngine]], *, limits: PoolLimits, report: Report = ignore_incident
    ) -> None:
        assert makers, "a pool without engines"
        self._makers = makers
        self._limits = limits
        self._report = report
        self._orders = Orders()
        self._members: list[Member] = []
        self._router = Router([])
        self._publishing = asyncio.Lock()
        self._owner = asyncio.TaskGroup()
        self._can_route = asyncio.Event()
        self._num_waiting = 0
        self._own_beats = 0
        self._first_version = 0
        self._failure: str | None = "the pool of engines has not been started: use it with `async with`"

    def tell(self, report: Report) -> None:
        """Where incidents go from now on."""
        self._report = report

    @property
    def version(self) -> int:
        """The lowest of the engines that serve; with none, that which they will have."""
        versions = [member.version for member in self._members if member.is_live]
        if versions:
            return min(versions)
        return self._newest_version

    @property
    def _newest_version(self) -> int:
        newest = self._orders.newest
        return self._first_version if newest is None else newest.version

    @property
    def context_len(self) -> int:
        """Raises EngineError before the first start."""
        if not self._members:
            raise EngineError(str(self._failure))
        return min(member.context_len for member in self._members)

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def beats(self) -> int:
        """Those of all engines. An engine's coming back has deadlines of its own, and so has its silence: each look meanwhile hears
        a beat, for who waits has missed nothing."""
        self._own_beats += bool(self._num_waiting) or any(member.is_under_deadline for member in self._members)
        return self._own_beats + sum(member.beats for member in self._members)

    # --- requests

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises what the engine raises, and EngineError when it dies or no engine is left."""
        life = await self._choose(request.session)
        generation = await life.generate(request)
        if generation.version_spans:
            self._router.saw(request.session, generation.version_spans[-1].version)
        return generation

    async def _choose(self, session: str) -> Life:
        """Returns without an await after the choice, for it is one of this moment."""
        while True:
            self._check_alive()
            number = self._router.choose(session, None if self._orders.is_open else self._newest_version)
            if number is None:
                await self._wait_for_an_engine()
                continue
            life = self._members[number].life
            assert life is not None
            if not life.is_dead():
                return life

    async def _wait_for_an_engine(self) -> None:
        self._num_waiting += 1
        self._can_route.clear()
        try:
            await self._can_route.wait()
        finally:
            self._num_waiting -= 1
            self._own_beats += 1  # the first look afterwards has missed nothing either

    def _changed(self, member: Member) -> None:
        self._router.changed(member)
        if member.phase is Phase.GIVEN_UP and self._failure is None:
            self._note_given_up()
        if member.takes_requests or self._failure is not None:
            self._can_route.set()

    def _note_given_up(self) -> None:
        if all(member.phase is Phase.GIVEN_UP for member in self._members):
            causes = ", ".join(f"{member.name}: {member.cause}" for member in self._members)
            self._failure = f"no engine is left, all are given up (rollout.max_restarts): {causes}"

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)

    # --- weights

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        """Returns when no engine can sample from older weights; one that does not take them in time is dead.

        Raises EngineError, with nothing changed, for a version lower than the newest and for what the engines refuse; and when none
        is left.
        """
        async with self._publishing:
            self._check_alive()
            newest = self._orders.newest
            if newest is not None and version < newest.version:
                raise EngineError(f"version {version} is published after version {newest.version}")
            self._orders.offer()
            try:
                await self._spread(Weights(version=version, snapshot=snapshot))
            finally:
                self._orders.decide()
                self._can_route.set()  # who has seen a version that came to nothing waits for it no more

    async def _spread(self, weights: Weights) -> None:
        """To all that serve. What one of them took does fit, so one that refuses it is broken."""
        refusals: list[tuple[Life, EngineError]] = []

        async def give(life: Life) -> None:
            refusal = await life.take(weights)
            if refusal is not None:
                refusals.append((life, refusal))
            elif life.failure is None:
                self._orders.accept(weights)

        await _all(give(life) for life in self._lives())
        if refusals and self._orders.newest is not weights:
            raise refusals[0][1]
        for life, refusal in refusals:
            life.die(f"it refused version {weights.version}, which others took: {refusal}")
        self._check_alive()
        self._orders.accept(weights)

    # --- pausing

    async def pause(self) -> None:
        """Also for engines that come back meanwhile. Raises EngineError when none is left."""
        self._check_alive()
        self._orders.is_paused = True
        await _all(life.pause() for life in self._lives())
        self._check_alive()

    async def resume(self) -> None:
        """Raises EngineError when no engine is left."""
        self._check_alive()
        self._orders.is_paused = False
        await _all(life.resume() for life in self._lives())
        self._check_alive()

    def _lives(self) -> list[Life]:
        return [member.life for member in self._members if member.life is not None and member.is_live]

    # --- figures

    def stats(self) -> dict[str, float]:
        """Sums over the engines, in counters the dead ones included; of shares the mean, and `version` as above. And: engines,
        engines_slow, engines_down (those that do not serve), restarts, at_pool (requests that wait for an engine)."""
        sums = total(member.stats() for member in self._members)
        num_there = sum(member.life is not None for member in self._members)
        return {
            **sums,
            **{name: sums[name] / num_there for name in SHARES & sums.keys()},
            "version": float(self.version),
            "engines": float(len(self._makers)),
            "engines_slow": float(sum(member.is_slow for member in self._members)),
            "engines_down": float(sum(not member.is_live for member in self._members)),
            "restarts": float(sum(member.num_restarts for member in self._members)),
            "at_pool": float(self._num_waiting),
        }

    def describe(self) -> list[MemberState]:
        """Each engine: what it is at, its version and load, its restarts and the last cause."""
        return [member.state() for member in self._members]

    # --- life

    async def __aenter__(self) -> Self:
        await self._owner.__aenter__()
        try:
            await self._first_start()
        except BaseException as error:
            await self._end("the pool of engines did not start", error)
            raise
        self._failure = None
        return self

    async def _first_start(self) -> None:
        """All at once. Raises the first error of any."""
        for number, maker in enumerate(self._makers):
            member = Member(
                number, maker, limits=self._limits, orders=self._orders, changed=self._changed, report=self._tell_incident
            )
            self._members.append(member)
        self._router = Router(self._members)
        for member in self._members:
            member.start(self._owner)
        starts = [member.first_start for member in self._members]
        await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        for start in starts:
            if start.done():
                start.result()
        self._first_version = self.version

    def _tell_incident(self, incident: Incident) -> None:
        self._report(incident)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Requests still open get EngineError. Each engine is closed, or left behind at its deadline."""
        await self._end(CLOSED, error)

    async def _end(self, reason: str, error: BaseException | None) -> None:
        self._failure = reason
        self._can_route.set()
        for member in self._members:
            member.end(reason)
        try:
            for member in self._members:
                await member.ended()
        finally:
            # An error of the body is the body's, and leaves as it is. A cancellation may be the group's, for a member that crashed.
            cause = (type(error), error, error.__traceback__) if isinstance(error, asyncio.CancelledError) else (None, None, None)
            try:
                await self._owner.__aexit__(*cause)
            except BaseExceptionGroup as errors:
                first = first_of(errors)
                raise first from first.__cause__


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once. One that raises does not end the others: they would be neither done nor undone. Raises the first error."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
