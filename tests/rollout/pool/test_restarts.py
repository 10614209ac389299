"""Deaths and restarts: who waits gets an error, an engine comes back, and what does not come back is given up."""

import asyncio
import itertools
from typing import Any, cast

import pytest

from asyncrl.errors import EngineError
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
