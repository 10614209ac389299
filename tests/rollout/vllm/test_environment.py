"""What children inherit, and that nothing of it stays."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.rollout.vllm.environment import child_environment, inherited_by_children

SHOW = "import os, signal; print(os.environ['OMP_NUM_THREADS'], signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def in_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_children_have_the_environment_and_do_not_hear_ctrl_c() -> None:
    with inherited_by_children(child_environment(3)):
        shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True).stdout
    assert shown.split(maxsplit=1)[0] == "3"
    assert "SIGINT" in shown


def test_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM has changed for itself meanwhile, too."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = dict(os.environ)
    with inherited_by_children(child_environment(1)):
        assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
        os.environ["LD_PRELOAD_OF_VLLM"] = "x"
        os.environ.pop("PATH")
    assert dict(os.environ) == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


SOCKETS = """
import os
from asyncrl.rollout.vllm.environment import child_environment
folder = child_environment(1)["VLLM_RPC_BASE_PATH"]
assert folder == child_environment(2)["VLLM_RPC_BASE_PATH"]
open(os.path.join(folder, "left"), "w").close()
print(folder)
"""


def test_the_sockets_of_all_engines_go_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    shown = subprocess.run([sys.executable, "-c", SOCKETS], capture_output=True, text=True, check=True).stdout
    assert len(shown) > 2
    assert not os.path.exists(shown.strip())


LEAK = """
import os, signal, subprocess, sys
from multiprocessing import shared_memory
from asyncrl.rollout.vllm.environment import child_environment, inherited_by_children
with inherited_by_children(child_environment(1)):
    memory = shared_memory.SharedMemory(create=True, size=8)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_leaves_in_memory_is_removed_without_a_word(tmp_path: Path) -> None:
    """Python's helper that removes it ends after its owner, and would warn."""
    environment = {**os.environ, "VLLM_RPC_BASE_PATH": str(tmp_path)}
    # It returns when the helper has ended, too.
    ended = subprocess.run([sys.executable, "-c", LEAK], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, "")


def test_equal_ones_stand_together_and_another_waits() -> None:
    """Engines that start at once share an environment; the last one puts it back."""
    together, order = threading.Barrier(2, timeout=60), list[str]()

    def equal() -> None:
        with inherited_by_children(child_environment(1)):
            together.wait()
            order.append(os.environ["OMP_NUM_THREADS"])

    def other() -> None:
        with inherited_by_children(child_environment(2)):
            order.append(os.environ["OMP_NUM_THREADS"])

    before = dict(os.environ)
    first = in_thread(equal)
    while os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn" and first.is_alive():
        first.join(1e-3)
    threads = [first, in_thread(other), in_thread(equal)]
    for thread in threads:
        thread.join(60)
    assert order == ["1", "1", "2"]
    assert dict(os.environ) == before
