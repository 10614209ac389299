"""Deaths and restarts: who waits gets an error, an engine comes back, and what does not come back is given up."""

import asyncio
import itertools
from typing import Any, cast

import pytest

from asyncrl.errors import DeadlineError, EngineError
from asyncrl.ports import RolloutEngine
from asyncrl.rollout.pool import Phase
from asyncrl.rollout.pool.tally import Tally
from tests.rollout.pool.fakes import Rack, now, run_virtual


async def results(*tasks: "asyncio.Task[Any]") -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("forgets_waiters", [False, True])
def test_who_waits_for_an_engine_that_dies_gets_its_reason_and_the_others_go_on(forgets_waiters: bool) -> None:
    async def main() -> Any:
        rack = Rack(2)
        rack.ways[0].forgets_waiters = forgets_waiters
        async with rack.pool as pool:
            tasks = [asyncio.create_task(rack.ask(f"s{number}", tokens=20)) for number in range(4)]
            await asyncio.sleep(2.5)
            rack.engine(0).die("out of luck")
            if forgets_waiters:
                with pytest.raises(EngineError, match="out of luck"):  # the first that hears of it
                    await pool._members[0].life.generate(None)  # type: ignore[union-attr, arg-type]
            answers = dict(zip(["s0-1", "s1-1", "s2-1", "s3-1"], await results(*tasks), strict=True))
        return answers, rack

    answers, rack = run_virtual(main)
    for name, answer in answers.items():
        assert rack.went[name] in ("0.0", "1.0")
        if rack.went[name] == "1.0":
            assert len(answer.token_ids) == 20
        else:
            assert isinstance(answer, EngineError)
            assert "out of luck" in str(answer)
    assert sorted(rack.went.values()) == ["0.0", "0.0", "1.0", "1.0"]
    assert rack.told("retry") == ["engine 0 is started anew (restart 1 of 3 in a row): out of luck"]


def test_shares_are_those_of_the_engines_that_are_there() -> None:
    """Their mean, and nothing of a dead one's."""

    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            tasks = [asyncio.create_task(rack.ask(str(number), tokens=60)) for number in range(6)]
            await asyncio.sleep(0.5)
            usages = [pool.stats()["kv_cache_usage"]]
            rack.engine(0).die()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(1.0)
            usages.append(pool.stats()["kv_cache_usage"])
            await asyncio.gather(*tasks, return_exceptions=True)
            usages.append(pool.stats()["kv_cache_usage"])
        return usages

    assert run_virtual(main) == [0.75, 0.75, 0.0]


def test_of_a_dead_engine_only_counters_stay() -> None:
    class Figures:
        beats = 5

        def stats(self) -> dict[str, float]:
            return {"generated_tokens": 3, "running": 2, "kv_cache_usage": 0.5}

    tally, engine = Tally(), cast(RolloutEngine, Figures())
    tally.add(engine)
    assert (tally.beats(None), tally.stats(None)) == (5, {"generated_tokens": 3})
    assert (tally.beats(engine), tally.stats(engine)) == (10, {"generated_tokens": 6, "running": 2, "kv_cache_usage": 0.5})


def test_a_dead_engine_is_closed_and_its_successor_serves() -> None:
    async def main() -> Any:
        rack = Rack(1)
        rack.ways[0].close_s = 3.0
        async with rack.pool as pool:
            task = asyncio.create_task(rack.ask("a", tokens=20))
            await asyncio.sleep(2.5)
            rack.engine(0).die()
            with pytest.raises(EngineError, match="out of luck"):
                await task
            began, before = now(), pool.beats
            assert pool.stats()["engines_down"] == 1
            assert pool.describe()[0].cause == ""
            waiting = asyncio.create_task(rack.ask("a", tokens=2))
            await asyncio.sleep(1.0)
            assert pool.stats()["at_pool"] == 1
            assert pool.beats > before
            assert pool.describe()[0].phase is Phase.CLOSING
            await waiting
            took = now() - began
            stats = pool.stats()
        return rack, took, stats, pool.describe()[0]

    rack, took, stats, state = run_virtual(main)
    assert [text for _, text in rack.notes] == ["0.0 starts", "0.0 closed", "0.1 starts", "0.1 closed"]
    assert took == 3.0 + 5.0 + 2.0
    assert rack.went["a-2"] == "0.1"
    assert (stats["restarts"], stats["engines_down"], stats["generated_tokens"]) == (1, 0, 2)
    assert (state.num_restarts, state.cause) == (1, "out of luck")


def test_an_engine_that_swallows_its_cancellation_answers_nobody_after_its_death() -> None:
    async def main() -> Any:
        rack = Rack(1)
        rack.ways[0].swallows_cancellation = rack.ways[0].forgets_waiters = True
        async with rack.pool:
            task = asyncio.create_task(rack.ask("a", tokens=100))
            await asyncio.sleep(3.5)
            rack.engine(0).die()
            assert len((await rack.ask("b")).token_ids) == 5  # hears of it
            with pytest.raises(EngineError, match="out of luck"):
                await task
            await asyncio.sleep(100.0)
            return rack.told("deadline")

    assert run_virtual(main) == []


