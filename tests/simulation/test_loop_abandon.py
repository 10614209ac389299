"""An abrupt end: not a line of the tasks runs any more, nobody warns, nothing stays."""

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest

from asyncrl.simulation import garbage
from asyncrl.simulation.errors import Crash
from asyncrl.simulation.loop import VirtualLoop


class Thing:
    """Something that a task holds."""


class Life:
    """Tasks in the middle of everything; `ran` is what they do after their crash."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.things: list[weakref.ref[Thing]] = []

    def thing(self) -> Thing:
        thing = Thing()
        self.things.append(weakref.ref(thing))
        return thing

    @contextmanager
    def sync(self) -> Iterator[Thing]:
        thing = self.thing()
        try:
            yield thing
        finally:
            self.ran.append("sync")

    @asynccontextmanager
    async def unsync(self) -> AsyncIterator[Thing]:
        thing = self.thing()
        try:
            yield thing
        finally:
            self.ran.append("async")
            await asyncio.sleep(1)

    async def numbers(self) -> AsyncIterator[Thing]:
        try:
            while True:
                yield self.thing()
        finally:
            self.ran.append("generator")
            await asyncio.sleep(1)

    async def stubborn(self) -> None:
        thing = self.thing()
        while True:
            try:
                await asyncio.sleep(1)
            except BaseException:
                self.ran.append(f"stubborn {thing}")

    async def stacked(self) -> None:
        async with AsyncExitStack() as stack:
            thing = stack.enter_context(self.sync())
            other = await stack.enter_async_context(self.unsync())
            async for third in self.numbers():
                await asyncio.sleep(1)
                assert thing is not other is not third

    async def main(self) -> None:
        self.never_begun = self.stacked()
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(self.stubborn())
                group.create_task(self.stacked())
            group.create_task(self.fails_late())
            await asyncio.sleep(1e9)

    async def fails_late(self) -> None:
        asyncio.create_task(self.unseen())  # noqa: RUF006 - its failure is not seen, as the crash comes first
        await asyncio.sleep(1e9)

    async def unseen(self) -> None:
        me = asyncio.current_task()
        await asyncio.sleep(3)
        raise KeyError(me is None)


def _crash(life: Life, at_s: float) -> VirtualLoop:
    loop = VirtualLoop(0)

    def after() -> None:
        if loop.time() >= at_s:
            raise Crash

    loop.after_turn = after
    with pytest.raises(Crash):
        loop.run_until_complete(life.main())
    loop.abandon()
    return loop


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    return found


@pytest.mark.parametrize("at_s", [0.0, *(pytest.param(at_s, marks=pytest.mark.long) for at_s in (1.0, 3.0, 10.0))])
def test_no_code_runs_nobody_warns_and_nothing_stays(
    at_s: float, unraisable: list[object], recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life()
    loop = _crash(life, at_s)
    life.never_begun = None  # type: ignore[assignment]
    gc.collect()
    assert life.ran == []
    assert life.things or at_s == 0.0
    assert not [thing for thing in life.things if thing() is not None]
    assert not unraisable
    assert not [str(warning.message) for warning in recwarn.list]
    assert not caplog.records
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None


def test_generators_of_who_runs_the_loop_go_on() -> None:
    def outer() -> Iterator[int]:
        yield 1
        yield 2

    mine = outer()
    assert next(mine) == 1
    _crash(Life(), 2.0)
    assert list(mine) == [2]


def test_a_crash_inside_a_generator_that_runs_the_loop() -> None:
    """As in a fixture: it is in the middle of its code, and goes on."""

    def runs() -> Iterator[str]:
        _crash(Life(), 2.0)
        yield "went on"

    assert list(runs()) == ["went on"]


def test_tasks_left_after_a_good_end_are_known_and_let_go(unraisable: list[object], caplog: pytest.LogCaptureFixture) -> None:
    life = Life()

    async def main() -> None:
        asyncio.create_task(life.stacked(), name="left")  # noqa: RUF006 - the leak is what is tested
        await asyncio.sleep(2)

    loop = VirtualLoop(0)
    loop.run_until_complete(main())
    assert [task.get_name() for task in loop.tasks_left] == ["left"]
    loop.abandon()
    gc.collect()
    assert loop.tasks_left == []
    assert life.ran == []
    assert not [thing for thing in life.things if thing() is not None]
    assert not unraisable
    assert not caplog.records


def test_a_second_run_of_the_same_loop_finds_its_tasks() -> None:
    life = Life()

    async def begin() -> "asyncio.Task[None]":
        task = asyncio.create_task(life.stacked())
        await asyncio.sleep(2)
        return task

    async def end(task: "asyncio.Task[None]") -> None:
        task.cancel()
        await asyncio.wait([task])

    loop = VirtualLoop(0)
    task = loop.run_until_complete(begin())
    loop.run_until_complete(end(task))
    loop.abandon()
    assert sorted(life.ran) == ["async", "generator", "sync"]


@pytest.mark.long
def test_memory_of_crashed_runs_is_given_back() -> None:
    """Counted in objects, which repeats; a leak of one task a run would be thousands of them."""

    def run_some(number: int) -> int:
        for _ in range(number):
            _crash(Life(), 4.0)
        gc.collect()
        return len(gc.get_objects())

    run_some(5)
    before = run_some(1)
    assert run_some(50) - before < 50


@pytest.mark.long
def test_garbage_of_earlier_runs_is_collected_by_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector does not run while a loop does, and would not come back to what was made old meanwhile."""
    monkeypatch.setattr(garbage, "FULL_COLLECTION_AT", 4_000)

    def run_some(number: int) -> int:
        for _ in range(number):
            _crash(Life(), 4.0)
        return len(gc.get_objects())

    run_some(20)
    gc.collect()
    one_life = run_some(1)
    assert run_some(200) - one_life < 8_000
