"""The processes of one vLLM: which they are, how one ended, and a call at the moment when the first of them does.

vLLM notices by itself that one is gone and fails its requests, but says neither which nor how.
"""

import asyncio
import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ZOMBIE = "Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One of them, by the name that vLLM gives it."""

    name: str
    pid: int
    exit_code: Callable[[], int | None] = lambda: None
    """Of a child of ours, once it is known."""

    def ended(self) -> str:
        """`EngineCore (pid 17) was killed by SIGKILL`; of a child of theirs it is known for a moment only. Reads a file."""
        code = _zombie_code(self.pid)
        if code is None:
            code = self.exit_code()
        if code is None:
            how = "has ended"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} (pid {self.pid}) {how}"


def _zombie_code(pid: int) -> int | None:
    """As long as its parent has not taken note of its end."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == ZOMBIE else None


def children(pid: int, thread: int | None = None) -> list[int]:
    """Children of a process, or of one of its threads; nothing on a system that does not say."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob(f"{thread or '*'}/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, path.read_text().split())
    return sorted(found)


@contextlib.contextmanager
def outlived_by_none(processes: Iterable[Process]) -> Iterator[None]:
    """Those that have not ended with the block are killed: one that is stopped hears nobody, and outlives even its parent."""
    fds: list[int] = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError, AttributeError):  # it has ended; not on Linux
            fds.append(os.pidfd_open(process.pid))
    try:
        yield
    finally:
        for fd in fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)


class Offspring:
    """Processes that the thread of the block starts in it. Not those that it had before: another engine's, Python's own helper.

    Any thread may ask, during the block and after it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._others: frozenset[int] = frozenset()
        self._pids: list[int] = []

    def __enter__(self) -> Self:
        with self._lock:
            self._thread = threading.get_native_id()
            self._others = frozenset(children(os.getpid(), self._thread))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.pids()
        with self._lock:
            self._thread = None

    def pids(self) -> list[int]:
        """Those that live; after the block, those that lived at its end."""
        with self._lock:
            if self._thread is not None:
                self._pids = [pid for pid in children(os.getpid(), self._thread) if pid not in self._others]
            return self._pids

    def kill(self) -> None:
        """With their own children: one that is stopped cannot notice. None has to be there any more."""
        for pid in [each for child in self.pids() for each in (*children(child), child)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Watch:
    """Calls `on_end(words)` on the running loop, once for each of the processes, when it ends. Linux; elsewhere never.

    A thread waits and reads: it sees a process's end before its parent has taken note, when it is still known how it ended.
    """

    def __init__(self, processes: Iterable[Process], on_end: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._is_closed = False
        self._fds: dict[int, Process] = {}
        if not hasattr(os, "pidfd_open"):
            return
        for process in processes:
            try:
                self._fds[os.pidfd_open(process.pid)] = process
            except ProcessLookupError:
                self._loop.call_soon(self._tell, process.ended())
        self._wake = os.eventfd(0)
        threading.Thread(target=self._run, name="asyncrl-watch", daemon=True).start()

    def kill(self) -> None:
        """All that have not ended."""
        for fd in self._fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def close(self) -> None:
        """No call after this one."""
        self._is_closed = True
        if hasattr(self, "_wake"):
            os.eventfd_write(self._wake, 1)

    def _tell(self, words: str) -> None:
        if not self._is_closed:
            self._on_end(words)

    def _run(self) -> None:
        """The thread. It closes what it waits on, as nobody else may do that under its feet."""
        poll = select.poll()
        for fd in (*self._fds, self._wake):
            poll.register(fd, select.POLLIN)
        is_over = False
        while not is_over:
            for fd, _ in poll.poll():
                poll.unregister(fd)
                if fd == self._wake:
                    is_over = True
                    continue
                with contextlib.suppress(RuntimeError):  # a loop that is closed has nobody left to tell
                    self._loop.call_soon_threadsafe(self._tell, self._fds[fd].ended())
        for fd in (*self._fds, self._wake):
            os.close(fd)
