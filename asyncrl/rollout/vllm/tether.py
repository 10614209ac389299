"""Tether: processes that belong to a run end with it, also when it is killed.

vLLM's EngineCore waits for ever once the process that started it is gone. A Tether travels to it and to its workers among the
arguments of vLLM (`additional_config`), and acts where it arrives: unpickling it starts a thread that waits for the owner's end,
and lets an end that is asked for be short. Linux only; elsewhere nothing is watched.
"""

import atexit
import functools
import gc
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

NAME = "asyncrl"


class Tether(str):
    """A text, since vLLM writes its configuration as JSON: always the same one, so that it finds what it has compiled before.

    owner: pid and start time of the process that everything ends with; None: this one.
    """

    owner: tuple[int, int]

    def __new__(cls, owner: tuple[int, int] | None = None) -> "Tether":
        self = super().__new__(cls, NAME)
        self.owner = owner or (os.getpid(), start_time(os.getpid()))
        return self

    def __reduce__(self) -> tuple[Callable[[tuple[int, int]], "Tether"], tuple[tuple[int, int]]]:
        return _arrive, (self.owner,)


def _arrive(owner: tuple[int, int]) -> Tether:
    if owner[0] != os.getpid():
        _watch(owner)
    return Tether(owner)


@functools.cache
def _watch(owner: tuple[int, int]) -> None:
    """Once a process, however often the configuration is copied in it."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        fd = os.pidfd_open(owner[0])
    except ProcessLookupError:
        _end()
    if start_time(owner[0]) != owner[1]:  # another process has its number by now
        _end()
    threading.Thread(target=_wait, args=(fd,), name="asyncrl-tether", daemon=True).start()
    # Python looks for garbage once more at its end: 2 s among all that vLLM has imported, and vLLM kills who takes 5.
    atexit.register(gc.freeze)


def _wait(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    _end()


def _end() -> None:
    """At once: there is nobody left to tidy up for, and vLLM's own end waits for answers that do not come."""
    os.kill(os.getpid(), signal.SIGKILL)


def start_time(pid: int) -> int:
    """Clock ticks since the machine started, which tell two processes of one number apart; 0 when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])
