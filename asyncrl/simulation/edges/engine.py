"""One simulated engine: a RolloutEngine that takes time to answer, and that dies for good.

EnginePool -> [SimEngine.generate] -> slots.Engine (prefill, decode steps) -> answer

What goes wrong with a real one goes wrong here: it dies at once, in the middle of taking new weights, or so that its next start
fails too; it hangs, and then neither takes weights nor tells those who wait when it is closed. What comes after it is another one
in its place, up after `sim.engine.down_s`.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from asyncrl.config.simulation import SimEngineConfig
from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation, WeightSnapshot, World
from asyncrl.rollout.requests import check_request
from asyncrl.simulation.edges.batching import BatchingEngine, work_of
from asyncrl.simulation.edges.sampler import Sampler
from asyncrl.simulation.edges.slots import Engine, Row
from asyncrl.simulation.edges.template import VOCABULARY
from asyncrl.simulation.seams import EngineDeath, Seams

CLOSE_S = 30.0
"""Seconds that the closing of an engine takes which hangs: as long as the embedded one waits for its thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimGeneration(Generation):
    """num_tokens: of the model; slot: from when to when its request had one."""

    num_tokens: int
    slot: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """What engines of one simulation have in common. `version`: of the weights that each starts with."""

    config: SimEngineConfig
    sampler: Sampler
    world: World
    seams: Seams
    name: str
    version: int
    context_len: int
    num_slots: int
    publish_s: float
    closed: deque["SimEngine"] = field(default_factory=deque)
    """Engines with calls in them at their closing, which must end now: for whoever looks after it."""

    @property
    def joins_at_borders(self) -> bool:
        """Rows are taken in between two steps, as in the embedded engine."""
        return self.config.prefill_tokens > 0


class Place:
    """Of engines one after the other. `down_since`: when the last one ended."""

    def __init__(self, number: int, kind: EngineKind) -> None:
        self.number = number
        self.kind = kind
        self.down_since: float | None = None
        self.start_fails = False

    def __call__(self) -> "SimEngine":
        return SimEngine(self)

    def end(self) -> None:
        """Its engine has ended."""
        if self.down_since is None:
            self.down_since = self.kind.world.now()

    async def wait(self, name: str) -> None:
        """For the start of the next one."""
        if self.down_since is None:
            return
        kind, fails, self.start_fails = self.kind, self.start_fails, False
        kind.seams.busy(name, "down", self.down_since, kind.world.now() + kind.config.down_s)
        self.down_since = kind.world.now() + kind.config.down_s
        await asyncio.sleep(kind.config.down_s)
        if fails:
            raise EngineError(f"{name} does not start")
        self.down_since = None


class SimEngine:
    """A RolloutEngine, the next one at its place."""

    def __init__(self, place: Place) -> None:
        kind = place.kind
        self._place = place
        self._kind = kind
        make = BatchingEngine if kind.joins_at_borders else Engine
        self.slots = make(place.number, kind.config, kind.num_slots, kind.world, kind.seams, version=kind.version, name=kind.name)
        self.version = kind.version
        self.context_len = kind.context_len
        self.failure: str | None = "a simulated engine is opened by `async with`"
        self.num_inside = 0
        """Calls that have not left it."""
        self.closed_s = 0.0
        self._generated = 0
        self._dies_with_weights = False
        self._waits: dict[asyncio.Future[None], None] = {}

    @property
    def number(self) -> int:
        """Of its place."""
        return self._place.number

    @property
    def name(self) -> str:
        return self.slots.name

    @property
    def beats(self) -> int:
        return int(self.slots.beats)

    # --- requests

    async def generate(self, request: GenerateRequest) -> Generation:
        self._check_alive()
        kind = self._kind
        check_request(request, context_len=self.context_len, vocab_size=VOCABULARY, has_decode=False)
        answer = kind.sampler.answer(request, self.context_len - len(request.prompt_ids))
        prompt = hash(tuple(request.prompt_ids)) if kind.joins_at_borders else None  # of whole numbers: the same in every process
        row = Row(answer, asyncio.get_running_loop().create_future(), prompt)
        kind.seams.taken(request, self)
        if answer.ids:
            self._may_hang(request, row)
            await self._decode(row)
        now = kind.world.now()
        self._generated += answer.num_tokens
        return SimGeneration(
            token_ids=answer.ids,
            log_probs=[answer.log_prob] * len(answer.ids),
            version_spans=row.spans() if answer.ids else [],
            stop_reason=answer.stop_reason,
            num_tokens=answer.num_tokens,
            slot=(row.began_s if answer.ids else now, now),
        )

    def _may_hang(self, request: GenerateRequest, row: Row) -> None:
        hangs_s = self._kind.seams.hangs(request.request_id)
        row.is_lost = hangs_s is not None
        if hangs_s:
            self.slots.hang(hangs_s)

    async def _decode(self, row: Row) -> None:
        self.num_inside += 1
        try:
            self.slots.take(row)
            self._may_die()
            await row.future
        finally:
            self.num_inside -= 1
            self.slots.leave(row)

    def _may_die(self) -> None:
        death = self._kind.seams.engine_dies()
        if death is EngineDeath.WITH_WEIGHTS:
            self._dies_with_weights = True
        elif death is not None:
            self._place.start_fails = death is EngineDeath.AND_AT_START
            self._die(f"{self.name} died")

    # --- weights

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        self._check_alive()
        if version < self.version:
            raise EngineError(f"version {version} is older than the engine's, {self.version}")
        await self._until_it_goes_on()
        if self._dies_with_weights:
            await self._pass(self._kind.publish_s / 2)
            self._die(f"{self.name} died while it took version {version}")
        await self._pass(self._kind.publish_s)
        self.version = version
        self.slots.stamp(version)

    async def pause(self) -> None:
        await self._until_it_goes_on()
        self.slots.pause()

    async def resume(self) -> None:
        self._check_alive()
        self.slots.resume()

    async def _until_it_goes_on(self) -> None:
        while (rest_s := self.slots.hangs_until - self._kind.world.now()) > 0:
            await self._pass(rest_s)
        self._check_alive()

    async def _pass(self, seconds: float) -> None:
        """Time, unless it dies meanwhile: EngineError."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        passed: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _settle, passed)
        self._waits[passed] = None
        try:
            await passed
        finally:
            timer.cancel()
            del self._waits[passed]

    # --- life

    def stats(self) -> dict[str, float]:
        return {
            "generated_tokens": float(self._generated),
            **work_of([self.slots]),
            "running": float(self.slots.num_running),
            "waiting": float(self.slots.num_waiting),
            "free_slots": float(self._kind.num_slots - self.slots.num_running),
            "discarded": 0.0,
        }

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineError(self.failure)

    def _die(self, reason: str) -> None:
        """Everyone who waits is told."""
        if self.failure is None:
            self.failure = reason
        self._place.end()
        self.slots.die(reason)
        for wait in self._waits:
            _settle(wait, reason)

    async def __aenter__(self) -> Self:
        await self._place.wait(self.name)
        self.failure = None
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.closed_s = self._kind.world.now()
        if self.num_inside:
            self._kind.closed.append(self)
        if self.failure is None and self.slots.hangs_until > self.closed_s:
            self.failure = f"{self.name} hangs"
            self._place.end()
            await asyncio.sleep(CLOSE_S)
        else:
            self._die(f"{self.name} is closed")


def _settle(wait: "asyncio.Future[None]", reason: str = "") -> None:
    if wait.done():
        return
    if reason:
        wait.set_exception(EngineError(reason))
    else:
        wait.set_result(None)
