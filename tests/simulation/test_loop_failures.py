"""Failures that asyncio would only log end the run, in the same turn of every process."""

import asyncio
import gc

import pytest

from asyncrl.simulation.errors import Crash, UnseenError
from asyncrl.simulation.loop import Order, VirtualLoop


async def _fails() -> None:
    raise KeyError("lost")


def _run(loop: VirtualLoop, main: object) -> None:
    try:
        loop.run_until_complete(main)  # type: ignore[arg-type]
    finally:
        loop.abandon()


def test_what_a_callback_raises_ends_the_run_at_once() -> None:
    later: list[str] = []

    def breaks() -> None:
        loop.call_soon(later.append, "next turn")
        raise KeyError("in a callback")

    async def main() -> None:
        loop.call_later(1.0, breaks)
        await asyncio.sleep(2.0)
        later.append("main")

    loop = VirtualLoop(0)
    with pytest.raises(KeyError, match="in a callback"):
        _run(loop, main())
    assert loop.time() == 1.0
    assert later == []


def test_a_task_whose_failure_nobody_can_see_is_found_in_the_turn_it_is_let_go() -> None:
    async def main() -> None:
        task = asyncio.create_task(_fails(), name="lonely")
        await asyncio.sleep(1.0)
        del task
        await asyncio.sleep(10.0)

    loop = VirtualLoop(0)
    with pytest.raises(UnseenError, match=r"task 'lonely' failed, and nobody has looked at it: KeyError\('lost'\)") as caught:
        _run(loop, main())
    assert loop.time() == 1.0
    assert isinstance(caught.value.__cause__, KeyError)


def test_one_that_hangs_on_itself_is_found_at_the_end() -> None:
    """The traceback of the error holds a frame that holds the task: only a collector would free it."""

    async def holds_itself() -> None:
        me = asyncio.current_task()
        raise KeyError(me is not None)

    async def main() -> None:
        asyncio.create_task(holds_itself(), name="knot")  # noqa: RUF006 - that is the mistake
        await asyncio.sleep(1.0)

    for _ in range(2):
        loop = VirtualLoop(0)
        with pytest.raises(UnseenError, match="task 'knot'"):
            _run(loop, main())
        assert loop.time() == 1.0


def test_a_future_whose_failure_nobody_sees_is_found() -> None:
    async def main() -> None:
        asyncio.get_running_loop().create_future().set_exception(KeyError("unseen"))
        await asyncio.sleep(1.0)

    loop = VirtualLoop(0)
    with pytest.raises(UnseenError, match="a future failed"):
        _run(loop, main())
    assert loop.time() == 0.0


def test_seen_failures_are_none() -> None:
    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(_fails())
            group.create_task(_fails())

    async def main() -> None:
        with pytest.raises(KeyError):
            await asyncio.create_task(_fails())
        task = asyncio.create_task(_fails())
        await asyncio.wait([task])
        assert isinstance(task.exception(), KeyError)
        await asyncio.gather(_fails(), return_exceptions=True)
        gone = asyncio.create_task(asyncio.sleep(9))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(ExceptionGroup):
            await both()

    _run(VirtualLoop(0), main())


def test_the_own_failure_of_the_main_task_comes_first() -> None:
    async def main() -> None:
        task = asyncio.create_task(_fails())
        await asyncio.sleep(1)
        raise ValueError(task.get_name())

    with pytest.raises(ValueError, match="task 2"):
        _run(VirtualLoop(0), main())


def test_a_deadlock_tells_of_failures_that_nobody_has_looked_at() -> None:
    async def main() -> None:
        task = asyncio.create_task(_fails(), name="dead")
        await asyncio.get_running_loop().create_future()
        await task

    with pytest.raises(Exception, match=r"nobody has looked at the failure of .*'dead'"):
        _run(VirtualLoop(0), main())


def test_a_crash_from_inside_a_step_waits_for_its_end_and_for_nothing_else() -> None:
    ran: list[str] = []

    async def crashes() -> None:
        loop.fail(Crash("now"))
        ran.append("end of the step")
        try:
            await asyncio.sleep(0)
        finally:
            ran.append("finally")

    async def other() -> None:
        ran.append("another task of the same turn")

    async def main() -> None:
        await asyncio.gather(crashes(), other())

    loop = VirtualLoop(0, order=Order.STRICT)
    with pytest.raises(Crash):
        _run(loop, main())
    gc.collect()
    assert ran == ["end of the step"]
