"""OpenedLater: an engine whose making takes long, such as one that reads a model. It is made in a thread, when it is opened.

pool -> [opened_later] -> torch_engine

So a pool, which must not stand still, can start one anew at any time.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation, RolloutEngine, WeightSnapshot, World

NOT_OPEN = "the engine has not been started: use it with `async with`"


class OpenedLater:
    """A RolloutEngine around the one that `make` gives; version 0 until then. make: called in a thread, once."""

    def __init__(self, make: Callable[[], RolloutEngine], *, context_len: int, world: World) -> None:
        self._make = make
        self._context_len = context_len
        self._world = world
        self._engine: RolloutEngine | None = None

    @property
    def version(self) -> int:
        return 0 if self._engine is None else self._engine.version

    @property
    def context_len(self) -> int:
        return self._context_len

    @property
    def failure(self) -> str | None:
        return NOT_OPEN if self._engine is None else self._engine.failure

    @property
    def beats(self) -> int:
        return 0 if self._engine is None else self._engine.beats

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._opened.generate(request)

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        await self._opened.publish(version, snapshot)

    async def pause(self) -> None:
        await self._opened.pause()

    async def resume(self) -> None:
        await self._opened.resume()

    def stats(self) -> dict[str, float]:
        return {} if self._engine is None else self._engine.stats()

    async def __aenter__(self) -> Self:
        engine = await self._world.offload(self._make, pool="engines")
        await engine.__aenter__()
        self._engine = engine
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._opened.__aexit__(kind, error, trace)

    @property
    def _opened(self) -> RolloutEngine:
        """Raises EngineError before it is."""
        if self._engine is None:
            raise EngineError(NOT_OPEN)
        return self._engine
