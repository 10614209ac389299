"""Life: one engine from its opening to its death. It ends for good; what comes after it is another one.

EnginePool -> Member -> [Life] -> engine

Invariants:
1. Whoever waits for an engine that has died gets EngineError with the reason, whatever the engine itself does.
2. The first reason stands. After it the engine is asked nothing more.
3. An engine that did not take new weights within the deadline, or was interrupted in it, is dead: its weights may be anything.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation, Incident, IncidentKind, Report, RolloutEngine
from asyncrl.rollout.pool.limits import PoolLimits
from asyncrl.rollout.pool.orders import Weights
from asyncrl.rollout.pool.watch import Watch
from asyncrl.waiting import is_asked_to_end
from asyncrl.wording import named_message_of

T = TypeVar("T")


class Life:
    """`changed`: told when its load or version is another, and when it takes requests no more or again."""

    def __init__(
        self, engine: RolloutEngine, name: str, limits: PoolLimits, *, changed: Callable[[], None], report: Report
    ) -> None:
        self.engine = engine
        self.failure: str | None = None
        self.died = asyncio.Event()
        self.load = 0
        self.has_answered = False
        self._name = name
        self._limits = limits
        self._changed = changed
        self._report = report
        self._calls: dict[asyncio.Timeout, None] = {}  # in the order in which they came, so that they end in one order
        self._commands = asyncio.Lock()
        """Weights, pauses and resumes, in the order in which they came: an engine elsewhere could turn them round."""
        self._is_publishing = False
        self._is_paused = False
        self._watch = Watch(
            lambda: engine.beats,
            slow_after_s=limits.slow_after_s,
            hung_after_s=limits.hung_after_s,
            changed=self._speed_changed,
            hung=self._hang,
        )

    @property
    def is_slow(self) -> bool:
        return self._watch.is_slow

    @property
    def is_publishing(self) -> bool:
        return self._is_publishing

    @property
    def takes_requests(self) -> bool:
        return self.failure is None and not self._watch.is_slow

    # --- what it is asked

    async def generate(self, request: GenerateRequest) -> Generation:
        """Counts as load from the call on, before anything is waited for."""
        self._count(1)
        try:
            generation = await self._call(lambda: self.engine.generate(request))
            self.has_answered = True
            self._watch.heard()
            return generation
        finally:
            self._count(-1)

    async def take(self, weights: Weights) -> EngineError | None:
        """New weights. Returns why they were refused with nothing changed; None: they are in, or it has died."""
        async with self._commands:
            self._is_publishing = True
            self._supervise()
            try:
                await self._call(lambda: self.engine.publish(weights.version, weights.snapshot), self._limits.publish_timeout_s)
                self._watch.heard()
            except BaseException as error:
                if isinstance(error, EngineError):
                    return error if self.failure is None else None
                self.die(self._why_not_taken(weights.version, error))
                if not isinstance(error, Exception) and not _is_stray(error):
                    raise
            finally:
                self._is_publishing = False
                self._supervise()
        self._changed()  # somebody may wait for its version
        return None

    def _why_not_taken(self, version: int, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            limit_s = self._limits.publish_timeout_s
            return f"it did not take version {version} within rollout.publish_timeout_s = {limit_s:g} s"
        if isinstance(error, asyncio.CancelledError):
            return f"the publication of version {version} was broken off"
        return f"it failed to take version {version}: {named_message_of(error)}"

    async def pause(self) -> None:
        """Raises EngineError when it refuses; dying is no refusal."""
        await self._stand(True, self.engine.pause, "pause")

    async def resume(self) -> None:
        """Raises EngineError when it refuses; dying is no refusal."""
        await self._stand(False, self.engine.resume, "go on")

    async def _stand(self, is_paused: bool, work: Callable[[], Awaitable[None]], what: str) -> None:
        async with self._commands:
            self._is_paused = is_paused
            self._supervise()
            try:
                await self._call(work, self._limits.publish_timeout_s)
                self._watch.heard()
            except TimeoutError:
                self.die(f"it did not {what} within rollout.publish_timeout_s = {self._limits.publish_timeout_s:g} s")
            except EngineError:
                if self.failure is None:
                    raise

    async def _call(self, work: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Ask the engine, until the deadline (TimeoutError) or its death (EngineError)."""
        self._check_alive()
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                self._calls[deadline] = None
                result = await work()
        except (TimeoutError, EngineError) as error:
            if self.failure is not None and deadline.expired():
                raise EngineError(self.failure) from error
            raise
        finally:
            self._calls.pop(deadline, None)
            self.is_dead()
        if self.failure is not None:  # it swallowed the cancellation, or answered while it died
            raise EngineError(self.failure)
        return result

    def _check_alive(self) -> None:
        if self.is_dead():
            raise EngineError(str(self.failure))

    # --- whether it lives

    def is_dead(self) -> bool:
        """Asks the engine too: it may know of its own death before anybody has waited for it."""
        if self.failure is None and (reason := self.engine.failure) is not None:
            self.die(reason)
        return self.failure is not None

    def die(self, reason: str) -> None:
        """Everyone who waits gets EngineError."""
        if self.failure is not None:
            return
        self.failure = reason
        self._watch.stop()
        now = asyncio.get_running_loop().time()
        for deadline in self._calls:
            if not deadline.expired():
                deadline.reschedule(now)
        self.died.set()
        self._changed()

    def _count(self, change: int) -> None:
        self.load += change
        self._supervise()
        self._changed()

    def _supervise(self) -> None:
        """It owes steps while it has requests and nobody holds it up."""
        if self.failure is not None:
            return
        if self.load and not self._is_paused and not self._is_publishing:
            self._watch.start()
        else:
            self._watch.stop()

    def _speed_changed(self) -> None:
        if self._watch.is_slow:
            limit = "rollout.slow_after_s"
            silence = f"{self._name} has made no step for {limit} = {self._limits.slow_after_s:g} s"
            text = f"{silence} and has {self.load} requests; it takes no further ones until it makes one"
            self._report(Incident(kind=IncidentKind.DEADLINE, what="engine", text=text, limit=limit))
        self._changed()

    def _hang(self) -> None:
        limit = "rollout.request_timeout_s"  # half of it
        text = f"it has made no step for {self._limits.hung_after_s:g} s and has {self.load} requests"
        self._report(Incident(kind=IncidentKind.DEADLINE, what="engine", text=f"{self._name}: {text}", limit=limit))
        self.die(text)


def _is_stray(error: BaseException) -> bool:
    """A cancellation out of the engine, that nobody asked for."""
    return isinstance(error, asyncio.CancelledError) and not is_asked_to_end()
