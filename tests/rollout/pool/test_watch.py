"""The watch: who makes no step gets nothing further, then is dead; who has no requests is not watched."""

import asyncio
from typing import Any

import pytest

from asyncrl.errors import EngineError
from asyncrl.rollout.pool.watch import Watch
from tests.rollout.pool.fakes import Rack, Weights, now, run_virtual


def test_a_slow_engine_gets_no_request_until_it_makes_a_step() -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool as pool:
            first = [asyncio.create_task(rack.ask(f"s{number}", tokens=3)) for number in range(2)]
            await asyncio.gather(*first)
            slow, home = rack.engine(0), next(name for name, went in rack.went.items() if went == "0.0")[:2]
            slow.hang()
            stuck = asyncio.create_task(rack.ask(home, tokens=10))
            await asyncio.sleep(0)
            assert rack.went[f"{home}-2"] == "0.0"
            await asyncio.sleep(10.0)
            assert [state.is_slow for state in pool.describe()] == [True, False]
            assert pool.stats()["engines_slow"] == 1
            await asyncio.gather(*(rack.ask(f"n{number}", tokens=1) for number in range(4)), rack.ask(home, tokens=1))
            assert {rack.went[f"n{number}-1"] for number in range(4)} == {rack.went[f"{home}-3"]} == {"1.0"}
            slow.go_on()
            await asyncio.sleep(0.5)  # the next look
            assert pool.stats()["engines_slow"] == 0
            await asyncio.gather(*(rack.ask(f"m{number}", tokens=1) for number in range(4)))
            assert {rack.went[f"m{number}-1"] for number in range(4)} == {"0.0", "1.0"}
            await rack.ask(home, tokens=1)
            assert rack.went[f"{home}-4"] == "1.0"  # it has moved, and stays
            return len((await stuck).token_ids), rack

    num_tokens, rack = run_virtual(main)
    assert num_tokens == 10
    assert rack.told("deadline") == [
        "engine 0 has made no step for rollout.slow_after_s = 8 s and has 1 requests; it takes no further ones until it makes one"
    ]
    assert rack.told("retry") == []


def test_an_engine_that_hangs_is_dead_and_its_requests_fail_in_time() -> None:
    async def main() -> Any:
        rack = Rack(1)
        async with rack.pool:
            task = asyncio.create_task(rack.ask("a", tokens=100))
            await asyncio.sleep(4.5)
            rack.engine(0).hang()
            began = now()
            await asyncio.sleep(15.0)
            beats = rack.pool.beats
            assert rack.pool.beats > beats  # the sessions' own alarm leaves it to the watch
            with pytest.raises(EngineError, match="no step for 40 s and has 1 requests"):
                await task
            failed_s = now() - began
            await rack.ask("a", tokens=1)
            return failed_s, rack.went["a-2"], rack

    failed_s, went, rack = run_virtual(main)
    assert 39.0 <= failed_s <= 42.0
    assert went == "0.1"
    assert len(rack.told("deadline")) == 2
    assert len(rack.told("retry")) == 1


def test_requests_wait_while_the_only_engine_is_slow() -> None:
    async def main() -> Any:
        rack = Rack(1)
        async with rack.pool as pool:
            task = asyncio.create_task(rack.ask("a", tokens=4))
            await asyncio.sleep(1.5)
            rack.engine(0).hang()
            await asyncio.sleep(12.0)
            waiting = asyncio.create_task(rack.ask("b", tokens=1))
            await asyncio.sleep(5.0)
            assert pool.stats()["at_pool"] == 1
            rack.engine(0).go_on()
            return len((await task).token_ids), len((await waiting).token_ids), rack

    num_first, num_second, rack = run_virtual(main)
    assert (num_first, num_second) == (4, 1)
    assert len(rack.told("deadline")) == 1


def test_a_hang_is_found_though_its_callers_give_up_and_others_come() -> None:
    async def main() -> Any:
        rack = Rack(1)
        async with rack.pool as pool:
            rack.engine(0).hang()
            for _ in range(5):
                with pytest.raises((TimeoutError, EngineError)):
                    async with asyncio.timeout(9.0):
                        await rack.ask("a")
                await asyncio.sleep(100.0)
            return pool.stats()["restarts"], len((await rack.ask("a")).token_ids)

    assert run_virtual(main) == (1, 5)


