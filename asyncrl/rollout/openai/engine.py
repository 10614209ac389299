"""OpenAIEngine: a RolloutEngine over a server behind HTTP that takes and returns token ids.

session -> [OpenAIEngine.generate] -> Http -> vLLM's server; trainer -> [OpenAIEngine.publish] -> Publisher -> HTTPControl -> Http

A request is one POST whose answer streams. At most `max_num_seqs` are sent at once, the others wait here. A caller that is
cancelled closes its connection, upon which the server forgets the request. A stop string is seen here: the request is ended at the
server, and what it sampled after it is dropped.

Invariants:
1. Once `failure` is set it stays: everyone who waits gets EngineError, and so does every later call.
2. An answer that breaks off fails its caller alone while the server is healthy; a server that is not ends the engine.
3. Where the server does not tell the version of each token, no weights change while a request is at the server: a publication and
   a pause first wait for those that are there, and new ones wait for it.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from asyncrl.errors import EngineError
from asyncrl.ports import Decode, GenerateRequest, Generation, StopReason, WeightSnapshot, World
from asyncrl.rollout.openai.answers import Answer
from asyncrl.rollout.openai.control import HTTPControl
from asyncrl.rollout.openai.errors import ServerLostError, ServerMisfitError, ServerRefusedError
from asyncrl.rollout.openai.gate import Gate
from asyncrl.rollout.openai.http import Http, open_http
from asyncrl.rollout.openai.probe import HOW, Server, is_healthy, probe
from asyncrl.rollout.openai.routes import ABORT_PATH, DONE, abort_body, sampling_body
from asyncrl.rollout.openai.settings import ServerSettings
from asyncrl.rollout.publication.publisher import Publisher
from asyncrl.rollout.requests import check_request
from asyncrl.rollout.stopping import StopRules
from asyncrl.waiting import is_asked_to_end

T = TypeVar("T")

HEALTH_TIMEOUT_S = 10.0
"""A server that is busy with hundreds of streams still answers within a second."""
CLOSE_TIMEOUT_S = 10.0
"""Requests that were cancelled close their connections at once."""


class OpenAIEngine:
    """One server's engine, from its opening to its end.

    decode: ids -> text, needed for stop strings only. version: of the weights that the server has now. publisher: how it gets new
    ones, opened and closed here; None: its weights stay what they are.
    Opening raises ServerMisfitError for a server that cannot serve, and what the publisher's opening raises.
    """

    def __init__(
        self,
        server: ServerSettings,
        *,
        world: World,
        decode: Decode | None = None,
        version: int = 0,
        publisher: Publisher | None = None,
    ) -> None:
        self._settings = server
        self._world = world
        self._rules = StopRules(server.context_len, decode)
        self._version = version
        self._publisher = publisher
        self._exit = AsyncExitStack()
        self._slots = asyncio.Semaphore(server.max_num_seqs)
        self._gate = Gate()
        self._swaps = asyncio.Lock()
        self._is_paused = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._names = itertools.count()
        self._running = 0
        self._waiting = 0
        self._beats = 0
        self._counts: Counter[str] = Counter()
        self._failure: str | None = "the engine has not been started: use it with `async with`"
        self._http: Http
        self._server: Server
        self._control: HTTPControl

    @property
    def version(self) -> int:
        """Weight version that the next step samples from."""
        return self._version

    @property
    def context_len(self) -> int:
        return self._settings.context_len

    @property
    def beats(self) -> int:
        """Events of answers so far: the first token of each, and every 32nd one."""
        return self._beats

    @property
    def failure(self) -> str | None:
        return self._failure

    def stats(self) -> dict[str, float]:
        """Counters since the start, and how many requests are where now: `running` are at the server, `waiting` here.

        cut: answers that a stop string ended. lost: answers that broke off while the server was healthy.
        """
        counts = {name: float(self._counts[name]) for name in ("generated_tokens", "publications", "cancelled", "cut", "lost")}
        return counts | {
            "discarded": 0.0,
            "running": float(self._running),
            "waiting": float(self._waiting),
            "free_slots": float(self._settings.max_num_seqs - self._running),
            "version": float(self._version),
        }

    # --- requests

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample an answer; with max_tokens 0, an empty one.

        Raises PromptTooLongError when no new token fits, and EngineError for a request that cannot be served, an answer that breaks
        off, and when the engine dies or is closed. Cancelling ends the request at the server.
        """
        self._check_alive()
        vocab_size, has_decode = self._settings.vocab_size, self._rules.has_decode
        check_request(request, context_len=self.context_len, vocab_size=vocab_size, has_decode=has_decode)
        if request.sampling.max_tokens == 0:
            return Generation(token_ids=[], log_probs=[], version_spans=[], stop_reason=StopReason.LENGTH)
        return await self._until_the_end(self._in_turn(request))

    async def _in_turn(self, request: GenerateRequest) -> Generation:
        self._waiting += 1
        has_place = False
        try:
            async with self._slots, self._through_gate():
                has_place = True
                self._waiting -= 1
                self._running += 1
                return await self._answered(request)
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            raise
        finally:
            self._running -= has_place
            self._waiting -= not has_place

    def _through_gate(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext() if self._can_freeze else self._gate

    async def _answered(self, request: GenerateRequest) -> Generation:
        version = self._version
        rule = self._rules.rule(request.sampling, len(request.prompt_ids))
        answer = Answer(request, rule, vocab_size=self._settings.vocab_size)
        try:
            await self._read(request, answer)
        except (ServerLostError, ServerRefusedError) as error:
            if isinstance(error, ServerLostError) or error.status >= 500:
                await self._look_after(error)
            raise EngineError(f"request {request.request_id!r}: {error}") from error
        return answer.generation(version, tells_versions=self._tells_versions)

    async def _read(self, request: GenerateRequest, answer: Answer) -> None:
        route, sampling = self._server.route, request.sampling
        name = f"{request.request_id}-{next(self._names)}"
        budget = min(sampling.max_tokens, self.context_len - len(request.prompt_ids))
        params = sampling_body(sampling, seed=request.seed, budget=budget)
        body = route.body(request.prompt_ids, params, self._server.model, name)
        headers = {"X-Session-ID": request.session} if request.session else None
        has_cut = False
        limit_s = self._settings.control_timeout_s
        late = self._http.told(f"a request that was to end had not ended after {limit_s:g} s")
        async with _deadline(late) as deadline, self._http.stream(route.path, body, headers) as events:
            async for data in events:
                if data == DONE:
                    continue
                self._beats += 1
                self._counts["generated_tokens"] += answer.add(route.read(data))
                if answer.is_cut and not has_cut:
                    has_cut = True
                    self._counts["cut"] += 1
                    if not self._tells_versions:
                        return  # which closes the connection, and so ends the request
                    deadline.reschedule(asyncio.get_running_loop().time() + limit_s)
                    await self._http.call("POST", ABORT_PATH, abort_body(name), may_repeat=True)

    async def _look_after(self, error: EngineError) -> None:
        """Is it this answer alone, or the server? Returns when the server is healthy."""
        if not await is_healthy(self._http, timeout_s=HEALTH_TIMEOUT_S):
            self._end(f"the server is gone: {error}")
            raise EngineError(self._failure)
        self._counts["lost"] += 1

    # --- weights

    @property
    def _tells_versions(self) -> bool:
        return self._publisher is not None and self._server.tells_versions

    @property
    def _can_freeze(self) -> bool:
        """Can requests stay at the server while it is paused?"""
        return self._tells_versions

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        """Swap weights between two steps of the server; returns when swapped.

        Raises EngineError: with nothing changed for a version lower than the engine's, and for tensors that do not match the model;
        otherwise the engine has died of it. Cancelling it half way ends the engine, too.
        """
        self._check_alive()
        await self._until_the_end(self._swap(version, snapshot))

    async def _swap(self, version: int, snapshot: WeightSnapshot) -> None:
        async with self._swaps, self._drained():
            if version < self._version:
                raise EngineError(f"cannot publish version {version}: the engine already has version {self._version}")
            if self._publisher is None:
                raise EngineError(self._http.told("the engine was opened without a way to publish weights"))
            try:
                is_paused = self._is_paused and self._can_freeze
                await self._publisher.publish(self._control, version, snapshot.tensors, is_paused=is_paused)
            finally:
                if self._publisher.broken is not None:
                    self._end(self._publisher.broken)
            self._version = version
            self._counts["publications"] += 1

    @contextlib.asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """No request is at the server, where it cannot say which weights a token is of."""
        if self._can_freeze:
            yield
            return
        try:
            await self._gate.shut()
            yield
        finally:
            self._gate.open()

    async def pause(self) -> None:
        """No step starts until `resume`; returns when the one in flight is done. Weights may be published meanwhile."""
        self._check_alive()
        await self._until_the_end(self._set_paused(True))

    async def resume(self) -> None:
        self._check_alive()
        await self._until_the_end(self._set_paused(False))

    async def _set_paused(self, paused: bool) -> None:
        async with self._swaps:
            was_paused, self._is_paused = self._is_paused, paused
            if self._can_freeze:
                await self._tell(self._control.pause if paused else self._control.resume)
            elif paused and not was_paused:
                await self._gate.shut()
            elif was_paused and not paused:
                self._gate.open()

    async def _tell(self, command: Callable[[], Awaitable[None]]) -> None:
        """A command whose answer is lost may have been obeyed or not: that server is of no use."""
        try:
            await command()
        except ServerLostError as error:
            self._end(f"the server is gone: {error}")
            raise

    # --- life

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._http = await stack.enter_async_context(open_http(self._settings, world=self._world))
            self._control = HTTPControl(self._http)
            if self._publisher is not None:
                stack.push_async_callback(self._publisher.close)
            self._server = await probe(self._http, self._settings, control=self._control if self._publisher else None)
            if self._publisher is not None:
                await self._open(self._publisher)
            self._exit = stack.pop_all()
        self._failure = None
        return self

    async def _open(self, publisher: Publisher) -> None:
        try:
            await publisher.open(self._control, self._version)
        except EngineError as error:
            raise ServerMisfitError(self._http.told(f"{error}; {HOW}")) from error

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close all connections; requests still open get EngineError."""
        self._end("the engine was closed")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        await self._exit.aclose()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)

    def _end(self, reason: str) -> None:
        """The first reason stands. Whoever found it out goes on by itself."""
        if self._failure is None:
            self._failure = reason
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _until_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, or EngineError when the engine ends before."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._failure is None or is_asked_to_end():
                raise
            raise EngineError(self._failure) from None
        finally:
            self._tasks.discard(task)


@contextlib.asynccontextmanager
async def _deadline(late: str) -> AsyncIterator[asyncio.Timeout]:
    """One that is set later, if at all. Raises ServerLostError."""
    try:
        async with asyncio.timeout(None) as deadline:
            yield deadline
    except TimeoutError:
        raise ServerLostError(late, has_begun=True) from None