def test_the_first_look_after_a_wait_hears_a_beat_too() -> None:
    """A session's alarm looks once while its request waits for an engine, and then before the engine's first step."""

    async def main() -> Any:
        rack = Rack(1)
        async with rack.pool as pool:
            rack.engine(0).die()
            task = asyncio.create_task(rack.ask("a", tokens=1))
            await asyncio.sleep(4.9)
            first = pool.beats
            await asyncio.sleep(1.0)
            assert pool.stats()["running"] == 1
            second, third = pool.beats, pool.beats
            await task
            return second - first, third - second

    assert run_virtual(main) == (1, 0)


def test_an_idle_death_costs_no_request() -> None:
    async def main() -> Any:
        rack = Rack(1)
        async with rack.pool:
            await rack.ask("a")
            rack.engine(0).die()
            await rack.ask("a")
        return rack

    assert run_virtual(main).went == {"a-1": "0.0", "a-2": "0.1"}


@pytest.mark.parametrize("way", ["raise", "hang", "dead"])
def test_a_start_that_fails_is_tried_again_and_then_given_up(way: str) -> None:
    """Three restarts, with 1 and 2 seconds of rest between them; the requests that wait hear a beat at each look, then the end."""

    async def main() -> Any:
        rack = Rack(1)
        async with rack.pool as pool:
            await rack.ask("a")
            rack.ways[0].failing_starts = [way] * 9
            rack.engine(0).die()
            tasks = [asyncio.create_task(rack.ask(session)) for session in "abc"]
            looks = []
            while not tasks[0].done():
                looks.append(pool.beats)
                await asyncio.wait(tasks, timeout=7.0)
            assert looks == sorted(set(looks))
            failed = await results(*tasks)
            with pytest.raises(EngineError) as late:
                await rack.ask("d")
            for call in (pool.publish(1, None), pool.pause(), pool.resume()):  # type: ignore[arg-type]
                with pytest.raises(EngineError, match="given up"):
                    await call
        return rack, failed, str(late.value), pool.describe()[0]

    rack, failed, late, state = run_virtual(main)
    assert {type(each) for each in failed} == {EngineError}
    cause = {"raise": "no memory", "hang": "did not start within rollout.start_timeout_s = 60 s", "dead": "born dead"}[way]
    assert all(cause in str(each) and "rollout.max_restarts" in str(each) for each in failed)
    assert cause in late
    assert len(rack.engines[0]) == 4
    starts = [moment for moment, text in rack.notes if text.endswith("starts")]
    took_s = {"raise": 5.0, "hang": 60.0, "dead": 5.1}[way]
    assert [after - before for before, after in itertools.pairwise(starts[1:])] == pytest.approx([took_s + 1.0, took_s + 2.0])
    assert not rack.engine(0).is_open
    assert (state.phase, state.num_restarts) == (Phase.GIVEN_UP, 3)
    assert len(rack.told("retry")) == 3
    (end,) = rack.told("failure")
    assert end.startswith("engine 0 is given up after 3 restarts in a row without an answer (rollout.max_restarts): ")


def test_an_answer_in_between_starts_the_count_again() -> None:
    async def main() -> Any:
        rack = Rack(1, max_restarts=1)
        async with rack.pool as pool:
            for _ in range(5):
                rack.engine(0).die()
                await rack.ask("a")
            return pool.stats()["restarts"], pool.failure

    assert run_virtual(main) == (5, None)


def test_deaths_without_an_answer_in_between_are_the_end() -> None:
    async def main() -> Any:
        rack = Rack(2, max_restarts=2)
        async with rack.pool as pool:
            for death in range(3):
                task = asyncio.create_task(rack.ask("a", tokens=50))
                other = asyncio.create_task(rack.ask("b", tokens=50))
                await asyncio.sleep(2.5)
                rack.engine(0).die(f"death {death}")
                rack.engine(1).die(f"other death {death}")
                await results(task, other)
                await asyncio.sleep(20.0)
            return rack, pool.failure, pool.stats(), pool.version

    rack, failure, stats, version = run_virtual(main)
    assert failure == ("no engine is left, all are given up (rollout.max_restarts): engine 0: death 2, engine 1: other death 2")
    assert (stats["engines"], stats["engines_down"], stats["restarts"], version) == (2, 2, 4, 0)
    assert len(rack.told("failure")) == 2


def test_one_that_is_given_up_leaves_its_work_to_the_others() -> None:
    async def main() -> Any:
        rack = Rack(2, max_restarts=0)
        async with rack.pool as pool:
            rack.engine(0).die("bad card")
            await asyncio.gather(*(rack.ask(f"s{number}") for number in range(6)))
            return rack, pool.failure, pool.describe()

    rack, failure, states = run_virtual(main)
    assert failure is None
    assert set(rack.went.values()) == {"1.0"}
    assert [state.phase for state in states] == [Phase.GIVEN_UP, Phase.SERVING]
    assert rack.told("failure") == ["engine 0 is given up at its first death (rollout.max_restarts): bad card"]


# --- opening and closing ----------------------------------------------------------------------------------------------------------


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
