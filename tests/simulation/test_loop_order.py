"""What each `Order` keeps and what it leaves to the seed; `strict` against asyncio's own loop on random programs."""

import asyncio
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.simulation.errors import DeadlockError
from asyncrl.simulation.loop import Order, VirtualLoop

# --- programs: a list of instructions a task


@dataclass(frozen=True, slots=True)
class Do:
    """One instruction: `what`, on event, queue or task number `on`."""

    what: str
    on: int


WAYS = ("yield", "sleep", "set", "wait", "put", "get", "soon", "spawn", "cancel", "deadline", "resolve", "future", "fail", "lock")
NUM_THINGS = 3

programs = st.lists(
    st.lists(st.builds(Do, st.sampled_from(WAYS), st.integers(0, NUM_THINGS - 1)), min_size=1, max_size=6), min_size=1, max_size=4
)

Trace = list[tuple[str, int, float]]


class Machine:
    """Runs a program and writes down who did what when. Delays are distinct powers of two: no two timers are due at once."""

    def __init__(self, program: list[list[Do]], *, with_time: bool) -> None:
        self._program, self._with_time = program, with_time
        self.trace: Trace = []
        self._delays = (2.0**-number for number in itertools.count(1))
        self._spawned = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        self._events = [asyncio.Event() for _ in range(NUM_THINGS)]
        self._queues: list[asyncio.Queue[int]] = [asyncio.Queue(1) for _ in range(NUM_THINGS)]
        self._futures = [asyncio.get_running_loop().create_future() for _ in range(NUM_THINGS)]
        self._lock = asyncio.Lock()
        self._tasks = [asyncio.create_task(self._work(f"t{index}", code)) for index, code in enumerate(self._program)]
        while left := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(left)
        for task in self._tasks:
            self._note(f"end {task.cancelled()}", 0)

    def _note(self, who: str, number: int) -> None:
        self.trace.append((who, number, asyncio.get_running_loop().time() if self._with_time else 0.0))

    async def _work(self, name: str, code: list[Do]) -> None:
        for number, do in enumerate(code):
            self._note(name, number)
            try:
                await self._do(name, do)
            except (TimeoutError, KeyError) as error:
                self._note(f"{name} {type(error).__name__}", number)

    async def _do(self, name: str, do: Do) -> None:
        on, loop = do.on, asyncio.get_running_loop()
        match do.what:
            case "sleep" if self._with_time:
                await asyncio.sleep(next(self._delays))
            case "deadline" if self._with_time:
                async with asyncio.timeout(next(self._delays)):
                    await self._events[on].wait()
            case "set":
                self._events[on].set()
            case "wait":
                await self._events[on].wait()
            case "put":
                await self._queues[on].put(1)
            case "get":
                await self._queues[on].get()
            case "soon":
                for number in range(2):
                    loop.call_soon(self._note, f"{name} soon", number)
                self._futures[on].add_done_callback(lambda _: self._note(f"{name} done", on))
            case "spawn":
                child = f"c{next(self._spawned)}"
                self._tasks.append(asyncio.create_task(self._work(child, [Do("yield", 0), Do("set", on)])))
            case "cancel":
                self._tasks[on % len(self._tasks)].cancel()
            case "resolve" if not self._futures[on].done():
                self._futures[on].set_result(None)
            case "fail" if not self._futures[on].done():
                self._futures[on].set_exception(KeyError(on))
                self._futures[on].exception()
            case "future":
                await asyncio.shield(self._futures[on])
            case "lock":
                async with self._lock:
                    await asyncio.sleep(0)
            case _:
                await asyncio.sleep(0)


