"""What VLLMEngine needs of a vLLM that runs; `llm.py` has the real one, and tests one without a model."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

from asyncrl.ports import World
from asyncrl.rollout.publication.control import Control
from asyncrl.rollout.vllm.answers import Call, Part
from asyncrl.rollout.vllm.meter import Meter
from asyncrl.rollout.vllm.processes import Process
from asyncrl.rollout.vllm.settings import VLLMSettings


class Client(Protocol):
    """A vLLM that has started. Its methods raise EngineError when it refuses, fails or is gone."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def meter(self) -> Meter: ...

    @property
    def processes(self) -> Sequence[Process]:
        """They end when the engine does, and the engine when one of them does."""
        ...

    @property
    def control(self) -> Control: ...

    @property
    def is_dead(self) -> bool:
        """It answers nothing any more."""
        ...

    def parts(self, call: Call) -> AsyncGenerator[Part, None]:
        """The answer in one part, or in many when it has stop strings; closing it early aborts the request."""
        ...

    async def abort(self, call: Call) -> None:
        """End the request now: one more part comes, the last."""
        ...

    async def close(self) -> None:
        """End all of it, off the loop. Raises DeadlineError when it does not end in time."""
        ...


Opener = Callable[[VLLMSettings, World], Awaitable[Client]]
"""Starts a vLLM. Cancelling it leaves nothing behind."""
