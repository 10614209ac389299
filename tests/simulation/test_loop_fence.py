"""What leaves the loop is refused, by name; and only while a virtual loop runs."""

import _thread
import asyncio
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from time import sleep as my_own_name_for_it
from typing import Any

import pytest

from asyncrl.simulation.errors import OutsideError
from asyncrl.simulation.loop import VirtualLoop


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    loop = VirtualLoop(0)
    try:
        loop.run_until_complete(main())
    finally:
        loop.abandon()


def _join_a_thread() -> None:
    threading.Thread(target=print).start()


SYNC: dict[str, Callable[[], object]] = {
    "Thread.start": _join_a_thread,
    "start_new_thread": lambda: _thread.start_new_thread(print, ()),
    "time.sleep": lambda: time.sleep(0.001),
    "sleep by another name": lambda: my_own_name_for_it(0.001),
    "socket": socket.socket,
    "getaddrinfo": lambda: socket.getaddrinfo("localhost", 80),
    "subprocess": lambda: subprocess.run(["true"], check=False),
    "fork": os.fork,
    "system": lambda: os.system("true"),
    "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "a wait for a thread": lambda: threading.Event().wait(0.001),
    "a queue of threads": lambda: queue.Queue[int]().get(timeout=0.001),
    "threadsafe": lambda: asyncio.get_running_loop().call_soon_threadsafe(print),
    "executor": lambda: asyncio.get_running_loop().run_in_executor(None, print),
    "signals": lambda: asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print),
    "reader": lambda: asyncio.get_running_loop().add_reader(0, print),
}

ASYNC: dict[str, Callable[[], Any]] = {
    "to_thread": lambda: asyncio.to_thread(_join_a_thread),
    "open_connection": lambda: asyncio.open_connection("localhost", 80),
    "start_server": lambda: asyncio.start_server(print, "localhost", 0),
    "subprocess_exec": lambda: asyncio.create_subprocess_exec("true"),
    "subprocess_shell": lambda: asyncio.create_subprocess_shell("true"),
    "getaddrinfo": lambda: asyncio.get_running_loop().getaddrinfo("localhost", 80),
    "sock_connect": lambda: asyncio.get_running_loop().sock_connect(None, ("localhost", 80)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", SYNC)
def test_sync_ways_out_are_refused_and_named(name: str) -> None:
    async def main() -> None:
        SYNC[name]()

    with pytest.raises(OutsideError, match=r"by simulation/test_loop_fence\.py:\d+ "):
        run(main)


@pytest.mark.parametrize("name", ASYNC)
def test_async_ways_out_are_refused_and_named(name: str) -> None:
    async def main() -> None:
        await ASYNC[name]()

    with pytest.raises(OutsideError, match=r"by simulation/test_loop_fence\.py:\d+ "):
        run(main)


def test_to_thread_is_told_by_the_function_inside() -> None:
    async def main() -> None:
        await asyncio.to_thread(_join_a_thread)

    with pytest.raises(OutsideError, match=r"run_in_executor\(_join_a_thread\).*world\.offload"):
        run(main)


def test_who_swallows_the_refusal_ends_the_run_all_the_same() -> None:
    went_on: list[str] = []

    async def main() -> None:
        try:
            time.sleep(1)  # noqa: ASYNC251 - it must be refused
        except OutsideError:
            went_on.append("this step ends")
        await asyncio.sleep(0)
        went_on.append("the next does not begin")

    with pytest.raises(OutsideError, match=r"time\.sleep"):
        run(main)
    assert went_on == ["this step ends"]


@pytest.mark.parametrize("raises", [False, True])
def test_after_a_run_everything_is_as_it_was(raises: bool) -> None:
    def now() -> list[object]:
        names = (time.sleep, my_own_name_for_it, _thread.start_new_thread, vars(threading)["_start_new_thread"])
        return [*names, threading.Thread.start, threading.Condition.wait]

    async def main() -> list[object]:
        if raises:
            raise ValueError
        return now()

    before = now()
    loop = VirtualLoop(0)
    if raises:
        with pytest.raises(ValueError):  # noqa: PT011 - the bare one above
            loop.run_until_complete(main())
    else:
        inside = loop.run_until_complete(main())
        assert all(one is not other for one, other in zip(before, inside, strict=True))
    loop.abandon()
    assert all(one is other for one, other in zip(before, now(), strict=True))
    time.sleep(0)
    socket.socket().close()


def test_other_threads_are_left_alone() -> None:
    go, done = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def other() -> None:
        try:
            go.wait(30)
            time.sleep(0.0)
            socket.socket().close()
            threading.Thread(target=int).start()
        except BaseException as error:
            errors.append(error)
        done.set()

    async def main() -> None:
        go.set()
        while not done.is_set():  # noqa: ASYNC110 - virtual seconds
            await asyncio.sleep(1.0)

    thread = threading.Thread(target=other)
    thread.start()
    run(main)
    thread.join()
    assert errors == []


def test_one_loop_at_a_time() -> None:
    """In another thread: what a crash of one lets go of would be the other's too."""
    refused: list[BaseException] = []

    async def nothing() -> None:
        pass

    def other() -> None:
        loop, main = VirtualLoop(0), nothing()
        try:
            loop.run_until_complete(main)
        except RuntimeError as error:
            refused.append(error)
        loop.abandon()
        main.close()

    begin, end = threading.Event(), threading.Event()

    async def main() -> None:
        begin.set()
        while not end.is_set():  # noqa: ASYNC110 - virtual seconds
            await asyncio.sleep(1.0)

    def waits() -> None:
        begin.wait(30)
        other()
        end.set()

    thread = threading.Thread(target=waits)
    thread.start()
    run(main)
    thread.join()
    assert [str(error) for error in refused] == ["one virtual loop at a time can run in a process"]
