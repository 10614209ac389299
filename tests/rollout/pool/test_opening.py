"""Opening and closing: the first error of any engine is raised, and nothing is left of the others; closing fails who waits."""

import asyncio
from typing import Any

import pytest

from asyncrl.errors import DeadlineError, EngineError
from tests.rollout.pool.fakes import Rack, now, run_virtual
from tests.rollout.pool.test_restarts import results


@pytest.mark.parametrize(
    ("way", "error", "text"),
    [
        ("raise", RuntimeError, "1.0 has no memory"),
        ("hang", DeadlineError, r"engine 1 did not start within rollout\.start_timeout_s = 60 s"),
        ("dead", EngineError, "engine 1 died as it started: 1.0 was born dead"),
    ],
)
def test_the_first_start_raises_what_went_wrong_and_closes_the_others(way: str, error: type[Exception], text: str) -> None:
    async def main() -> Any:
        rack = Rack(3)
        rack.ways[1].failing_starts = [way]
        rack.ways[2].start_s = 59.0
        with pytest.raises(error, match=text):
            async with rack.pool:
                raise AssertionError
        assert len(asyncio.all_tasks()) == 1
        return rack

    rack = run_virtual(main)
    assert [len(engines) for engines in rack.engines] == [1, 1, 1]
    assert not any(engine.is_open for (engine,) in rack.engines)
    assert rack.incidents == []


def test_of_several_starts_that_fail_the_first_is_raised() -> None:
    async def main() -> Any:
        rack = Rack(3)
        for ways in rack.ways:
            ways.failing_starts = ["raise"]
        with pytest.raises(RuntimeError, match=r"0\.0 has no memory"):
            async with rack.pool:
                raise AssertionError

    run_virtual(main)  # which raises for an error that nobody has looked at


def test_a_mistake_of_the_pool_s_own_ends_whoever_has_opened_it() -> None:
    async def main() -> Any:
        rack = Rack(2)

        def report(_: Any) -> None:
            raise ZeroDivisionError("a report that raises")

        async def own() -> None:
            async with rack.pool:
                rack.engine(0).die()
                await rack.ask("a")
                await asyncio.sleep(1e6)

        rack.pool.tell(report)
        with pytest.raises(ZeroDivisionError, match="a report that raises"):
            await own()
        assert len(asyncio.all_tasks()) == 1
        assert not rack.engine(1).is_open

    run_virtual(main)


def test_engines_start_at_once() -> None:
    async def main() -> Any:
        rack = Rack(4)
        async with rack.pool:
            return now()

    assert run_virtual(main) == 5.0


@pytest.mark.parametrize("moment_s", [0.0, 0.5, 3.0, 7.0, 9.0, 30.0])
def test_closing_fails_who_waits_and_leaves_nothing(moment_s: float) -> None:
    """In the middle of a generation, of a closing, of a restart, and while it serves again."""

    async def main() -> Any:
        rack = Rack(2)
        rack.ways[0].close_s = rack.ways[1].close_s = 2.0
        async with rack.pool as pool:
            tasks = [asyncio.create_task(rack.ask(f"s{number}", tokens=500)) for number in range(3)]
            await asyncio.sleep(1.0)
            rack.engine(0).die()
            late = asyncio.create_task(rack.ask("late", tokens=500))
            await asyncio.sleep(moment_s)
        answers = await results(*tasks, late)
        with pytest.raises(EngineError, match="closed"):
            await rack.ask("a")
        assert len(asyncio.all_tasks()) == 1
        return answers, rack, pool.failure

    answers, rack, failure = run_virtual(main)
    assert all(isinstance(answer, EngineError) for answer in answers)
    assert {"closed" in str(answer) or "out of luck" in str(answer) for answer in answers} == {True}
    assert not any(engine.is_open for engines in rack.engines for engine in engines)
    assert failure == "the pool of engines was closed"
    assert rack.told("failure") == []


def test_a_closing_that_hangs_is_left_behind_and_told() -> None:
    async def main() -> Any:
        rack = Rack(1)
        rack.ways[0].close_s = 1e6
        async with rack.pool:
            pass
        return rack, now()

    rack, ended_s = run_virtual(main)
    assert ended_s == 15.0
    assert rack.told("failure") == ["engine 0 did not close within 10 s; it is left behind"]


def test_the_body_s_own_error_leaves_as_it_is() -> None:
    async def main() -> Any:
        rack = Rack(2)
        with pytest.raises(KeyError, match="of the body"):
            async with rack.pool:
                raise KeyError("of the body")
        return rack

    assert not run_virtual(main).engine(0).is_open


@pytest.mark.parametrize("moment_s", [1.0, 6.0, 8.0])
def test_cancelling_the_owner_closes_the_engines(moment_s: float) -> None:
    """While they open, while they serve, and while one closes."""

    async def main() -> Any:
        rack = Rack(2)
        rack.ways[0].close_s = 3.0

        async def own() -> None:
            async with rack.pool:
                await asyncio.sleep(2.0)
                rack.engine(0).die()
                await rack.ask("a")
                await asyncio.sleep(1e6)

        owner = asyncio.create_task(own())
        await asyncio.sleep(moment_s)
        owner.cancel()
        (ended,) = await results(owner)
        assert isinstance(ended, asyncio.CancelledError)
        assert len(asyncio.all_tasks()) == 1
        return rack

    rack = run_virtual(main)
    assert not any(engine.is_open for (engine,) in rack.engines)


def test_a_successor_with_a_smaller_context_does_not_serve() -> None:
    async def main() -> Any:
        rack = Rack(1)
        async with rack.pool as pool:
            assert pool.context_len == 1 << 20
            rack.ways[0].context_len = 1000
            rack.engine(0).die()
            with pytest.raises(EngineError, match="its context is of 1000 tokens, and it was of 1048576"):
                await rack.ask("a")

    run_virtual(main)


def test_before_it_is_opened_it_says_so() -> None:
    async def main() -> Any:
        pool = Rack(1).pool
        assert "async with" in str(pool.failure)
        assert (pool.version, pool.beats, pool.stats()["engines"]) == (0, 0, 1)
        with pytest.raises(EngineError, match="async with"):
            _ = pool.context_len

    run_virtual(main)
