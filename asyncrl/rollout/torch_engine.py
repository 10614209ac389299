"""The embedded engine: continuous batching of a Hugging Face model on a thread of its own.

session -> [generate] -> outcome. The loop posts commands (plain functions) to the thread's queue; the thread runs them between two
steps and sends results back with `call_soon_threadsafe`. Futures belong to the loop, slots and weights to the thread; nothing is
shared, so nothing is locked.

Waits: `generate` takes as long as its request, so the caller looks at `beats` (rollout.request_timeout_s); `publish` and `pause`
take one step of the engine at most, and their caller sets the deadline too. Leaving the context waits for the step in flight, but
not for a thread that hangs: it is left behind, and keeps no process alive.
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from asyncrl.errors import EngineError
from asyncrl.ports import Decode, GenerateRequest, Generation, StopReason, WeightSnapshot
from asyncrl.rollout.model_runner import ModelRunner
from asyncrl.rollout.requests import check_request
from asyncrl.rollout.scheduler import Outcome, Scheduler
from asyncrl.rollout.stopping import StopRules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0
"""A step of the largest model that fits takes seconds; a thread that needs longer hangs."""

Command = Callable[[], None]


class TorchEngine:
    """A RolloutEngine over `model`, which must be the engine's own copy: its weights, attention and linear layers are taken over.

    max_num_seqs: rows that decode together. context_len: tokens of prompt plus answer. version: of the model's weights now.
    deterministic: a session's tokens do not depend on its neighbours, the order of arrival or max_num_seqs (see model_runner).
    decode: ids -> text, needed for stop strings only. Raises ModelError for a model that it cannot serve.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        max_num_seqs: int,
        context_len: int,
        deterministic: bool = False,
        version: int = 0,
        decode: Decode | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        runner = ModelRunner(model, num_slots=max_num_seqs, context_len=context_len, deterministic=deterministic)
        rules = StopRules(context_len, decode)
        self._scheduler = Scheduler(runner, max_num_seqs=max_num_seqs, version=version, rules=rules)
        self._runner = runner
        self._context_len = context_len
        self._has_decode = rules.has_decode
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._tickets = itertools.count()
        self._futures: dict[int, asyncio.Future[Generation]] = {}
        self._acks: set[asyncio.Future[None]] = set()
        self._discarded = 0
        self._close_timeout_s = close_timeout_s
        self._paused = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self._failure: BaseException | str | None = "the engine has not been started: use it with `async with`"

    # --- the loop's side ---------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Weight version that the next decode step samples from."""
        return self._scheduler.version

    @property
    def context_len(self) -> int:
        return self._context_len

    @property
    def failure(self) -> str | None:
        return None if self._failure is None else str(_engine_error(self._failure))

    @property
    def beats(self) -> int:
        """Forwards so far."""
        return self._scheduler.beats

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample an answer; with max_tokens 0, an empty one.

        A greedy row's log-probs are those of the unfiltered softmax at temperature 1.

        Raises PromptTooLongError when no new token fits, and EngineError for a request that cannot be served and when the engine
        dies or is closed. Cancelling frees the slot.
        """
        self._check_alive()
        check_request(request, context_len=self._context_len, vocab_size=self._runner.shape.vocab_size, has_decode=self._has_decode)
        if request.sampling.max_tokens == 0:
            return Generation(token_ids=[], log_probs=[], version_spans=[], stop_reason=StopReason.LENGTH)
        ticket = next(self._tickets)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._futures[ticket] = future
        self._commands.put(lambda: self._scheduler.submit(ticket, request))
        try:
            return await future
        finally:
            del self._futures[ticket]
            if future.cancelled():
                self._commands.put(lambda: self._scheduler.cancel(ticket))

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        """Swap weights between two decode steps; returns when swapped.

        Raises EngineError, with nothing changed, for a version lower than the engine's and for tensors that do not match the model.
        """
        await self._call(lambda: self._scheduler.load(version, snapshot.tensors))

    async def pause(self) -> None:
        """No step starts until `resume`; returns when the one in flight is done. Weights may be published meanwhile."""
        await self._call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._call(lambda: self._set_paused(False))

    def stats(self) -> dict[str, float]:
        """Counters since the start, and how many rows are where now.

        Of decode steps: decode_steps, decode_rows (computed: with `deterministic`, all slots), decode_s (seconds, sampling
        included), and the sums decode_rows_sq and decode_rows_s (rows x seconds) that a fit of seconds to rows needs. Of prefills
        the same: prefill_calls, prefill_tokens (computed: equal prompts once, padding included), prefill_s, prefill_tokens_sq,
        prefill_tokens_s.
        """
        scheduler, counters = self._scheduler, self._scheduler.counters
        return {
            "generated_tokens": counters["generated_tokens"],
            **scheduler.prefilling.stats("prefill", "calls", "tokens"),
            **scheduler.decoding.stats("decode", "steps", "rows"),
            "recomputed_rows": counters["recomputed_rows"],
            "publications": counters["publications"],
            "cancelled": counters["cancelled"],
            "discarded": self._discarded,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "free_slots": scheduler.max_num_seqs - scheduler.num_running,
            "version": scheduler.version,
        }

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._failure = None
        threading.Thread(target=self._run, name="asyncrl-engine", daemon=True).start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the thread after the step in flight; requests still open get EngineError."""
        assert self._ended is not None
        self._commands.put(None)
        self._fail("the engine was closed")
        await asyncio.wait({self._ended}, timeout=self._close_timeout_s)
        if not self._ended.done():
            log.error("the engine's thread did not end within %g s of its closing; it is left behind", self._close_timeout_s)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise _engine_error(self._failure)

    async def _call(self, command: Command) -> None:
        """Run a command on the thread and wait for it; its EngineError is raised here and leaves the engine alive."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        ack: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            try:
                command()
            except EngineError as error:
                self._to_loop(_settle, ack, error)
            else:
                self._to_loop(_settle, ack, None)

        self._acks.add(ack)
        self._commands.put(run)
        try:
            await ack
        finally:
            self._acks.discard(ack)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            future = self._futures.get(outcome.ticket)
            if future is None or future.done():
                self._discarded += 1
            else:
                _settle(future, outcome.result)

    def _fail(self, reason: BaseException | str) -> None:
        """Everyone who waits gets EngineError, and so does every later call. The first reason stands."""
        if self._failure is None:
            self._failure = reason
        for future in self._futures.values():
            _settle(future, _engine_error(self._failure))
        for ack in self._acks:
            _settle(ack, _engine_error(self._failure))

    def _end(self, reason: BaseException | str) -> None:
        self._fail(reason)
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result(None)

    # --- the thread's side -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason: BaseException | str = "the engine was closed"
        try:
            with torch.inference_mode():
                self._serve()
        except BaseException as error:  # it travels to everyone who waits, through the loop
            reason = error
        self._to_loop(self._end, reason)

    def _serve(self) -> None:
        """Commands between steps, steps while there is work; sleeps on the queue otherwise."""
        while True:
            is_idle = self._paused or not self._scheduler.has_work
            with contextlib.suppress(queue.Empty):
                while (command := self._commands.get(block=is_idle)) is not None:
                    command()
                    is_idle = False
                return
            if self._scheduler.has_work and not self._paused and (outcomes := self._scheduler.step()):
                self._to_loop(self._deliver, outcomes)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _to_loop(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        # A loop that was closed without leaving the context has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


def _settle(future: asyncio.Future[T], result: T | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _engine_error(reason: BaseException | str) -> EngineError:
    if isinstance(reason, str):
        return EngineError(reason)
    error = EngineError(f"the engine's thread died: {type(reason).__name__}: {reason}")
    error.__cause__ = reason
    return error
