"""Limits on calls: exact in every minute, first come first served, nothing lost by a cancellation. In virtual time."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import LimitsConfig
from asyncrl.errors import DeadlineError
from asyncrl.rewards.limits import WINDOW_S, Limits
from asyncrl.simulation.loop import Order, VirtualLoop

LONG_S = 1e6


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, None]], seed: int = 0, order: Order = Order.TASKS) -> None:
    with closing(VirtualLoop(seed, order=order, start_s=7.25)) as loop:
        loop.run_until_complete(main())
        assert [timer for _, _, timer in loop._scheduled if not timer.cancelled()] == [], "a timer is left"


def limits_of(*, places: int = 0, queue_timeout_s: float = LONG_S, **keys: int) -> Limits:
    return Limits(LimitsConfig(queue_timeout_s=queue_timeout_s, **keys), places=places)


@dataclass
class Log:
    """What began when, in the order in which it began, and how many calls held a place at once."""

    asked: list[int] = field(default_factory=list)
    begun: list[tuple[float, int]] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def call(self, limits: Limits, number: int, hold_s: float) -> None:
        self.asked.append(number)
        async with limits.place():
            self.begun.append((asyncio.get_running_loop().time(), number))
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await asyncio.sleep(hold_s)
            finally:
                self.running -= 1

    def most_in_a_minute(self) -> int:
        times = [at for at, _ in self.begun]
        return max(sum(at <= other < at + WINDOW_S for other in times) for at in times)


def is_idle(limits: Limits) -> bool:
    stats = limits.stats()
    return stats["queued"] == stats["running"] == 0


# --- exact limits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_thousands_of_calls_keep_every_limit_and_lose_no_time(seed: int) -> None:
    async def main() -> None:
        limits, log, random = limits_of(max_rpm=600, max_concurrent=37), Log(), Random(seed)
        began_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for number in range(2400):
                tasks.create_task(log.call(limits, number, random.random()))
        # By time: tasks that are given their places in the same moment run in any order.
        begun_s = {number: at for at, number in log.begun}
        assert [begun_s[number] for number in log.asked] == sorted(begun_s.values())
        assert log.most == 37
        assert log.most_in_a_minute() == 600
        # 2,400 calls at 600 a minute: the last begins after three whole minutes, and within the time of its own minute's calls.
        assert 180 < log.begun[-1][0] - began_s < 180 + 600 / 37
        assert is_idle(limits)

    in_virtual_time(main, seed)


def test_a_minute_counts_from_when_a_call_runs_and_not_from_when_it_may() -> None:
    """Something holds the loop for 5 s between the two."""

    async def main() -> None:
        limits, log, loop = limits_of(max_rpm=1), Log(), asyncio.get_running_loop()
        tasks = [asyncio.create_task(log.call(limits, number, 0.0)) for number in range(3)]
        await asyncio.sleep(0)
        loop.call_at(loop.time() + WINDOW_S, lambda: setattr(loop, "_now", loop.time() + 5))
        await asyncio.gather(*tasks)
        assert [at - log.begun[0][0] for at, _ in log.begun] == [0, 65, 125]

    in_virtual_time(main, order=Order.STRICT)


def test_tokens_of_a_minute_are_limited() -> None:
    async def main() -> None:
        limits, log = limits_of(max_tpm=10_000, estimated_tokens_per_request=3_000), Log()
        async with asyncio.TaskGroup() as tasks:
            for number in range(9):
                tasks.create_task(log.call(limits, number, 1.0))
        assert [at - log.begun[0][0] for at, _ in log.begun] == [0, 0, 0, 60, 60, 60, 120, 120, 120]

    in_virtual_time(main)


def test_without_a_limit_nobody_waits() -> None:
    async def main() -> None:
        limits, log = limits_of(), Log()
        async with asyncio.TaskGroup() as tasks:
            for number in range(500):
                tasks.create_task(log.call(limits, number, 1.0))
        assert log.most == 500

    in_virtual_time(main)


@pytest.mark.parametrize(("max_concurrent", "places", "most"), [(0, 2, 2), (3, 2, 2), (2, 3, 2), (3, 0, 3)])
def test_the_smaller_number_of_places_counts(max_concurrent: int, places: int, most: int) -> None:
    async def main() -> None:
        limits, log = limits_of(max_concurrent=max_concurrent, places=places), Log()
        async with asyncio.TaskGroup() as tasks:
            for number in range(9):
                tasks.create_task(log.call(limits, number, 1.0))
        assert log.most == most

    in_virtual_time(main)


def test_each_scorer_has_limits_of_its_own() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            one, other = limits_of(max_concurrent=1, queue_timeout_s=1), limits_of(max_concurrent=1, queue_timeout_s=1)
            for limits in (one, other):
                tasks.create_task(Log().call(limits, 0, 10.0))

    in_virtual_time(main)


# --- waiting, and leaving the line ------------------------------------------------------------------------------------------------


def test_a_call_that_waits_too_long_fails_and_holds_up_nobody() -> None:
    async def main() -> None:
        limits, log, clock = limits_of(max_concurrent=1, queue_timeout_s=5), Log(), asyncio.get_running_loop().time
        began_s = clock()
        tasks = [asyncio.create_task(log.call(limits, number, hold_s)) for number, hold_s in ((0, 4.0), (1, 4.0), (2, 4.0))]
        with pytest.raises(DeadlineError) as caught:
            await tasks[2]
        assert clock() - began_s == 5
        assert str(caught.value) == (
            "no place for a reward call within reward.limits.queue_timeout_s (max_concurrent = 1, queue_timeout_s = 5; 1 in line, "
            "1 running)"
        )
        await asyncio.gather(*tasks[:2])
        assert limits.stats() == {"queued": 0, "running": 0, "queue_timeouts": 1}

    in_virtual_time(main, order=Order.STRICT)


def test_a_place_that_comes_with_the_cancellation_goes_to_the_next() -> None:
    """The holder leaves and the next is cancelled before it runs: the place, and the count of the minute, are the third's."""

    async def main() -> None:
        limits, log = limits_of(max_concurrent=1, max_rpm=2), Log()

        async def leave_and_cancel_the_next() -> None:
            await log.call(limits, 0, 1.0)
            assert limits.stats()["running"] == 1, "the next has its place, and has not run yet"
            tasks[1].cancel()

        began_s = asyncio.get_running_loop().time()
        leaving = asyncio.create_task(leave_and_cancel_the_next())
        tasks = [leaving, *(asyncio.create_task(log.call(limits, number, 1.0)) for number in (1, 2))]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None)]
        assert [(at - began_s, number) for at, number in log.begun] == [(0, 0), (1, 2)]
        assert is_idle(limits)

    in_virtual_time(main, order=Order.STRICT)


