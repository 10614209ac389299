"""TurnGate: an engine under which a turn ends with the weights that it began with (rollout.in_flight_updates = false).

session -> [TurnGate.generate] -> engine; trainer -> [TurnGate.publish] -> engine

Invariants:
1. While weights are swapped no call is in flight, except after the deadline: then the publication goes on in flight, and says so.
2. A call that comes while a publication waits begins after it; so the publication waits only for calls that were there before it.
"""

import asyncio
from types import TracebackType
from typing import Self

from asyncrl.ports import (
    GenerateRequest,
    Generation,
    Incident,
    IncidentKind,
    Report,
    RolloutEngine,
    WeightSnapshot,
    ignore_incident,
)


class TurnGate:
    """A RolloutEngine around `engine`, which it opens and closes. publish_timeout_s: a publication's wait for calls in flight."""

    def __init__(self, engine: RolloutEngine, *, publish_timeout_s: float, report: Report = ignore_incident) -> None:
        self._engine = engine
        self._timeout_s = publish_timeout_s
        self._report = report
        self._num_publishing = 0
        self._num_swapping = 0
        self._num_swap_beats = 0
        self._num_waiting = 0
        self._num_in_flight = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def context_len(self) -> int:
        return self._engine.context_len

    @property
    def failure(self) -> str | None:
        return self._engine.failure

    @property
    def beats(self) -> int:
        """Those of the engine. A swap of weights has a deadline of its own and no steps: each look during it hears a beat, and so
        does the first one after it, for the calls at the gate have missed nothing."""
        self._num_swap_beats += bool(self._num_swapping)
        return self._engine.beats + self._num_swap_beats

    async def generate(self, request: GenerateRequest) -> Generation:
        await self._wait_for_gate()
        self._num_in_flight += 1
        self._is_empty.clear()
        try:
            return await self._engine.generate(request)
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._is_empty.set()

    async def _wait_for_gate(self) -> None:
        """Bounded by the caller's deadline. Returns without an await after the check."""
        self._num_waiting += 1
        try:
            while self._num_publishing:
                await self._is_open.wait()
        finally:
            self._num_waiting -= 1

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        """Wait until no call is in flight, `publish_timeout_s` at most, then swap. Its caller's deadline needs room for both."""
        self._num_publishing += 1
        self._is_open.clear()
        try:
            await self._drain(version)
            await self._swap(version, snapshot)
        finally:
            self._num_publishing -= 1
            if not self._num_publishing:
                self._is_open.set()

    async def _swap(self, version: int, snapshot: WeightSnapshot) -> None:
        self._num_swapping += 1
        try:
            await self._engine.publish(version, snapshot)
        finally:
            self._num_swapping -= 1
            self._num_swap_beats += 1

    async def _drain(self, version: int) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._num_in_flight:
                    await self._is_empty.wait()
        except TimeoutError:
            limit = "rollout.publish_timeout_s"
            calls = f"{self._num_in_flight} generate calls"
            text = f"version {version} waited {limit} = {self._timeout_s:g} s for {calls}, which go on under it"
            self._report(Incident(kind=IncidentKind.DEADLINE, what="publish", text=text, limit=limit))

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    def stats(self) -> dict[str, float]:
        """Those of the engine, and `at_gate`: calls that wait for a publication."""
        return {**self._engine.stats(), "at_gate": float(self._num_waiting)}

    async def __aenter__(self) -> Self:
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._engine.__aexit__(kind, error, trace)
