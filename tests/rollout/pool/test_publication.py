"""New weights: when `publish` returns no engine samples from older ones, whatever the engines were at, and none ever will."""

import asyncio
from typing import Any

import pytest

from asyncrl.errors import EngineError
from asyncrl.ports import Generation
from tests.rollout.pool.fakes import Rack, Weights, now, run_virtual


def test_all_engines_take_the_weights_at_once_and_requests_go_on() -> None:
    async def main() -> Any:
        rack = Rack(3)
        rack.ways[2].publish_s = 4.0
        async with rack.pool as pool:
            tasks = [asyncio.create_task(rack.ask(f"s{number}", tokens=20)) for number in range(6)]
            await asyncio.sleep(3.0)
            publishing = asyncio.create_task(pool.publish(1, Weights()))
            await asyncio.sleep(1.0)
            assert [state.version for state in pool.describe()] == [1, 1, 0]
            assert (pool.version, pool.stats()["version"]) == (0, 0)
            began = now()
            await publishing
            assert now() - began == 3.0
            assert pool.version == 1
            return [sorted(set((await task).token_ids)) for task in tasks]

    assert run_virtual(main) == [[0, 1]] * 6


def test_one_that_comes_back_has_the_newest_weights_before_it_serves() -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            await pool.publish(1, Weights())
            rack.engine(0).die()
            task = asyncio.create_task(rack.ask("a", tokens=30))  # hears of the death, and goes to the other
            await asyncio.sleep(1.0)
            newest = Weights()
            await pool.publish(2, newest)
            assert [state.version for state in pool.describe()] == [None, 2]
            answers = [await rack.ask(f"s{number}") for number in range(4)]
            await task
            later = await asyncio.gather(*(rack.ask(f"t{number}") for number in range(4)))
        assert rack.engine(0).loaded is newest
        assert {rack.went[f"t{number}-1"] for number in range(4)} == {"0.1", "1.0"}
        return {version for answer in [*answers, *later] for version in answer.token_ids}

    assert run_virtual(main) == {2}


def test_a_publication_while_none_serves_returns_at_once_and_holds() -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            rack.engine(0).die()
            rack.engine(1).die()
            task = asyncio.create_task(rack.ask("a"))
            await asyncio.sleep(1.0)
            began = now()
            await pool.publish(5, Weights())
            assert (now() - began, pool.version) == (0.0, 5)
            return (await task).token_ids

    assert run_virtual(main) == [5] * 5


def test_weights_do_not_change_between_the_look_and_the_serving() -> None:
    """An engine that comes back in the middle of a publication waits until it is decided."""

    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            await pool.publish(1, Weights())
            rack.engine(0).die()
            task = asyncio.create_task(rack.ask("a", tokens=40))
            await asyncio.sleep(4.0)
            rack.ways[1].publish_s = 10.0
            await pool.publish(2, Weights())  # the other one opens in the middle, and would have taken version 1
            assert [state.version for state in pool.describe()] == [None, 2]
            await task
            return (await rack.ask("b")).token_ids, rack.went["b-1"]

    assert run_virtual(main) == ([2] * 5, "0.1")


def test_one_that_comes_back_takes_what_is_published_while_it_takes_the_former() -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            await pool.publish(1, Weights())
            rack.engine(0).die()
            task = asyncio.create_task(rack.ask("a", tokens=40))
            rack.ways[0].publish_s = 10.0
            await asyncio.sleep(8.0)
            assert len(rack.engines[0]) == 2
            await pool.publish(2, Weights())
            await task
            return (await rack.ask("b")).token_ids, rack.went["b-1"]

    assert run_virtual(main) == ([2] * 5, "0.1")


@pytest.mark.parametrize("way", ["hang", "die", "raise"])
def test_a_publication_at_which_the_only_engine_dies_holds_for_its_successor(way: str) -> None:
    async def main() -> Any:
        rack = Rack(1)
        async with rack.pool as pool:
            rack.ways[0].failing_publications = [way]
            await pool.publish(1, Weights())
            assert pool.version == 1
            return (await rack.ask("a")).token_ids

    assert run_virtual(main) == [1] * 5


