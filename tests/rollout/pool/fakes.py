"""Engines for the pool's tests, on virtual time: they die, hang, are slow, fail to start and to take weights, as they are told.

A `Rack` makes them: one place each, as a pool has, and all that happened. Tokens are versions: each id is the version that it was
sampled from.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from types import TracebackType
from typing import Any, Self

import torch

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation, Incident, SamplingParams, StopReason, VersionSpan, WeightSnapshot
from asyncrl.rollout.pool import EnginePool, PoolLimits
from asyncrl.simulation.loop import VirtualLoop

LIMITS: dict[str, Any] = {
    "start_timeout_s": 60.0,
    "slow_after_s": 8.0,
    "hung_after_s": 40.0,
    "publish_timeout_s": 20.0,
    "max_restarts": 3,
    "close_timeout_s": 10.0,
}
FOREVER_S = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A snapshot; one that does not fit is refused by every engine."""

    fits: bool = True
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Ways:
    """How the engines of one place behave; may be changed at any time. A list is used up, one entry a call."""

    step_s: float = 1.0
    start_s: float = 5.0
    publish_s: float = 0.5
    close_s: float = 0.1
    context_len: int = 1 << 20
    failing_starts: list[str] = field(default_factory=list)
    """"raise", "hang" or "dead" (opens, and is dead)."""
    failing_publications: list[str] = field(default_factory=list)
    """"refuse", "hang", "die" or "raise"."""
    failing_pauses: list[str] = field(default_factory=list)
    """"refuse", "hang" or "die"."""
    forgets_waiters: bool = False
    """Its death reaches nobody who waits."""
    swallows_cancellation: bool = False
    """Who cancels a call gets what there is as an answer."""


