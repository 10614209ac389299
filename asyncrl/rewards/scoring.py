"""The scorer of a run: checks the reward function, starts what it needs, and scores sessions until it is closed.

session -> [Scorer.score -> manager -> worker process, or the loop for `async def`] -> RewardResult | RewardError | DeadlineError.
Controller code: it waits on the loop and takes blocking work from the World; processes are the worker modules' business.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from asyncrl.config import RewardConfig
from asyncrl.errors import DeadlineError, RewardError, RunFolderError
from asyncrl.ports import Json, RewardRequest, RewardResult, RewardScorer, World
from asyncrl.rewards import frames
from asyncrl.rewards.managers import MANAGERS, CallFunction
from asyncrl.rewards.on_loop import LoopFunction
from asyncrl.rewards.spec import check_name, load_beside
from asyncrl.rewards.worker_pool import START_TIMEOUT_S, WorkerPool


class Scorer:
    """A RewardScorer that counts. Made by `open_scorer`. pool_stats: numbers of the processes behind it."""

    def __init__(self, manager: RewardScorer, pool_stats: Callable[[], dict[str, float]] = dict) -> None:
        self._manager = manager
        self._pool_stats = pool_stats
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
        """`scored`, `failed`, `timed_out`, and of the pool `calls`, `waiting`, `workers`, `workers_started`, `workers_ended`."""
        return {name: float(count) for name, count in self._counts.items()} | self._pool_stats()


@asynccontextmanager
async def open_scorer(config: RewardConfig, *, world: World, log: Path | None = None) -> AsyncIterator[Scorer]:
    """Open the scorer of a run; leaving the block ends its processes.

    log: file to which the output of the function is appended; None: it goes to this process's stderr.
    Raises RewardSpecError, one line, when the function does not exist, does not import or cannot be called, RunFolderError when the
    log cannot be written.
    """
    check_name(config.function)
    folder, output = await world.offload(_surroundings, log)
    pool = WorkerPool(config.function, num_workers=config.num_workers, timeout_s=config.timeout_s, folder=folder, log=output)
    try:
        if await pool.open():
            await pool.close()
            function = await world.offload(load_beside, config.function, folder, timeout_s=START_TIMEOUT_S)
            call: CallFunction = LoopFunction(config.function, function, timeout_s=config.timeout_s)
        else:
            await pool.fill()
            call = _through(pool, config.function)
        yield Scorer(MANAGERS[config.manager](config.function, call), pool.stats)
    finally:
        await pool.close()
        if output:
            output.close()


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


async def check_function(config: RewardConfig, *, world: World) -> None:
    """Raise RewardSpecError when the reward function cannot be used. It is imported in a process of its own; nothing is scored."""
    async with open_scorer(config.model_copy(update={"num_workers": 1}), world=world):
        pass