def test_a_version_that_was_seen_and_came_to_nothing_holds_nobody_up() -> None:
    """The publication is broken off when the engine samples from the new weights already, but has not said so yet."""

    async def main() -> Any:
        rack = Rack(1)
        rack.ways[0].publish_s = 5.0
        async with rack.pool as pool:
            publishing = asyncio.create_task(pool.publish(1, Weights()))
            await asyncio.sleep(0.1)
            rack.engine(0).version = 1
            assert (await rack.ask("a", tokens=1)).token_ids == [1]
            late = asyncio.create_task(rack.ask("a", tokens=100))
            await asyncio.sleep(0)
            publishing.cancel()
            with pytest.raises(EngineError, match="broken off"):
                await late
            async with asyncio.timeout(60.0):
                return (await rack.ask("a", tokens=1)).token_ids, pool.version

    assert run_virtual(main) == ([0], 0)


@pytest.mark.parametrize("way", ["hang", "die", "raise", "refuse"])
def test_one_that_does_not_take_what_others_took_is_started_anew(way: str) -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            rack.ways[0].failing_publications = [way]
            tasks = [asyncio.create_task(rack.ask(f"s{number}", tokens=60)) for number in range(2)]
            await asyncio.sleep(2.0)
            began = now()
            await pool.publish(1, Weights())
            took_s = now() - began
            assert [state.version for state in pool.describe()] == [None, 1]
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert [state.version for state in pool.describe()] == [1, 1]
            return rack, took_s, [answer for answer in answers if isinstance(answer, EngineError)]

    rack, took_s, failed = run_virtual(main)
    assert took_s == (20.0 if way == "hang" else 0.5)
    cause = {
        "hang": "it did not take version 1 within rollout.publish_timeout_s = 20 s",
        "die": "it died of new weights",
        "raise": "it failed to take version 1: ValueError: half of the weights are in",
        "refuse": "it refused version 1, which others took: 0.0: version 1 does not fit",
    }[way]
    assert [str(error) for error in failed] == [cause]
    assert rack.told("retry") == [f"engine 0 is started anew (restart 1 of 3 in a row): {cause}"]


def test_what_fits_none_is_raised_and_nothing_is_kept_of_it() -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            first = Weights()
            await pool.publish(1, first)
            with pytest.raises(EngineError, match="version 2 does not fit"):
                await pool.publish(2, Weights(fits=False))
            assert (pool.version, pool.failure) == (1, None)
            rack.engine(0).die()
            rack.engine(1).die()
            await rack.ask("a")
            assert [engine.loaded for (_, engine) in rack.engines if engine.is_open] == [first, first]
            with pytest.raises(EngineError, match="version 0 is published after version 1"):
                await pool.publish(0, Weights())
            await pool.publish(2, Weights())
            return pool.version, pool.stats()["restarts"]

    assert run_virtual(main) == (2, 2)


def test_weights_that_fit_none_do_not_replace_those_of_one_that_hangs() -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            first = Weights()
            await pool.publish(1, first)
            rack.ways[0].failing_publications = ["hang"]
            with pytest.raises(EngineError, match=r"1\.0: version 2 does not fit"):
                await pool.publish(2, Weights(fits=False))
            await asyncio.sleep(20.0)
            assert rack.engine(0).loaded is first
            return [state.version for state in pool.describe()]

    assert run_virtual(main) == [1, 1]