def test_an_engine_with_long_steps_is_not_dead_and_an_idle_one_not_watched() -> None:
    async def main() -> Any:
        rack = Rack(1)
        rack.ways[0].step_s = 35.0
        async with rack.pool as pool:
            began = asyncio.get_running_loop().time()
            await rack.ask("a", tokens=10)
            took_s = now() - began
            await asyncio.sleep(1e5)
            return took_s, pool.stats()["restarts"], pool.stats()["engines_slow"]

    assert run_virtual(main) == (350.0, 0, 0)


def test_a_publication_is_no_silence() -> None:
    async def main() -> Any:
        rack = Rack(1, publish_timeout_s=300.0)
        rack.ways[0].publish_s = 200.0
        async with rack.pool as pool:
            rack.engine(0).hang()
            task = asyncio.create_task(rack.ask("a", tokens=3))
            publishing = asyncio.create_task(_publish_and_go_on(rack))
            await asyncio.sleep(100.0)
            beats = pool.beats
            assert pool.beats > beats  # the sessions' own alarm hears that there is hope
            await publishing
            return len((await task).token_ids), rack.incidents

    async def _publish_and_go_on(rack: Rack) -> None:
        rack.engine(0).hangs = False  # a publication of one that hangs would not end
        await rack.pool.publish(1, Weights())
        rack.engine(0).go_on()

    assert run_virtual(main) == (3, [])


# --- alone ------------------------------------------------------------------------------------------------------------------------


class Heart:
    """Beats when told."""

    def __init__(self) -> None:
        self.beats = 0
        self.log: list[tuple[float, str]] = []
        self.watch = Watch(
            lambda: self.beats, slow_after_s=8.0, hung_after_s=20.0, changed=lambda: self.note(""), hung=lambda: self.note("hung")
        )

    def note(self, what: str) -> None:
        self.log.append((now(), what or ("slow" if self.watch.is_slow else "well")))


@pytest.mark.parametrize(
    ("beats_at", "answers_at", "expected"),
    [
        ([], [], [(8.0, "slow"), (20.0, "hung")]),
        ([1.0], [], [(10.0, "slow"), (22.0, "hung")]),  # seen at the look at 2 s
        ([7.9], [], [(16.0, "slow"), (28.0, "hung")]),
        ([], [7.9], [(15.9, "slow"), (27.9, "hung")]),
        ([12.0], [], [(8.0, "slow"), (12.0, "well"), (20.0, "slow"), (32.0, "hung")]),
        ([], [12.0], [(8.0, "slow"), (12.0, "well"), (20.0, "slow"), (32.0, "hung")]),
        ([1.0, 6.0, 11.0, 16.0, 21.0], [], [(30.0, "slow"), (42.0, "hung")]),
    ],
)
def test_when_it_is_slow_and_when_hung(beats_at: list[float], answers_at: list[float], expected: list[Any]) -> None:
    async def main() -> Any:
        heart = Heart()
        heart.watch.start()
        loop = asyncio.get_running_loop()
        for moment in beats_at:
            loop.call_at(moment - 1e-6, lambda: setattr(heart, "beats", heart.beats + 1))
        for moment in answers_at:
            loop.call_at(moment, heart.watch.heard)
        await asyncio.sleep(200.0)
        return heart.log

    log = run_virtual(main)
    assert [what for _, what in log] == [what for _, what in expected]
    assert [moment for moment, _ in log] == pytest.approx([moment for moment, _ in expected], abs=0.01)


def test_silence_counts_only_with_requests_and_ends_with_a_step() -> None:
    async def main() -> Any:
        heart = Heart()
        for seconds in (5.0, 5.0):
            heart.watch.start()
            heart.watch.start()
            await asyncio.sleep(seconds)
            heart.watch.stop()
            heart.watch.stop()
            await asyncio.sleep(1000.0)
        assert [what for _, what in heart.log] == ["slow", "well"]  # after 8 s of the 10; well, for it owes nothing
        heart.watch.start()
        heart.watch.stop()
        assert [what for _, what in heart.log[2:]] == ["slow", "well"]  # what it was silent before counts
        heart.beats += 1  # it has worked it off meanwhile
        heart.watch.start()
        await asyncio.sleep(7.9)
        assert len(heart.log) == 4
        heart.watch.stop()

    run_virtual(main)


def test_no_timer_is_left_when_nothing_runs() -> None:
    """Nothing wakes up in a day without requests."""

    async def main() -> Any:
        rack = Rack(3)
        async with rack.pool:
            await rack.ask("a")
            loop = asyncio.get_running_loop()
            return sum(not timer.cancelled() for _, _, timer in loop._scheduled)  # type: ignore[attr-defined]

    assert run_virtual(main) == 0
