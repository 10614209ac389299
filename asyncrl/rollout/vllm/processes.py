"""The processes of one vLLM: which they are, how one ended, and a call at the moment when the first of them does.

vLLM notices by itself that one is gone and fails its requests, but says neither which nor how.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ZOMBIE = "Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One of them, by the name that vLLM gives it."""

    name: str
    pid: int
    exit_code: Callable[[], int | None] = lambda: None
    """Of a child of ours, once it is known."""

    def ended(self) -> str:
        """`EngineCore (pid 17) was killed by SIGKILL`; of a child of theirs how it ended is known for a moment only."""
        code = _zombie_code(self.pid)
        if code is None:
            code = self.exit_code()
        if code is None:
            how = "has ended"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} (pid {self.pid}) {how}"


def _zombie_code(pid: int) -> int | None:
    """As long as its parent has not taken note of its end. Reads a file that is none: it blocks nobody."""
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


class Watch:
    """Calls `on_end(process)` on the running loop for each of the processes that ends, at once. Linux; elsewhere never."""

    def __init__(self, processes: Iterable[Process], on_end: Callable[[Process], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._fds: dict[int, Process] = {}
        for process in processes:
            self._add(process)

    def _add(self, process: Process) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._loop.call_soon(self._on_end, process)
            return
        self._fds[fd] = process
        self._loop.add_reader(fd, self._see, fd)

    def _see(self, fd: int) -> None:
        process = self._fds.pop(fd)
        self._loop.remove_reader(fd)
        os.close(fd)
        self._on_end(process)

    def kill(self) -> None:
        """All that have not ended."""
        for fd in self._fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def close(self) -> None:
        """No call after this one."""
        for fd in self._fds:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()
