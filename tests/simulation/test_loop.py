"""Virtual time, deadlocks and endless runs."""

import asyncio
import gc
import time

import pytest

from asyncrl.simulation.errors import DeadlockError, EndlessError
from asyncrl.simulation.handles import SimFuture, SimTask
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.waiting import within


def test_time_jumps_to_the_next_timer_and_nothing_really_sleeps() -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleeper("day", 86_400.0), sleeper("second", 1.0), sleeper("year", 31_536_000.0))

    loop, began = VirtualLoop(0, start_s=5.0), time.process_time()
    loop.run_until_complete(main())
    loop.abandon()
    assert seen == [("second", 6.0), ("day", 86_405.0), ("year", 31_536_005.0)]
    assert time.process_time() - began < 60  # a year


def test_timeouts_and_call_later_need_no_change() -> None:
    called: list[float] = []

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(2.5, lambda: called.append(loop.time()))
        loop.call_later(0.5, called.append, -1.0).cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await asyncio.sleep(10.0)
        return loop.time()

    loop = VirtualLoop(0)
    assert loop.run_until_complete(main()) == 3.0
    assert called == [2.5]
    loop.abandon()


def test_many_met_deadlines_do_not_pile_up() -> None:
    most = 0

    async def main() -> None:
        nonlocal most
        for _ in range(5_000):
            async with asyncio.timeout(1e6):
                await asyncio.sleep(0.01)
            most = max(most, len(loop._scheduled))

    loop = VirtualLoop(0)
    loop.run_until_complete(main())
    loop.abandon()
    assert most < 250


def test_timers_keep_their_times_when_others_are_swept_out() -> None:
    fired: list[int] = []

    async def main() -> None:
        delays = [number * 7_919 % 1_000 for number in range(1_000)]
        timers = [loop.call_later(float(delay), fired.append, delay) for delay in delays]
        for timer, delay in zip(timers, delays, strict=True):
            if delay % 5:
                timer.cancel()
        await asyncio.sleep(2_000.0)

    loop = VirtualLoop(0)
    loop.run_until_complete(main())
    loop.abandon()
    assert fired == list(range(0, 1_000, 5))


def test_a_deadlock_shows_every_task_with_its_whole_chain() -> None:
    async def innermost(event: asyncio.Event) -> None:
        async with within(None, lambda: "never"):
            await event.wait()

    async def waiter(event: asyncio.Event) -> None:
        await innermost(event)

    async def main() -> None:
        event = asyncio.Event()
        first = asyncio.create_task(waiter(event), name="first")
        second = asyncio.create_task(waiter(event), name="second")
        await asyncio.sleep(1.5)
        await asyncio.wait_for(first, None)
        await second

    loop = VirtualLoop(0)
    with pytest.raises(DeadlockError) as caught:
        loop.run_until_complete(main())
    loop.abandon()
    told = str(caught.value)
    assert "nothing is left to wake up at 1.500000 s" in told
    assert "2 tasks 'first', 'second' wait" in told
    chain = [told.index(name) for name in ("<locals>.waiter", "<locals>.innermost", "locks.py", "for a future")]
    assert chain == sorted(chain)
    assert "task 'task 1' waits" in told
    assert "for task 'first'" in told


def test_the_chain_goes_through_async_generators_and_wrappers() -> None:
    from collections.abc import AsyncIterator, Coroutine
    from typing import Any

    async def generator(event: asyncio.Event) -> AsyncIterator[None]:
        await event.wait()
        yield

    async def reads() -> None:
        async for _ in generator(asyncio.Event()):
            pass

    class Wrapped(Coroutine[Any, Any, Any]):
        def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
            self._inner = inner
            self.__name__ = self.__qualname__ = "wrapped"

        cr_frame = property(lambda self: self._inner.cr_frame)
        cr_await = property(lambda self: self._inner.cr_await)

        def send(self, value: Any) -> Any:
            return self._inner.send(value)

        def throw(self, *error: Any) -> Any:
            return self._inner.throw(*error)

        def close(self) -> None:
            self._inner.close()

        def __await__(self) -> Any:
            return self._inner.__await__()

    async def main() -> None:
        await asyncio.gather(reads())

    loop = VirtualLoop(0)
    loop.wrap = lambda coro, name: Wrapped(coro)
    with pytest.raises(DeadlockError) as caught:
        loop.run_until_complete(main())
    loop.abandon()
    chain = [str(caught.value).index(name) for name in ("<locals>.reads", "<locals>.generator", "Event.wait")]
    assert chain == sorted(chain)


def test_a_loop_that_turns_for_ever_is_endless() -> None:
    async def spins() -> None:
        while True:  # noqa: ASYNC110 - spinning is what is tested
            await asyncio.sleep(0)

    loop = VirtualLoop(0)
    loop.max_turns = 1_000
    with pytest.raises(EndlessError, match=r"1001 turns(.|\n)*spins"):
        loop.run_until_complete(spins())
    loop.abandon()


def test_after_turn_may_end_the_run() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - it never ends
            await asyncio.sleep(1.0)

    def after() -> None:
        if loop.time() >= 7.0:
            raise ValueError("seen")

    loop = VirtualLoop(0)
    loop.after_turn = after
    with pytest.raises(ValueError, match="seen"):
        loop.run_until_complete(main())
    assert loop.time() == 7.0
    assert loop.is_closed()


def test_a_closed_loop_takes_nothing_more() -> None:
    loop = VirtualLoop(0)
    loop.abandon()
    with pytest.raises(RuntimeError, match="its run is over"):
        loop.call_soon(print)


def test_the_collector_is_as_it_was() -> None:
    async def main() -> bool:
        return gc.isenabled()

    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            loop = VirtualLoop(0)
            assert loop.run_until_complete(main()) is False
            loop.abandon()
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_tasks_and_futures_have_one_order_in_a_set() -> None:
    """That of their numbers in a set, which depends on nothing else; the addresses would give another."""

    async def main() -> None:
        tasks = [asyncio.create_task(asyncio.sleep(1)) for _ in range(40)]
        futures = [asyncio.get_running_loop().create_future() for _ in range(40)]
        for future in futures:
            future.set_result(None)
        for things in (tasks, futures):
            done, _ = await asyncio.wait(things)
            numbers = [thing.number for thing in done if isinstance(thing, SimTask | SimFuture)]
            assert numbers == list({*numbers})
            assert len(numbers) == 40

    loop = VirtualLoop(0)
    loop.run_until_complete(main())
    loop.abandon()


def test_an_async_generator_that_is_let_go_is_closed_by_a_task() -> None:
    from collections.abc import AsyncIterator

    closed: list[float] = []

    async def ticks() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            await asyncio.sleep(1.0)
            closed.append(asyncio.get_running_loop().time())

    async def main() -> None:
        async for number in ticks():
            if number == 3:
                break
        await asyncio.sleep(5.0)

    loop = VirtualLoop(0)
    loop.run_until_complete(main())
    loop.abandon()
    assert closed == [1.0]
