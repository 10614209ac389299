"""A few warm worker processes behind a first-come queue, with a deadline on each call.

A place is held for one call; its worker goes back to the idle ones only when it has answered. Deadline, cancellation, death and
nonsense are therefore one case: the worker is killed, and the next call that finds no idle worker starts another.
"""

import asyncio
from typing import IO

from asyncrl.errors import RewardError, RewardSpecError
from asyncrl.ports import Json
from asyncrl.rewards.worker_process import WorkerProcess, start
from asyncrl.waiting import within

START_TIMEOUT_S = 120.0
"""Deadline of starting a worker and importing the user's module: one that imports torch takes 2-4 s, one that loads a model
longer."""
CLOSE_TIMEOUT_S = 2.0
"""Idle workers get this long to end by themselves (exit handlers of the user's module) before they are killed."""


class WorkerPool:
    """Runs one reward function in up to `num_workers` processes.

    The queue is as long as callers wait: each waits for its own call, so sessions in flight bound it. Whoever waits in it is
    not under `timeout_s` (another session's hang must not cost this one its time) but under its session's own deadline."""

    def __init__(self, function: str, *, num_workers: int, timeout_s: float, folder: str, log: IO[bytes] | None = None) -> None:
        self._function = function
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._folder = folder
        self._log = log
        self._places = asyncio.Semaphore(num_workers)
        self._idle: list[WorkerProcess] = []
        self._alive: set[WorkerProcess] = set()
        self._is_closed = False
        self._counts = {"workers_started": 0, "workers_ended": 0, "calls": 0, "waiting": 0}

    async def open(self) -> bool:
        """Start one worker, which proves that the function imports. True when it is async: then it does not belong here.

        Raises RewardSpecError for a function that cannot be used."""
        worker, is_async = await self._start()
        self._give_back(worker)
        return is_async

    async def fill(self) -> None:
        """Start the other workers, all at once."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._num_workers - 1):
                    tasks.create_task(self._start_idle())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group

    async def call(self, frame: bytes) -> Json:
        """The function's reply to a request frame. Raises DeadlineError or RewardError; the queue goes on."""
        self._counts["waiting"] += 1
        try:
            await self._places.acquire()
        finally:
            self._counts["waiting"] -= 1
        try:
            return await self._call(frame)
        finally:
            self._places.release()

    async def _call(self, frame: bytes) -> Json:
        worker = await self._take()
        self._counts["calls"] += 1
        try:
            async with within(self._timeout_s, self._late):
                reply = await worker.exchange(frame)
        except RewardError as error:
            raise RewardError(f"reward function {self._function!r}: {self._closing_or(error)}") from error
        finally:
            self._give_back(worker)
        return reply

    def _late(self) -> str:
        return f"reward function {self._function!r} took longer than reward.timeout_s = {self._timeout_s:g}; its worker was killed"

    def _closing_or(self, error: RewardError) -> str:
        return "the scorer was closed" if self._is_closed else str(error)

    async def _take(self) -> WorkerProcess:
        while self._idle:
            if (worker := self._idle.pop()).is_idle:  # it may have died since its last call
                return worker
        if self._is_closed:
            raise RewardError(f"reward function {self._function!r}: the scorer was closed")
        try:
            worker, _ = await self._start()
        except RewardSpecError as error:  # it did import when the scorer was opened: no mistake of the configuration any more
            raise RewardError(f"no new reward worker could be started: {error}") from error
        return worker

    def _give_back(self, worker: WorkerProcess) -> None:
        if worker.is_idle and not self._is_closed:
            self._idle.append(worker)
        else:
            self._kill(worker)

    def _kill(self, worker: WorkerProcess) -> None:
        self._counts["workers_ended"] += 1
        worker.kill()

    async def _start_idle(self) -> None:
        worker, _ = await self._start()
        self._give_back(worker)

    async def _start(self) -> tuple[WorkerProcess, bool]:
        """A worker that has said hello, and whether the function is async."""
        worker = WorkerProcess()
        self._alive.add(worker)  # before it exists, so that a close in the meantime ends it as well
        worker.ended.add_done_callback(lambda _: self._alive.discard(worker))
        try:
            hello = await self._hello(worker)
        finally:
            if not worker.is_idle:
                self._kill(worker)
        if "refused" in hello:
            self._kill(worker)
            raise RewardSpecError(hello["refused"])
        return worker, hello["is_async"]

    async def _hello(self, worker: WorkerProcess) -> Json:
        try:
            await start(worker, self._function, folder=self._folder, log=self._log)
        except OSError as error:
            self._alive.discard(worker)
            raise self._not_importable(f"no process could be started: {error}") from error
        except asyncio.CancelledError:
            self._alive.discard(worker)  # asyncio has ended the process
            raise
        self._counts["workers_started"] += 1
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await worker.hello()
        except TimeoutError as error:
            raise self._not_importable(f"importing took longer than {START_TIMEOUT_S:g} s") from error
        except RewardError as error:
            raise self._not_importable(f"while importing, {self._closing_or(error)}") from error

    def _not_importable(self, reason: str) -> RewardSpecError:
        return RewardSpecError(f"reward.function = {self._function!r}: {reason}")

    async def close(self) -> None:
        """End all workers and wait until they are reaped. Calls in flight fail with RewardError. Twice is once."""
        self._is_closed = True
        idle = {worker for worker in self._idle if worker.is_idle}
        self._idle.clear()
        for worker in self._alive:
            worker.hang_up() if worker in idle else worker.kill()
        try:
            await self._wait_for_ends(CLOSE_TIMEOUT_S)
        finally:  # cancelled, too: nothing of ours stays behind
            for worker in self._alive:
                worker.kill()
        await self._wait_for_ends(CLOSE_TIMEOUT_S)

    async def _wait_for_ends(self, timeout_s: float) -> None:
        if self._alive:
            await asyncio.wait([worker.ended for worker in self._alive], timeout=timeout_s)

    def stats(self) -> dict[str, float]:
        """Counters, and how many calls wait and workers live now."""
        return {name: float(count) for name, count in self._counts.items()} | {"workers": float(len(self._alive))}