class FakeEngine:
    """One of a place's engines."""

    def __init__(self, rack: "Rack", place: int, life: int) -> None:
        self.name = f"{place}.{life}"
        self.version = rack.first_version
        self.loaded: WeightSnapshot | None = None
        self.is_open = False
        self.beats = 0
        self.num_running = 0
        self.num_tokens = 0
        self.hangs = False
        self._rack = rack
        self._ways = rack.ways[place]
        self._failure: str | None = "the engine has not been started: use it with `async with`"
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._is_paused = False
        self._waiters: dict[asyncio.Future[None], None] = {}

    @property
    def context_len(self) -> int:
        return self._ways.context_len

    @property
    def failure(self) -> str | None:
        return self._failure

    async def generate(self, request: GenerateRequest) -> Generation:
        self._check()
        samples = self._rack.samples[request.request_id] = []
        self._rack.went[request.request_id] = self.name
        self.num_running += 1
        try:
            for _ in range(request.sampling.max_tokens):
                await self._step()
                samples.append((now(), self.version))
        except asyncio.CancelledError:
            if not self._ways.swallows_cancellation:
                raise
        finally:
            self.num_running -= 1
        versions = [version for _, version in samples]
        self.num_tokens += len(versions)
        spans, start = [], 0
        for version, run in groupby(versions):
            spans.append(VersionSpan(start=start, end=start + len(list(run)), version=version))
            start = spans[-1].end
        return Generation(token_ids=versions, log_probs=[-0.5] * len(versions), version_spans=spans, stop_reason=StopReason.LENGTH)

    async def _step(self) -> None:
        await self._rest(self._ways.step_s)
        while not self._may_step.is_set():
            await self._rest(FOREVER_S, self._may_step)
        self.beats += 1

    async def _rest(self, seconds: float, event: asyncio.Event | None = None) -> None:
        """Until the time is over, the event is set, or the engine dies."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(seconds, _settle, future)
        waiting = asyncio.ensure_future(event.wait()) if event is not None else None
        if waiting is not None:
            waiting.add_done_callback(lambda _: _settle(future))
        self._waiters[future] = None
        try:
            await future
        finally:
            timer.cancel()
            self._waiters.pop(future, None)
            if waiting is not None:
                waiting.cancel()
        if not self._ways.forgets_waiters:
            self._check()

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        self._check()
        assert isinstance(snapshot, Weights)
        way = self._ways.failing_publications.pop(0) if self._ways.failing_publications else ""
        await self._rest(FOREVER_S if way == "hang" or self.hangs else self._ways.publish_s)
        if way == "die":
            self.die("it died of new weights")
            self._check()
        if way == "raise":
            raise ValueError("half of the weights are in")
        if way == "refuse" or not snapshot.fits or version < self.version:
            raise EngineError(f"{self.name}: version {version} does not fit")
        self.version, self.loaded = version, snapshot

    async def pause(self) -> None:
        await self._control()
        self._is_paused = True
        self._may_step.clear()

    async def resume(self) -> None:
        await self._control()
        self._is_paused = False
        if not self.hangs:
            self._may_step.set()

    async def _control(self) -> None:
        self._check()
        way = self._ways.failing_pauses.pop(0) if self._ways.failing_pauses else ""
        await self._rest(FOREVER_S if way == "hang" else 0.01)
        if way == "die":
            self.die("it died of a pause")
            self._check()
        if way == "refuse":
            raise EngineError(f"{self.name}: not now")

    def stats(self) -> dict[str, float]:
        stats = {"generated_tokens": float(self.num_tokens), "running": float(self.num_running), "version": float(self.version)}
        return {**stats, "kv_cache_usage": min(self.num_running / 4, 1.0)}

    async def __aenter__(self) -> Self:
        way = self._ways.failing_starts.pop(0) if self._ways.failing_starts else ""
        self._rack.note(f"{self.name} starts")
        self._failure = None
        await self._rest(FOREVER_S if way == "hang" else self._ways.start_s)
        if way == "raise":
            raise RuntimeError(f"{self.name} has no memory")
        self.is_open = True
        if way == "dead":
            self._failure = f"{self.name} was born dead"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.die(f"{self.name} was closed")
        self._waiters.clear()
        await asyncio.sleep(self._ways.close_s)
        self.is_open = False
        self._rack.note(f"{self.name} closed")

    # --- what a test does to it

    def die(self, reason: str = "out of luck") -> None:
        if self._failure is None:
            self._failure = reason
            if not self._ways.forgets_waiters:
                for future in self._waiters:
                    if not future.done():
                        future.set_exception(EngineError(reason))

    def hang(self) -> None:
        """No step any more, until `go_on`."""
        self.hangs = True
        self._may_step.clear()

    def go_on(self) -> None:
        self.hangs = False
        if not self._is_paused:
            self._may_step.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)


class Rack:
    """The places of a pool. `engines[place]`: all that were ever made there."""

    def __init__(self, num_places: int, *, first_version: int = 0, **limits: Any) -> None:
        self.first_version = first_version
        self.ways = [Ways() for _ in range(num_places)]
        self.engines: list[list[FakeEngine]] = [[] for _ in range(num_places)]
        self.samples: dict[str, list[tuple[float, int]]] = {}
        """Of each request's last call: when each token was sampled, and from which version."""
        self.went: dict[str, str] = {}
        """Of each request's last call: the engine."""
        self.notes: list[tuple[float, str]] = []
        self.incidents: list[Incident] = []
        self.pool = EnginePool(
            [lambda place=place: self._make(place) for place in range(num_places)],  # type: ignore[misc]
            limits=PoolLimits(**{**LIMITS, **limits}),
            report=self.incidents.append,
        )
        self._names: defaultdict[str, int] = defaultdict(int)

    def _make(self, place: int) -> FakeEngine:
        assert all(not engine.is_open for engine in self.engines[place]), "two engines in one place"
        engine = FakeEngine(self, place, len(self.engines[place]))
        self.engines[place].append(engine)
        return engine

    def engine(self, place: int) -> FakeEngine:
        """The newest of a place."""
        return self.engines[place][-1]

    def note(self, text: str) -> None:
        self.notes.append((now(), text))

    def told(self, kind: str) -> list[str]:
        """Texts of the incidents of a kind."""
        return [incident.text for incident in self.incidents if incident.kind == kind]

    def ask(self, session: str, tokens: int = 5) -> Coroutine[Any, Any, Generation]:
        """The next request of a session."""
        self._names[session] += 1
        name = f"{session}-{self._names[session]}"
        sampling = SamplingParams(max_tokens=tokens)
        return self.pool.generate(GenerateRequest(request_id=name, prompt_ids=[1], sampling=sampling, seed=0, session=session))


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def now() -> float:
    return asyncio.get_running_loop().time()


def run_virtual(main: Callable[[], Coroutine[Any, Any, Any]], seed: int = 0) -> Any:
    """Run to its end on a virtual clock."""
    loop = VirtualLoop(seed)
    try:
        return loop.run_until_complete(main())
    finally:
        loop.abandon()
