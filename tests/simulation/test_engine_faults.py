"""Simulated engines under the product's pool: each way in which one can end, and what is told of it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from asyncrl.config.simulation import Scenario
from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, SamplingParams
from asyncrl.rollout.pool import Phase
from asyncrl.simulation.edges.engine import CLOSE_S, SimEngine
from asyncrl.simulation.edges.engines import SimEngines
from asyncrl.simulation.edges.policy import SimSnapshot
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.loop import Order, VirtualLoop
from asyncrl.simulation.seams import EngineDeath, Seams
from asyncrl.simulation.world import SimWorld

DOWN_S, STEP_S, NUM_TOKENS = 10.0, 0.1, 20


@dataclass
class Trouble(Seams):
    """`deaths` and `hangs_s`: of the next calls that an engine takes, one after the other."""

    deaths: list[EngineDeath | None] = field(default_factory=list)
    hangs_s: list[float | None] = field(default_factory=list)
    told: list[tuple[str, str, float, float]] = field(default_factory=list)
    served_by: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def engine_dies(self) -> EngineDeath | None:
        return self.deaths.pop(0) if self.deaths else None

    def hangs(self, request_id: str) -> float | None:
        return self.hangs_s.pop(0) if self.hangs_s else None

    def taken(self, request: GenerateRequest, engine: SimEngine) -> None:
        self.served_by.append(engine.name)

    def busy(self, who: str, what: str, start_s: float, end_s: float) -> None:
        self.told.append((who, what, start_s, end_s))


def scenario(count: int) -> Scenario:
    return Scenario.model_validate(
        {
            "data": {"max_prompt_length": 8, "max_response_length": 64},
            "rollout": {"max_num_seqs": 2, "request_timeout_s": 40, "slow_after_s": 4, "publish_timeout_s": 5},
            "trainer": {"total_training_steps": 1},
            "sim": {
                "sessions": {"turn_len": NUM_TOKENS},
                "engine": {"count": count, "decode_step_s": STEP_S, "decode_row_s": 0.0, "down_s": DOWN_S},
                "training": {"publish_s": 1.0},
            },
        }
    )


def run(trouble: Trouble, story: Callable[[SimEngines], Awaitable[None]], *, count: int = 1) -> float:
    """The story with the engines open, on virtual time; returns when it is over, the closing included."""
    loop = VirtualLoop(0, order=Order.STRICT)

    async def tell() -> None:
        async with SimEngines(scenario(count), SimWorld(loop, run_seed=0, log=EventLog()), trouble) as engines:
            await story(engines)

    loop.run_until_complete(tell())
    ended_s = loop.time()
    loop.close()
    return ended_s


def request(name: str, session: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=64)
    return GenerateRequest(request_id=name, session=session, prompt_ids=[1, 2], sampling=sampling, seed=1)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_engine_that_dies_fails_its_calls_and_another_one_is_there_when_it_is_up() -> None:
    trouble = Trouble(deaths=[None, EngineDeath.AT_ONCE])

    async def story(engines: SimEngines) -> None:
        first = asyncio.create_task(engines.generate(request("a")))
        await asyncio.sleep(0.5)
        with pytest.raises(EngineError, match="engine 0 died"):
            await engines.generate(request("b"))
        with pytest.raises(EngineError, match="engine 0 died"):
            await first
        await engines.generate(request("c"))
        assert now() == pytest.approx(0.5 + DOWN_S + NUM_TOKENS * STEP_S, abs=0.1)
        assert engines.stats()["restarts"] == 1
        assert engines.stats()["generated_tokens"] == NUM_TOKENS

    run(trouble, story)
    assert ("engine 0", "down", 0.5, 0.5 + DOWN_S) in trouble.told


def test_a_start_that_fails_is_one_more_restart() -> None:
    async def story(engines: SimEngines) -> None:
        with pytest.raises(EngineError):
            await engines.generate(request("a"))
        await engines.generate(request("b"))
        (state,) = engines.describe()
        assert state.num_restarts == 2
        assert now() > 2 * DOWN_S

    run(Trouble(deaths=[EngineDeath.AND_AT_START]), story)


def test_an_engine_that_dies_with_half_of_the_weights_comes_back_with_all_of_them() -> None:
    async def story(engines: SimEngines) -> None:
        await engines.generate(request("a"))
        await engines.publish(3, SimSnapshot(lineage=((),) * 3))
        assert (engines.version, engines.published, engines.weights_step) == (3, 3, 3)
        assert [state.phase for state in engines.describe()] != [Phase.SERVING]
        made = await engines.generate(request("b"))
        assert made.token_versions() == [3] * NUM_TOKENS
        assert engines.stats()["restarts"] == 1

    run(Trouble(deaths=[EngineDeath.WITH_WEIGHTS]), story)


def test_an_engine_that_hangs_loses_its_sessions_and_is_ended_though_it_tells_nobody() -> None:
    """20 s are half of the request's limit; then it is closed, for as long as that takes."""
    trouble = Trouble(hangs_s=[None, None, 1e6])

    async def story(engines: SimEngines) -> None:
        for name in ("a", "b"):
            await engines.generate(request(name, name))
        lost = asyncio.create_task(engines.generate(request("a2", "b")))
        await asyncio.sleep(6)
        assert [state.is_slow for state in engines.describe()] == [
            trouble.served_by[-1] == "engine 0",
            trouble.served_by[-1] == "engine 1",
        ]
        await engines.generate(request("b2", "b"))
        assert trouble.served_by[-1] != trouble.served_by[-2]
        with pytest.raises(EngineError, match="no step"):
            await lost
        assert now() == pytest.approx(4 + 20, abs=2.5)
        await asyncio.sleep(CLOSE_S + DOWN_S + 1)
        assert [state.phase for state in engines.describe()] == [Phase.SERVING] * 2

    run(trouble, story, count=2)


def test_an_engine_that_hangs_takes_no_weights_and_the_publication_ends_it() -> None:
    async def story(engines: SimEngines) -> None:
        lost = asyncio.create_task(engines.generate(request("a")))
        await asyncio.sleep(1)
        await engines.publish(1, SimSnapshot(lineage=((),)))
        assert now() == pytest.approx(1 + 5)
        with pytest.raises(EngineError, match=r"did not take version 1 within rollout\.publish_timeout_s = 5 s"):
            await lost
        assert engines.version == 1

    assert run(Trouble(hangs_s=[1e6]), story) >= 6 + CLOSE_S, "its closing was waited for"


def test_each_engine_has_its_weights_when_a_publication_is_over() -> None:
    async def story(engines: SimEngines) -> None:
        calls = [asyncio.create_task(engines.generate(request(str(number)))) for number in range(4)]
        await asyncio.sleep(0.5)
        await engines.publish(2, SimSnapshot(lineage=((), ())))
        assert [state.version for state in engines.describe()] == [2, 2]
        for call in calls:
            assert set((await call).token_versions()) == {0, 2}

    trouble = Trouble()
    run(trouble, story, count=2)
    assert sorted(trouble.served_by) == ["engine 0"] * 2 + ["engine 1"] * 2
    assert [entry for entry in trouble.told if entry[0] == "trainer"] == [("trainer", "publish", 0.5, 1.5)]
