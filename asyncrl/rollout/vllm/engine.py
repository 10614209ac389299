"""VLLMEngine: a RolloutEngine over a vLLM of its own, in processes beside this one.

session -> [generate] -> AsyncLLM -> EngineCore -> workers; trainer -> [publish] -> Publisher -> workers

Waits: `generate` takes as long as its request, so the caller looks at `beats`; opening, `publish`, `pause` and `resume` have their
caller's deadline. Once one of the processes has ended, or weights are half loaded, the engine is dead for good, and `failure` says
why: everyone who waits gets EngineError at once, whatever vLLM itself has noticed by then. Where vLLM is first to notice, they wait
DEATH_NEWS_S at most for the end of a process, as only that one says which and how.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Self

from asyncrl.config.rollout import COLDEST
from asyncrl.errors import DeadlineError, EngineError
from asyncrl.ports import Decode, GenerateRequest, Generation, StopReason, WeightSnapshot, World
from asyncrl.rollout.publication.publisher import Publisher
from asyncrl.rollout.requests import check_request
from asyncrl.rollout.stopping import StopRules
from asyncrl.rollout.vllm.answers import Answer, Call, Part
from asyncrl.rollout.vllm.client import Client, Opener
from asyncrl.rollout.vllm.launch import launch
from asyncrl.rollout.vllm.meter import Meter
from asyncrl.rollout.vllm.processes import Watch
from asyncrl.rollout.vllm.settings import VLLMSettings
from asyncrl.rollout.vllm.waiters import Waiters

log = logging.getLogger(__name__)

DEATH_NEWS_S = 5.0
"""A process that has failed has ended by then; one that was killed, within milliseconds."""


class VLLMEngine:
    """A RolloutEngine. The vLLM is started when its context is entered, and ended when it is left.

    publisher: of this engine alone. version: of the weights in settings.model. decode: ids -> text, needed for stop strings only.
    opener: starts the vLLM.
    """

    def __init__(
        self,
        settings: VLLMSettings,
        *,
        world: World,
        publisher: Publisher,
        decode: Decode | None = None,
        version: int = 0,
        opener: Opener = launch,
    ) -> None:
        self._settings = settings
        self._world = world
        self._publisher = publisher
        self._opener = opener
        self._version = version
        self._rules = StopRules(settings.context_len, decode)
        self._tickets = itertools.count()
        self._controlling = asyncio.Lock()
        self._is_paused = False
        self._publications = 0
        self._cancelled = 0
        self._num_in_flight = 0
        self._waiters = Waiters()
        self._client: Client | None = None
        self._meter = Meter()
        self._watch: Watch | None = None

    @property
    def version(self) -> int:
        """Weight version that the next decode step samples from."""
        return self._version

    @property
    def context_len(self) -> int:
        return self._settings.context_len

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it serves, and before it is opened."""
        return self._waiters.failure

    @property
    def beats(self) -> int:
        """Steps whose tokens have arrived here."""
        return self._meter.beats

    # --- requests ----------------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample an answer; with max_tokens 0, an empty one. Cancelling aborts the request.

        A greedy row's log-probs are those of the unfiltered softmax at temperature 1.

        Raises PromptTooLongError when no new token fits, and EngineError for a request that cannot be served and when the engine
        dies or is closed.
        """
        client = self._opened()
        check_request(request, context_len=self.context_len, vocab_size=client.vocab_size, has_decode=self._rules.has_decode)
        if 0 < request.sampling.temperature < COLDEST:
            raise EngineError(
                f"request {request.request_id!r}: temperature {request.sampling.temperature} is too low for vLLM, which samples at "
                f"{COLDEST} then; take 0 for greedy"
            )
        if request.sampling.max_tokens == 0:
            return Generation(token_ids=[], log_probs=[], version_spans=[], stop_reason=StopReason.LENGTH)
        self._num_in_flight += 1
        try:
            async with self._waiting(client):
                return await self._sample(client, request)
        except asyncio.CancelledError:
            self._cancelled += 1
            raise
        finally:
            self._num_in_flight -= 1

    async def _sample(self, client: Client, request: GenerateRequest) -> Generation:
        num_prompt = len(request.prompt_ids)
        call = Call(
            request_id=f"{next(self._tickets)}-{request.request_id}",
            request=request,
            max_tokens=min(request.sampling.max_tokens, self.context_len - num_prompt),
            seed=request.seed & (2**63 - 1),
        )
        answer = Answer(request, self._rules.rule(request.sampling, num_prompt), is_streamed=call.has_strings)
        part = Part(token_ids=(), log_probs=())
        is_aborted = False
        async with aclosing(client.parts(call)) as parts:
            async for part in parts:
                answer.take(part)
                if part.finish is None and answer.reason is not None and not is_aborted:
                    is_aborted = True
                    await client.abort(call)
        return answer.generation(part)

    # --- control -----------------------------------------------------------------------------------------------------------------

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        """Swap weights between two decode steps; returns when swapped. Running rows go on with their cache recomputed.

        Raises EngineError, with nothing changed, for a version lower than the engine's and for tensors that do not match the model.
        A swap that fails, or is cancelled half way, is the engine's death.
        """
        client = self._opened()
        try:
            async with self._waiting(client), self._controlling:
                await self._swap(client, version, snapshot)
        finally:
            if self._publisher.broken is not None:
                self._waiters.fail(self._publisher.broken)

    async def _swap(self, client: Client, version: int, snapshot: WeightSnapshot) -> None:
        if version < self._version:
            raise EngineError(f"version {version} cannot be published: the engine has version {self._version} already")
        await self._publisher.publish(client.control, version, snapshot.tensors, is_paused=self._is_paused)
        self._version = version
        self._publications += 1

    async def pause(self) -> None:
        """No step starts until `resume`; returns when the one in flight is done. Weights may be published meanwhile."""
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, is_paused: bool) -> None:
        client = self._opened()
        async with self._waiting(client), self._controlling:
            await (client.control.pause() if is_paused else client.control.resume())
            self._is_paused = is_paused

    def stats(self) -> dict[str, float]:
        """Counters since the start, and how many requests are where now.

        `running` and `waiting` are counted here: vLLM may let requests wait for lack of blocks while slots are free.
        prompt_tokens, and of them cached_prompt_tokens; preemptions: requests computed anew, publications included;
        kv_cache_usage: share of the blocks in use at the last step.
        """
        running = min(self._num_in_flight, self._settings.max_num_seqs)
        stats: dict[str, float] = {
            "publications": self._publications,
            "cancelled": self._cancelled,
            "discarded": 0,
            "running": running,
            "waiting": self._num_in_flight - running,
            "free_slots": self._settings.max_num_seqs - running,
            "version": self._version,
        }
        return {**self._meter.stats(), **stats}

    # --- life --------------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Raises ConfigError, ModelError or EngineError when vLLM does not start; then nothing is left of it."""
        self._client = client = await self._opener(self._settings, self._world)
        self._meter = client.meter
        self._watch = Watch(client.processes, self._die_of)
        try:
            async with self._waiting(client):
                await self._publisher.open(client.control, self._version)
        except BaseException:
            await self._close("the engine could not be opened")
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the processes; requests still open get EngineError."""
        await self._close("the engine was closed")

    async def _close(self, why: str) -> None:
        assert self._client is not None
        assert self._watch is not None
        self._waiters.fail(why)
        try:
            await self._client.close()
        except DeadlineError as error:
            log.error("vLLM's processes are killed: %s", error)
            self._watch.kill()
        finally:
            self._client = None  # what vLLM has left in this process goes with it
            self._watch.close()
            await self._publisher.close()

    def _opened(self) -> Client:
        self._waiters.check()
        if self._client is None:
            raise EngineError("the engine has not been started: use it with `async with`")
        return self._client

    def _die_of(self, end: str) -> None:
        self._waiters.fail(f"the engine is dead: {end}")

    @asynccontextmanager
    async def _waiting(self, client: Client) -> AsyncIterator[None]:
        """The block of a call. Its EngineError, in a death, is the one with the reason of it."""
        try:
            with self._waiters.waiting():
                yield
        except EngineError:
            if client.is_dead:
                await self._waiters.failed(DEATH_NEWS_S)
                self._waiters.fail("the engine is dead: vLLM's EngineCore has failed, and has printed why")
            self._waiters.check()
            raise
