"""Processes that run simulations, and notice what a run does to its process.

hunt, shrink -> [Crew] -> run_task, in worker processes -> reports, in the order of the tasks

A worker runs one task at a time, so the seed of a run that kills its process, or never ends, is known. Invariants:
1. Reports come in the order of the tasks, and are the same for any number of workers.
2. A run that takes longer than `limit_s` ends with its process (SIGALRM), and a stack of where it was.
3. Nobody outlives the crew: its workers are killed when it is closed, and end by themselves when this process does.
"""

import contextlib
import faulthandler
import itertools
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import torch

from asyncrl.simulation.hunt_runs import Finding, RunReport, RunTask, run_task

DIED = "ProcessDied"
"""Kind of a finding: the run ended its process."""
TOO_LONG = "TooLong"
"""Kind of a finding: the run took more real time than it may."""
AHEAD = 256
"""Tasks that may be begun before the oldest one has ended: what waits for its turn stays small."""
START_S = 60.0
"""Seconds that a worker gets to start, on a machine that is busy."""
GRACE_S = 5.0
"""Seconds after its limit that a worker gets to write its stack and end."""


class Crew:
    """`num_workers` processes; 0: this process runs everything, without a limit. A context manager."""

    def __init__(self, num_workers: int, *, limit_s: float = 60.0) -> None:
        self._num_workers = num_workers
        self._limit_s = limit_s
        self._workers: list[_Worker] = []
        self._stack_numbers = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="asyncrl-hunt-")
        # A server that has imported everything and has no threads: a fork of it costs milliseconds, and is safe.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def reports(self, tasks: Iterable[RunTask]) -> Generator[RunReport, None, None]:
        """One report a task, in order. Who closes it early may ask for other tasks next."""
        return self._here(tasks) if self._num_workers == 0 else self._in_order(iter(tasks))

    def _here(self, tasks: Iterable[RunTask]) -> Generator[RunReport, None, None]:
        for task in tasks:
            yield run_task(task)

    def _in_order(self, tasks: Iterator[RunTask]) -> Generator[RunReport, None, None]:
        begun = due = 0
        has_more = True
        found: dict[int, RunReport] = {}
        try:
            while has_more or due < begun:
                while has_more and begun - due < AHEAD and (worker := self._idle()) is not None:
                    task = next(tasks, None)
                    if task is None:
                        has_more = False
                    else:
                        worker.give(begun, task)
                        begun += 1
                if due in found:
                    yield found.pop(due)
                    due += 1
                elif due < begun or has_more:
                    found.update(self._await_some())
        finally:
            for worker in self._workers:
                worker.number = None  # what it is still at, nobody asks for any more

    def _idle(self) -> "_Worker | None":
        for worker in self._workers:
            if worker.task is None:
                return worker
        if len(self._workers) == self._num_workers:
            return None
        stack = Path(self._folder.name, f"stack-{next(self._stack_numbers)}")
        self._workers.append(_Worker(self._context, stack, self._limit_s))
        return self._workers[-1]

    def _await_some(self) -> Iterator[tuple[int, RunReport]]:
        """Wait until at least one worker has something to tell: a report, or its end."""
        busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
        latest = min(worker.must_end_by for worker in busy.values())
        for connection in wait(list(busy), timeout=max(0.0, latest - time.monotonic())):
            yield from self._collect(busy.pop(cast(Connection, connection)))
        for worker in busy.values():
            if time.monotonic() > worker.must_end_by:
                worker.kill()  # its connection ends, and the next turn finds it

    def _collect(self, worker: "_Worker") -> Iterator[tuple[int, RunReport]]:
        number = worker.number
        report = worker.collect()
        if worker.is_dead:
            self._workers.remove(worker)
        if number is not None:
            yield number, report

    def close(self) -> None:
        """Kill the workers: what they are at, nobody asks for any more."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Worker:
    """`task`: what it runs now; `number`: as what its report is asked for, None when nobody asks any more."""

    def __init__(self, context: ForkServerContext, stack: Path, limit_s: float) -> None:
        self.connection, theirs = context.Pipe()
        self.task: RunTask | None = None
        self.number: int | None = None
        self.is_dead = False
        self.must_end_by = 0.0
        self._limit_s = limit_s
        self._stack = stack
        self._process = context.Process(target=work, args=(theirs, str(stack), limit_s), name="hunt", daemon=True)
        self._process.start()
        theirs.close()

    def give(self, number: int, task: RunTask) -> None:
        self.number, self.task = number, task
        self.must_end_by = time.monotonic() + START_S + self._limit_s + GRACE_S
        with contextlib.suppress(BrokenPipeError):  # it has died while it was idle: `collect` will say so
            self.connection.send(task)

    def collect(self) -> RunReport:
        """Its report, which has come, or one that tells of its end."""
        assert self.task is not None
        task, self.task, self.number = self.task, None, None
        try:
            report: RunReport = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.kill()
            return RunReport(seed=task.seed, finding=self._end_of(task))
        return report

    def _end_of(self, task: RunTask) -> Finding:
        stack = self._stack.read_text(encoding="utf-8", errors="replace") if self._stack.exists() else ""
        code = self._process.exitcode
        if code == -signal.SIGALRM or time.monotonic() > self.must_end_by:
            return Finding(seed=task.seed, kind=TOO_LONG, message=f"the run took more than {self._limit_s:g} s", trace=stack)
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        return Finding(seed=task.seed, kind=DIED, message=f"the run ended its process: {how}", trace=stack)

    def kill(self) -> None:
        self.is_dead = True
        self._process.kill()
        self._process.join()
        self.connection.close()


def work(connection: Connection, stack: str, limit_s: float) -> None:
    """The life of a worker: one task after the other, until nobody asks. Ctrl-C is for who asks, not for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with open(stack, "w", encoding="utf-8") as file, contextlib.suppress(EOFError):
        faulthandler.enable(file)
        # Not `dump_traceback_later`: its thread reads the frames of one that runs on, and now and then dies of it.
        faulthandler.register(signal.SIGALRM, file=file, all_threads=False, chain=True)
        while True:
            task: RunTask = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            report = run_task(task)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(report)
