"""A command's loop gives back what its run does, and ends."""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from asyncrl.event_loop import COLLECT_AFTER, leave_threads, rare_collections, run_loop


async def _hold_on() -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


def test_result_and_error_are_those_of_the_run() -> None:
    async def give() -> int:
        return 3

    async def fail() -> int:
        raise ZeroDivisionError

    assert run_loop(give()) == 3
    with pytest.raises(ZeroDivisionError):
        run_loop(fail())


def test_what_is_left_is_cancelled() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("wait")

    async def leave() -> None:
        leave.task = asyncio.create_task(wait())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    run_loop(leave())
    assert ended == ["wait"]


def test_a_task_that_holds_on_is_named_and_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> asyncio.Task[None]:
        task = asyncio.create_task(_hold_on(), name="guest: tool hammer")
        await asyncio.sleep(0)
        return task

    with caplog.at_level(logging.WARNING):
        task = run_loop(leave(), end_timeout_s=0.01)
    assert "left behind: guest: tool hammer" in caplog.text
    assert not task.done()
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_an_interrupt_ends_the_run_with_its_cleanup() -> None:
    cleaned: list[str] = []

    async def run() -> None:
        try:
            asyncio.get_running_loop().call_soon(_interrupt)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("run")

    with pytest.raises(KeyboardInterrupt):
        run_loop(run())
    assert cleaned == ["run"]


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_collections_are_rare_inside_the_block_and_as_before_after_it() -> None:
    before = gc.get_threshold()
    with suppress(ZeroDivisionError), rare_collections():
        assert gc.get_threshold() == COLLECT_AFTER
        assert gc.get_freeze_count() > 0
        raise ZeroDivisionError
    assert gc.get_threshold() == before


_LATE = """
import sys, threading, torch
from asyncrl import cli
started = threading.Event()
def work():
    a = torch.ones(1200, 1200, requires_grad=True)
    while True:
        started.set()
        (a @ a).sum().backward()
def command(**_):
    threading.Thread(target=work, name="asyncrl-model-0", daemon=True).start()
    started.wait()
    print("said")
    raise cli.AsyncRLError("it failed")
cli.app = command
cli.main()
"""


def test_a_thread_inside_of_torch_does_not_change_how_a_process_ends() -> None:
    """Python's own end would stop it there, and the process aborts: exit code -6 or -11 instead of 3."""
    done = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\n", "error: it failed\n")


def test_threads_that_end_leave_the_end_to_python() -> None:
    before = threading.enumerate()
    go = threading.Event()
    threading.Thread(target=go.wait, name="asyncrl-files-0", daemon=True).start()
    threading.Timer(0.01, go.set).start()
    leave_threads(3, before)  # it returns: what would end the process is over