class Selector:
    """Nothing is ever ready; instead of waiting, time passes."""

    def __init__(self, loop: "OwnLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise DeadlockError
        self._loop.now += timeout
        return []


class OwnLoop(asyncio.BaseEventLoop):
    """asyncio's own turns, its own heap of timers and its own handles; only the clock is not the computer's."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = Selector(self)
        self._clock_resolution = 2.0**-50  # shorter than any delay, and not lost beside the time

    def time(self) -> float:
        return self.now

    def _process_events(self, events: object) -> None:
        pass


def _own_trace(program: list[list[Do]]) -> tuple[Trace, bool]:
    """By asyncio; and whether the program hangs."""
    loop, machine = OwnLoop(), Machine(program, with_time=True)
    main = loop.create_task(machine.run())
    try:
        loop.run_until_complete(main)
        return machine.trace, False
    except DeadlockError:
        trace = list(machine.trace)
        for _ in range(20):  # cancelled tasks may wait for each other
            left = asyncio.all_tasks(loop)
            if not left:
                break
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        return trace, True
    finally:
        loop.close()


def _trace(program: list[list[Do]], order: Order, seed: int, *, with_time: bool = True) -> tuple[Trace, bool]:
    loop, machine = VirtualLoop(seed, order=order), Machine(program, with_time=with_time)
    try:
        loop.run_until_complete(machine.run())
    except DeadlockError:
        return machine.trace, True
    finally:
        loop.abandon()
    return machine.trace, False


@settings(max_examples=300)
@given(programs, st.integers(0, 9))
def test_strict_is_the_order_of_asyncio(program: list[list[Do]], seed: int) -> None:
    assert _trace(program, Order.STRICT, seed) == _own_trace(program)


@settings(max_examples=50)
@given(programs)
def test_strict_is_the_order_of_a_real_loop(program: list[list[Do]]) -> None:
    """On the computer's own clock and selector; without timers, whose order there is a matter of luck."""
    trace, hangs = _trace(program, Order.STRICT, 0, with_time=False)
    if hangs:
        return
    machine = Machine(program, with_time=False)
    asyncio.run(machine.run())
    assert trace == machine.trace


@settings(max_examples=100)
@given(programs, st.sampled_from(Order), st.integers(0, 2**63))
def test_a_seed_repeats_itself(program: list[list[Do]], order: Order, seed: int) -> None:
    assert _trace(program, order, seed) == _trace(program, order, seed)


# --- what is kept


def _note(seen: list[Any], what: object, future: "asyncio.Future[Any]") -> None:
    assert future.done()
    seen.append(what)


async def _busy_turn(seen: list[tuple[str, int]], num_owners: int, num_calls: int) -> None:
    """Futures with many callbacks, and tasks that ask for many, all ready in the same turns."""
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(num_owners)]
    for number in range(num_calls):  # of all owners in turn, so that keeping the order is more than keeping blocks together
        for index, future in enumerate(futures):
            future.add_done_callback(functools.partial(_note, seen, (f"future {index}", number)))

    async def asks(index: int) -> None:
        for number in range(num_calls):
            loop.call_soon(seen.append, (f"task {index}", number))
        await asyncio.sleep(0)
        seen.append((f"task {index}", num_calls))

    for future in futures:
        future.set_result(None)
    await asyncio.gather(*map(asks, range(num_owners)))
    await asyncio.sleep(1)


def _seen(order: Order, seed: int, num_owners: int, num_calls: int) -> list[tuple[str, int]]:
    seen: list[tuple[str, int]] = []
    loop = VirtualLoop(seed, order=order)
    loop.run_until_complete(_busy_turn(seen, num_owners, num_calls))
    loop.abandon()
    return seen


def _of(owner: str, seen: list[tuple[str, int]]) -> list[int]:
    return [number for who, number in seen if who == owner]


@given(st.integers(0, 2**63), st.integers(1, 4), st.integers(1, 4))
def test_under_tasks_the_callbacks_of_one_owner_keep_their_order(seed: int, num_owners: int, num_calls: int) -> None:
    seen = _seen(Order.TASKS, seed, num_owners, num_calls)
    assert len(seen) == num_owners * (2 * num_calls + 1)
    for owner in {who for who, _ in seen}:
        assert _of(owner, seen) == sorted(_of(owner, seen))


def _orders(order: Order, make: Callable[[list[int]], Any], seeds: int) -> set[tuple[int, ...]]:
    found = set()
    for seed in range(seeds):
        seen: list[int] = []
        loop = VirtualLoop(seed, order=order)
        loop.run_until_complete(make(seen))
        loop.abandon()
        found.add(tuple(seen))
    return found


async def _four_tasks(seen: list[int]) -> None:
    async def note(number: int) -> None:
        seen.append(number)

    await asyncio.gather(*map(note, range(4)))


async def _four_timers(seen: list[int]) -> None:
    for number in range(4):
        asyncio.get_running_loop().call_later(1.0, seen.append, number)
    await asyncio.sleep(2.0)


async def _four_callbacks(seen: list[int]) -> None:
    future = asyncio.get_running_loop().create_future()
    for number in range(4):
        future.add_done_callback(functools.partial(_note, seen, number))
    future.set_result(None)
    await asyncio.sleep(1.0)


EVERY = set(itertools.permutations(range(4)))
KEPT = {tuple(range(4))}


@pytest.mark.parametrize(
    ("make", "strict", "tasks"),
    [(_four_tasks, KEPT, EVERY), (_four_timers, KEPT, EVERY), (_four_callbacks, KEPT, KEPT)],
    ids=["tasks", "timers", "callbacks of one future"],
)
def test_which_orders_can_be_reached(make: Callable[[list[int]], Any], strict: set[Any], tasks: set[Any]) -> None:
    assert _orders(Order.STRICT, make, 40) == strict
    assert _orders(Order.TASKS, make, 400) == tasks
    assert _orders(Order.ALL, make, 400) == EVERY
