"""What the processes of a vLLM inherit: an environment, and deafness to the terminal's Ctrl-C.

launch -> [inherited_by_children] -> spawn

Environment variables are the whole process's, so ours stand only while an engine starts: several may start at once, and the last
one puts everything back, what vLLM has set for itself included.
"""

import atexit
import functools
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

REMOVED = ("VLLM_CPU_KVCACHE_SPACE",)
"""It would win over rollout.vllm.kv_cache_memory_mib."""


def child_environment(num_threads: int) -> dict[str, str]:
    """Of an engine whose workers compute with `num_threads` on a CPU."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two engines, and the trainer, sit on the same cores
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy the trainer's threads and locks
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "TORCH_LOGS": os.environ.get("TORCH_LOGS", "-torch._library.triton"),  # it warns of CPU builds
        "PYTHONWARNINGS": "ignore",
        "VLLM_RPC_BASE_PATH": os.environ.get("VLLM_RPC_BASE_PATH") or _socket_folder(),
    }


@functools.cache
def _socket_folder() -> str:
    """Where the processes of all engines meet. vLLM would leave its sockets in the temporary folder for ever."""
    folder = tempfile.mkdtemp(prefix="vllm-")  # short: a socket's whole path has 107 characters at most, of which vLLM takes 37
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class _Shared:
    """One environment for all that start now. Those that need another one wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._values: dict[str, str] = {}
        self._before: dict[str, str] = {}

    @contextmanager
    def holding(self, values: dict[str, str]) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._num_inside or self._values == values)
            if not self._num_inside:
                self._enter(values)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                if not self._num_inside:
                    self._restore()
                    self._changed.notify_all()

    def _enter(self, values: dict[str, str]) -> None:
        self._before, self._values = dict(os.environ), values
        os.environ.update(values)
        for name in REMOVED:
            os.environ.pop(name, None)

    def _restore(self) -> None:
        for name in os.environ.keys() - self._before.keys():
            del os.environ[name]
        for name, value in self._before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


_shared = _Shared()


@contextmanager
def inherited_by_children(values: dict[str, str]) -> Iterator[None]:
    """Processes that this thread starts inside have the environment `values` on top of ours, and SIGINT blocked.

    A Ctrl-C reaches every process of the terminal's group. The run ends at the end of its step, and needs its engines until then.
    """
    with _shared.holding(values):
        resource_tracker.ensure_running()  # unblocks SIGINT when it is started; warns of what killed processes leave, else
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