def test_a_publication_that_is_broken_off_leaves_no_engine_of_unknown_weights() -> None:
    """One has taken them, so they are the newest; the other was in the middle of it, and begins again with them."""

    async def main() -> Any:
        rack = Rack(2)
        rack.ways[1].publish_s = 10.0
        async with rack.pool as pool:
            task = asyncio.create_task(pool.publish(1, Weights()))
            await asyncio.sleep(5.0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [state.version for state in pool.describe()] == [1, None]
            await asyncio.sleep(20.0)
            assert [state.version for state in pool.describe()] == [1, 1]
        return rack.told("retry")

    (text,) = run_virtual(main)
    assert text.endswith("the publication of version 1 was broken off")


def test_publications_take_turns() -> None:
    async def main() -> Any:
        rack = Rack(2)
        rack.ways[1].publish_s = 10.0
        async with rack.pool as pool:
            first = asyncio.create_task(pool.publish(1, Weights()))
            await asyncio.sleep(0.1)
            second = asyncio.create_task(pool.publish(2, Weights()))
            await first
            versions = [state.version for state in pool.describe()]
            await second
            return versions, [state.version for state in pool.describe()]

    assert run_virtual(main) == ([1, 1], [2, 2])


def test_a_session_does_not_fall_back_to_older_weights() -> None:
    """Its engine has the new weights and dies; the other one takes a while. It waits for that one, or for its own."""

    async def main() -> Any:
        rack = Rack(2)
        rack.ways[1].publish_s = 15.0
        async with rack.pool as pool, asyncio.TaskGroup() as tasks:
            rack.engine(1).num_running = 0
            await rack.ask("a", tokens=1)
            assert rack.went["a-1"] == "0.0"
            tasks.create_task(pool.publish(1, Weights()))
            await asyncio.sleep(1.0)
            assert (await rack.ask("a", tokens=1)).token_ids == [1]
            rack.engine(0).die()
            other = await rack.ask("b", tokens=1)
            return (await rack.ask("a", tokens=1)).token_ids, rack.went["a-3"], other.token_ids

    assert run_virtual(main) == ([1], "0.1", [0])


# --- pausing ----------------------------------------------------------------------------------------------------------------------


def test_a_pause_reaches_all_also_who_comes_back() -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            await pool.pause()
            tasks = [asyncio.create_task(rack.ask(f"s{number}", tokens=5)) for number in range(4)]
            await asyncio.sleep(1.0)
            rack.engine(0).die()
            await asyncio.sleep(20.0)
            assert (pool.stats()["restarts"], pool.stats()["engines_down"]) == (1, 0)
            more = [asyncio.create_task(rack.ask(f"t{number}", tokens=5)) for number in range(4)]
            await asyncio.sleep(1000.0)  # nobody is slow while nobody may work
            assert (pool.stats()["engines_slow"], pool.stats()["restarts"], pool.stats()["running"]) == (0, 1, 6)
            assert not any(rack.samples.values())
            await pool.publish(1, Weights())
            await pool.resume()
            answers = await asyncio.gather(*tasks, *more, return_exceptions=True)
            return [answer.token_ids if isinstance(answer, Generation) else str(answer) for answer in answers], rack

    answers, rack = run_virtual(main)
    assert sorted(map(str, answers[:4])) == [str([1] * 5)] * 2 + ["out of luck"] * 2
    assert answers[4:] == [[1] * 5] * 4
    assert {rack.went[f"t{number}-1"] for number in range(4)} == {"0.1", "1.0"}


@pytest.mark.parametrize("seed", range(10))
def test_commands_reach_an_engine_in_their_order(seed: int) -> None:
    """Its own commands take time, and could overtake each other."""

    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool, asyncio.TaskGroup() as tasks:
            for command in (pool.pause, pool.resume, pool.pause, pool.resume):
                tasks.create_task(command())
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            return len((await rack.ask("a")).token_ids)

    assert run_virtual(main, seed) == 5


@pytest.mark.parametrize("way", ["hang", "die"])
def test_one_that_does_not_pause_is_started_anew_and_paused(way: str) -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            rack.ways[0].failing_pauses = [way]
            await pool.pause()
            task = asyncio.create_task(rack.ask("a"))
            await asyncio.sleep(50.0)
            assert not task.done()
            await pool.resume()
            return len((await task).token_ids), pool.stats()["restarts"]

    assert run_virtual(main) == (5, 1)


def test_a_pause_that_is_refused_is_raised_when_all_have_heard_of_it() -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            rack.ways[0].failing_pauses = ["refuse"]
            rack.ways[1].failing_pauses = ["hang"]
            with pytest.raises(EngineError, match=r"0\.0: not now"):
                await pool.pause()
            return now(), [state.version for state in pool.describe()]

    assert run_virtual(main) == (25.0, [0, None])


def test_one_that_comes_back_after_a_resume_makes_steps() -> None:
    async def main() -> Any:
        rack = Rack(1)
        async with rack.pool as pool:
            await pool.pause()
            await pool.resume()
            rack.engine(0).die()
            return len((await rack.ask("a")).token_ids), pool.stats()["restarts"]

    assert run_virtual(main) == (5, 1)
