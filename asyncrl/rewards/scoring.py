"""The scorer of a run: checks the reward function, starts what it needs, and scores sessions until it is closed.

session -> [Scorer.score -> manager -> a worker process, the loop for `async def`, or the judge] -> RewardResult, or RewardError or
DeadlineError.
Controller code: it waits on the loop and takes blocking work from the World; processes are the worker modules' business.
"""

import importlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import IO, Any

from asyncrl.config import RewardConfig
from asyncrl.errors import DeadlineError, RewardError, RewardSpecError, RunFolderError
from asyncrl.ports import Json, RewardRequest, RewardResult, RewardScorer, World
from asyncrl.rewards import frames
from asyncrl.rewards.judge import Endpoint, Judge
from asyncrl.rewards.judge_prompt import load_prompt
from asyncrl.rewards.limits import Limits
from asyncrl.rewards.managers import CallFunction, manager_of
from asyncrl.rewards.on_loop import LoopFunction
from asyncrl.rewards.spec import check_name, load_beside
from asyncrl.rewards.worker_pool import START_TIMEOUT_S, WorkerPool


class Scorer:
    """A RewardScorer that counts. Made by `open_scorer`. call_stats: numbers of what is behind it."""

    def __init__(self, manager: RewardScorer, call_stats: Callable[[], dict[str, float]] = dict) -> None:
        self._manager = manager
        self._call_stats = call_stats
        self._counts = {"scored": 0, "failed": 0, "timed_out": 0}

    async def score(self, request: RewardRequest) -> RewardResult:
        """Raises RewardError or DeadlineError; never invents a number. Cancelling it leaves no worker behind."""
        try:
            result = await self._manager.score(request)
        except DeadlineError:
            self._counts["timed_out"] += 1
            raise
        except RewardError:
            self._counts["failed"] += 1
            raise
        self._counts["scored"] += 1
        return result

    def stats(self) -> dict[str, float]:
        """`scored`, `failed`, `timed_out`; of the pool `calls`, `waiting`, `workers`, `workers_started`, `workers_ended`; of limits
        `queued`, `running`, `queue_timeouts`; of the judge `calls`, `attempts`."""
        return {name: float(count) for name, count in self._counts.items()} | self._call_stats()


Opened = tuple[str, CallFunction, Callable[[], dict[str, float]]]
"""What is called, by its name in messages, and its numbers."""


@asynccontextmanager
async def open_scorer(
    config: RewardConfig,
    *,
    world: World,
    log: Path | None = None,
    max_response_length: int = 0,
    components: Sequence[str] = (),
) -> AsyncIterator[Scorer]:
    """Open the scorer of a run; leaving the block ends its processes and connections.

    log: file to which the output of the function is appended; None: it goes to this process's stderr. max_response_length:
    `data.max_response_length`, for `dapo`. components: `algorithm.gdpo_reward_keys`, for `gdpo`.
    Raises RewardSpecError, one line, when the function does not exist, does not import or cannot be called, or when the judge lacks
    something; the judge itself is not asked. Raises RunFolderError when the log cannot be written.
    """
    opened = _open_judge(config, world) if config.manager == "judge" else _open_function(config, world, log)
    async with opened as (name, call, stats):
        yield Scorer(manager_of(config, name, call, max_response_length=max_response_length, components=components), stats)


@asynccontextmanager
async def _open_function(config: RewardConfig, world: World, log: Path | None) -> AsyncIterator[Opened]:
    check_name(config.function)
    folder, output = await world.offload(_surroundings, log)
    pool = WorkerPool(config.function, num_workers=config.num_workers, timeout_s=config.timeout_s, folder=folder, log=output)
    try:
        if is_async := await pool.open():
            await pool.close()
            function = await world.offload(load_beside, config.function, folder, timeout_s=START_TIMEOUT_S)
            call: CallFunction = LoopFunction(config.function, function, timeout_s=config.timeout_s)
        else:
            await pool.fill()
            call = _through(pool, config.function)
        if config.manager != "rate_limited":
            yield config.function, call, pool.stats
        else:
            # A call that began must not wait for a worker: many that waited would begin within one minute.
            limits = Limits(config.limits, places=0 if is_async else config.num_workers)
            yield config.function, _limited(call, limits), lambda: pool.stats() | limits.stats()
    finally:
        await pool.close()
        if output:
            output.close()


def _limited(call: CallFunction, limits: Limits) -> CallFunction:
    async def wait_and_call(request: RewardRequest) -> Json:
        async with limits.place():
            return await call(request)

    return wait_and_call


@asynccontextmanager
async def _open_judge(config: RewardConfig, world: World) -> AsyncIterator[Opened]:
    prompt = await world.offload(load_prompt, config.judge.prompt, timeout_s=START_TIMEOUT_S)
    endpoints = await world.offload(_endpoint_module, timeout_s=START_TIMEOUT_S)
    opened: AbstractAsyncContextManager[Endpoint] = endpoints.open_endpoint(config.judge, world=world)
    async with opened as endpoint:
        judge = Judge(endpoint, prompt, Limits(config.limits), config, world)
        yield f"judge {config.judge.model}", judge, judge.stats


def _endpoint_module() -> Any:
    """The module with the HTTP client, which no other run loads, nor needs installed."""
    try:
        return importlib.import_module("asyncrl.rewards.judge_endpoint")
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise RewardSpecError(
            "reward.manager = \"judge\" needs aiohttp, which is not installed: pip install 'asyncrl[judge]'"
        ) from error


def _through(pool: WorkerPool, name: str) -> CallFunction:
    async def call(request: RewardRequest) -> Json:
        try:
            frame = frames.encode([request.data_source, request.solution_str, request.ground_truth, request.extra_info])
        except frames.FrameError as error:
            raise RewardError(f"the row cannot be given to reward function {name!r}: {error}") from error
        reply = await pool.call(frame)
        if "error" in reply:
            raise RewardError(f"reward function {name!r} {reply['error']}")
        return reply["value"]

    return call


def _surroundings(log: Path | None) -> tuple[str, IO[bytes] | None]:
    """The working directory, and the open log."""
    try:
        return os.getcwd(), log.open("ab") if log else None
    except OSError as error:
        raise RunFolderError(f"{log} cannot be written: {error.strerror}; the folder of a run must stay writable") from error


async def check_function(
    config: RewardConfig, *, world: World, max_response_length: int = 0, components: Sequence[str] = ()
) -> None:
    """Raise RewardSpecError when sessions cannot be scored. The function is imported in a process of its own; nothing is scored,
    and no judge is asked."""
    alone = config.model_copy(update={"num_workers": 1})
    async with open_scorer(alone, world=world, max_response_length=max_response_length, components=components):
        pass
