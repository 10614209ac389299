"""How a process ended, in words; and that those of a run end with it."""

import asyncio
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncrl.rollout.vllm.processes import Offspring, Process, Watch, children, outlived_by_none
from asyncrl.rollout.vllm.tether import Tether, start_time

SLEEP = "import time; time.sleep(600)"
# A child that unpickles the Tether on its standard input, says so, and goes on as vLLM's EngineCore does.
TIED = "import pickle, sys, time; pickle.load(sys.stdin.buffer); print('tied', flush=True); time.sleep(600)"
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
child.wait()
"""
OWNER = """
import pickle, subprocess, sys, time
from asyncrl.rollout.vllm.tether import Tether
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdin.write(pickle.dumps({"asyncrl": Tether()}))
child.stdin.close()
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def run(code: str, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)


def has_ended(pid: int, timeout_s: float = 60) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


async def test_each_end_is_told_once_with_its_manner() -> None:
    child, other = run(SLEEP), run("raise SystemExit(3)")
    ends: asyncio.Queue[str] = asyncio.Queue()
    watch = Watch([Process(name="one", pid=child.pid), Process(name="two", pid=other.pid)], ends.put_nowait)
    assert await asyncio.wait_for(ends.get(), 60) == f"two (pid {other.pid}) ended with exit code 3"
    watch.kill()
    assert await asyncio.wait_for(ends.get(), 60) == f"one (pid {child.pid}) was killed by SIGKILL"
    for each in (child, other):
        each.communicate()
    watch.close()
    assert ends.empty()


def test_a_stopped_process_does_not_outlive_the_block() -> None:
    """It hears nobody: SIGTERM waits, and so does a thread in it that looks after its parent."""
    child, gone = run(SLEEP), run("")
    gone.communicate()
    os.kill(child.pid, signal.SIGSTOP)
    with outlived_by_none([Process(name="one", pid=child.pid), Process(name="two", pid=gone.pid)]):
        child.terminate()
    assert has_ended(child.pid)
    child.communicate()
    assert child.returncode == -signal.SIGKILL


async def test_a_closed_watch_tells_nothing() -> None:
    """Not even what its thread has seen already."""
    child = run(SLEEP)
    ends: list[str] = []
    watch = Watch([Process(name="one", pid=child.pid)], ends.append)
    child.kill()
    child.communicate()
    watch._loop.call_soon(watch._tell, "seen")
    watch.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert ends == []


def test_what_is_not_known_is_not_said() -> None:
    """Of one whose number another process has by now, and of one that has been taken note of."""
    assert Process(name="one", pid=os.getpid()).ended() == f"one (pid {os.getpid()}) has ended"
    child = run("")
    child.communicate()
    assert Process(name="one", pid=child.pid).ended() == f"one (pid {child.pid}) has ended"
    assert Process(name="one", pid=child.pid, exit_code=lambda: -15).ended().endswith("was killed by SIGTERM")


def test_children_of_one_thread_are_told_apart() -> None:
    child = run(SLEEP)
    assert child.pid in children(os.getpid())
    assert child.pid in children(os.getpid(), os.getpid())  # the main thread has the number of the process
    assert children(child.pid) == []
    child.kill()
    child.communicate()
    assert child.pid not in children(os.getpid())


@pytest.mark.parametrize("is_over", [False, True])
def test_only_what_was_started_in_the_block_is_killed(is_over: bool) -> None:
    """One thread starts two engines, one after the other; the start of the second is given up, in it or as it ends."""
    first, second = Offspring(), Offspring()

    def start(offspring: Offspring) -> "subprocess.Popen[str]":
        with offspring:
            child = run(SLEEP)
            if offspring is second and not is_over:
                pool.submit(second.kill).result()
        return child

    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as pool:
        engines = [thread.submit(start, each).result() for each in (first, second)]
        if is_over:
            second.kill()
        assert has_ended(engines[1].pid)
        assert first.pids() == [engines[0].pid]
        assert engines[0].poll() is None
        first.kill()
        assert has_ended(engines[0].pid)
    for engine in engines:
        engine.communicate()


def test_a_stopped_child_of_what_is_given_up_ends_with_it() -> None:
    """A worker that nobody ended would keep its memory for good."""
    with Offspring() as offspring:
        core = run(PARENT, SLEEP)
        assert core.stdout is not None
        worker = int(core.stdout.readline())
    os.kill(worker, signal.SIGSTOP)
    offspring.kill()
    assert has_ended(worker)
    core.communicate()


# --- tether -----------------------------------------------------------------------------------------------------------------------


def test_a_killed_owner_takes_its_processes_along() -> None:
    owner = run(OWNER, TIED)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    assert not has_ended(child, timeout_s=0)
    owner.kill()
    owner.communicate()
    assert has_ended(child)


@pytest.mark.parametrize("is_number_in_use", [True, False])
def test_who_arrives_after_the_owner_has_ended_ends_too(is_number_in_use: bool) -> None:
    """Also when another process has the owner's number by now: this one, say."""
    gone = run("")
    gone.communicate()
    owner = (os.getpid(), 1) if is_number_in_use else (gone.pid, 1)
    child = subprocess.Popen([sys.executable, "-c", TIED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.communicate(pickle.dumps(Tether(owner)), timeout=60)[0] == b""
    assert child.returncode == -signal.SIGKILL


def test_it_is_the_same_text_wherever_it_is_and_does_nothing_at_home() -> None:
    tether = Tether()
    assert tether.owner == (os.getpid(), start_time(os.getpid()))
    again = pickle.loads(pickle.dumps(tether))
    assert again == tether == "asyncrl"
    assert again.owner == tether.owner
    assert "asyncrl-tether" not in {thread.name for thread in threading.enumerate()}


def test_start_times_differ_and_stay() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid()) > 0
    assert start_time(2**22 + 1) == 0