def test_a_call_that_was_cancelled_after_it_began_stays_counted_in_its_minute() -> None:
    async def main() -> None:
        limits, log, clock = limits_of(max_rpm=1), Log(), asyncio.get_running_loop().time
        began_s = clock()
        first = asyncio.create_task(log.call(limits, 0, LONG_S))
        await asyncio.sleep(1)
        first.cancel()
        await log.call(limits, 1, 0.0)
        assert clock() - began_s == WINDOW_S
        await asyncio.gather(first, return_exceptions=True)

    in_virtual_time(main)


def test_there_is_no_timer_when_nobody_is_in_line() -> None:
    async def main() -> None:
        limits, log = limits_of(max_rpm=1), Log()
        await log.call(limits, 0, 0.0)
        second = asyncio.create_task(log.call(limits, 1, 0.0))
        await asyncio.sleep(1)
        second.cancel()
        await asyncio.wait([second])

    in_virtual_time(main)


@pytest.mark.parametrize("keys", [{"max_concurrent": 2}, {"max_rpm": 3}, {"max_concurrent": 2, "max_rpm": 5}])
def test_cancelling_after_any_number_of_turns_loses_no_place(keys: dict[str, int]) -> None:
    async def main() -> None:
        limits = limits_of(**keys)
        for turns in range(25):
            log = Log()
            tasks = [asyncio.create_task(log.call(limits, number, 0.0)) for number in range(8)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert results[1::2] == [None] * 4
            assert is_idle(limits)

    for seed in range(4):
        in_virtual_time(main, seed)


# --- any callers ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caller:
    asks_s: float
    holds_s: float
    cancelled_s: float
    """After it asked."""


def callers_of(random: Random, count: int) -> Iterator[Caller]:
    """Times are continuous, so no two of them fall together by chance."""
    asks_s = 0.0
    for _ in range(count):
        asks_s += random.choice((0.0, 1.0, 20.0)) * random.random()
        yield Caller(asks_s, random.choice((0.5, 30.0)) * random.random(), random.choice((5.0, 50.0, LONG_S)) * random.random())


def expected_starts(
    callers: list[Caller], *, rpm: int, per_token_minute: int, concurrent: int, patience_s: float
) -> list[float | None]:
    """By the words of the promise, one caller after the other: when each begins, or None. Quadratic, and without a queue."""
    starts: list[float | None] = []
    ends: list[float] = []
    for caller in callers:
        begun = [start for start in starts if start is not None]
        at_s = max([caller.asks_s, *begun[-1:]])
        for limit in (rpm, per_token_minute):
            if limit and len(begun) >= limit:
                at_s = max(at_s, begun[-limit] + WINDOW_S)
        if concurrent and sum(end > at_s for end in ends) >= concurrent:
            at_s = sorted(ends)[-concurrent]
        leaves_s = caller.asks_s + min(caller.cancelled_s, patience_s)
        starts.append(at_s if at_s < leaves_s else None)
        if at_s < leaves_s:
            ends.append(min(at_s + caller.holds_s, caller.asks_s + caller.cancelled_s))
    return starts


def check_any_callers(seed: int, count: int, rpm: int, tpm: int, concurrent: int, patience_s: float) -> None:
    callers = list(callers_of(Random(seed), count))
    found: list[float | None] = [None] * count

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limits = limits_of(
            max_rpm=rpm, max_tpm=tpm * 100, estimated_tokens_per_request=100, max_concurrent=concurrent, queue_timeout_s=patience_s
        )
        zero_s = loop.time()

        async def act(number: int, caller: Caller) -> None:
            async with limits.place():
                found[number] = loop.time() - zero_s
                await asyncio.sleep(caller.holds_s)

        tasks = []
        for number, caller in enumerate(callers):
            await asyncio.sleep(zero_s + caller.asks_s - loop.time())
            tasks.append(task := asyncio.create_task(act(number, caller)))
            loop.call_later(caller.cancelled_s, task.cancel)
            await asyncio.sleep(0)
        await asyncio.wait(tasks)
        ended = [task.cancelled() or isinstance(task.exception(), (DeadlineError, type(None))) for task in tasks]
        assert all(ended)
        assert is_idle(limits)
        for handle in [timer for _, _, timer in loop._scheduled]:  # type: ignore[attr-defined]
            handle.cancel()

    in_virtual_time(main, seed, Order.STRICT)
    expected = expected_starts(callers, rpm=rpm, per_token_minute=tpm, concurrent=concurrent, patience_s=patience_s)
    assert found == [at if at is None else pytest.approx(at, abs=1e-6) for at in expected]


ANY_CALLERS = given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 60),
    rpm=st.integers(0, 12),
    tpm=st.integers(0, 12),
    concurrent=st.integers(0, 6),
    patience_s=st.sampled_from([10.0, 100.0, LONG_S]),
)


@ANY_CALLERS
def test_any_callers_begin_exactly_when_the_limits_let_them(
    seed: int, count: int, rpm: int, tpm: int, concurrent: int, patience_s: float
) -> None:
    check_any_callers(seed, count, rpm, tpm, concurrent, patience_s)


@pytest.mark.long
def test_thousands_of_any_callers_begin_exactly_when_the_limits_let_them() -> None:
    random = Random(1)
    for seed in range(3000):
        sizes = random.randrange(1, 120), random.randrange(13), random.randrange(13), random.randrange(7)
        check_any_callers(seed, *sizes, random.choice((10.0, 100.0, LONG_S)))
