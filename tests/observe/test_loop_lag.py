"""Loop lag: a blocked loop is seen, and nothing runs on after the exit. Time is a clock of our own."""

import asyncio
from collections.abc import Iterator

import pytest

from asyncrl.observe.loop_lag import LoopLag


class HandMadeTime(asyncio.SelectorEventLoop):
    """A loop whose time moves only by hand and by its own waiting."""

    now_s = 100.0

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def loop() -> Iterator[HandMadeTime]:
    loop = HandMadeTime()
    yield loop
    loop.close()


def pass_time(loop: HandMadeTime, seconds: float) -> None:
    loop.now_s += seconds
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))


def test_a_block_is_seen_in_full_and_an_idle_loop_has_none(loop: HandMadeTime) -> None:
    lag = LoopLag(interval_s=0.125, thread_s=lambda: 0.0)
    loop.run_until_complete(lag.__aenter__())
    assert lag.stats() == {"cpu_s": 0.0}
    for _ in range(99):
        pass_time(loop, 0.125)
    pass_time(loop, 0.125 + 0.5)
    assert lag.stats() == {"cpu_s": 0.0, "p50_s": 0.0, "p99_s": 0.0, "max_s": 0.5}
    pass_time(loop, 0.125 + 0.25)
    assert lag.stats() == {"cpu_s": 0.0, "p50_s": 0.25, "p99_s": 0.25, "max_s": 0.25}, "each call reports since the last one"
    loop.run_until_complete(lag.__aexit__(None, None, None))
    pass_time(loop, 10.0)
    assert lag.stats() == {"cpu_s": 0.0}


async def test_what_the_loops_thread_computes_is_told_once() -> None:
    used_s = iter([10.0, 10.5, 12.0])
    async with LoopLag(thread_s=lambda: next(used_s)) as lag:
        assert [lag.stats()["cpu_s"], lag.stats()["cpu_s"]] == [0.5, 1.5]


async def test_it_runs_on_a_real_loop() -> None:
    async with LoopLag(interval_s=0.001) as lag:
        await asyncio.sleep(0.05)
        stats = lag.stats()
    assert stats["cpu_s"] > 0
    assert 0 <= stats["p50_s"] <= stats["p99_s"] <= stats["max_s"]
