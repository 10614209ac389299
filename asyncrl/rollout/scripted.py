"""ScriptedEngine: a RolloutEngine that answers with given token ids, for agent tests, demonstrations and the tool-loop benchmark.

Place: where `TorchEngine` stands, with the same rules for stop tokens, budgets, versions and pausing. It has no model: the log-prob
of every token is the given constant, and `publish` only takes the new version's number.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from types import TracebackType
from typing import Self

from asyncrl.errors import EngineError, PromptTooLongError
from asyncrl.ports import Decode, GenerateRequest, Generation, StopReason, VersionSpan, WeightSnapshot

Answer = Callable[[GenerateRequest], Sequence[int] | Awaitable[Sequence[int]]]
"""What the policy would sample for a request, perhaps after a wait; what it raises is what the engine raises."""


class ScriptedEngine:
    """Answers requests in the order their answers are ready."""

    def __init__(
        self,
        answer: Answer,
        *,
        context_len: int = 1 << 20,
        version: int = 0,
        log_prob: float = -0.5,
        decode: Decode | None = None,
    ) -> None:
        """`decode` is needed for stop strings only."""
        self._answer = answer
        self._context_len = context_len
        self._version = version
        self._log_prob = log_prob
        self._decode = decode
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._running = 0
        self._generated = 0
        self._beats = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def context_len(self) -> int:
        return self._context_len

    @property
    def failure(self) -> str | None:
        """It cannot die."""
        return None

    @property
    def beats(self) -> int:
        """Answers so far."""
        return self._beats

    async def generate(self, request: GenerateRequest) -> Generation:
        """The scripted ids, cut after the first stop token or stop string, or at the budget."""
        room = self._context_len - len(request.prompt_ids)
        if room < 1:
            raise PromptTooLongError(f"request {request.request_id}: its prompt fills the context of {self._context_len} tokens")
        await self._may_run.wait()
        self._running += 1
        try:
            answer = self._answer(request)
            ids = await answer if isawaitable(answer) else answer
        finally:
            self._running -= 1
        self._beats += 1
        return self._cut(list(ids), request, room)

    def _cut(self, ids: list[int], request: GenerateRequest, room: int) -> Generation:
        budget = min(request.sampling.max_tokens, room)
        stop = self._stop_position(ids[:budget], request)
        kept = ids[: stop or budget]
        reason = StopReason.STOP
        if stop is None and len(kept) == budget:
            reason = StopReason.LENGTH if budget == request.sampling.max_tokens else StopReason.CONTEXT
        self._generated += len(kept)
        spans = [VersionSpan(start=0, end=len(kept), version=self._version)] if kept else []
        return Generation(token_ids=kept, log_probs=[self._log_prob] * len(kept), version_spans=spans, stop_reason=reason)

    def _stop_position(self, ids: list[int], request: GenerateRequest) -> int | None:
        """Tokens up to and including the one that stops, None when nothing does."""
        stops, strings = set(request.sampling.stop_token_ids), request.sampling.stop_strings
        if strings and self._decode is None:
            raise EngineError("stop strings need an engine that can decode")
        for position, token in enumerate(ids, 1):
            if token in stops:
                return position
            if strings and self._decode is not None and any(string in self._decode(ids[:position]) for string in strings):
                return position
        return None

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        self._version = version

    async def pause(self) -> None:
        self._may_run.clear()

    async def resume(self) -> None:
        self._may_run.set()

    def stats(self) -> dict[str, float]:
        """`generated_tokens`, `running`."""
        return {"generated_tokens": float(self._generated), "running": float(self._running)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None
