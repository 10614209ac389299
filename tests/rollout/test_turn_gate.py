"""The turn gate: a turn ends under the weights that it began with, and nobody starves."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Incident, RolloutEngine, SamplingParams, WeightSnapshot
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.rollout.turn_gate import TurnGate
from asyncrl.simulation.loop import VirtualLoop


class Weights(WeightSnapshot):
    tensors = {}  # noqa: RUF012


class Inner(ScriptedEngine):
    """Answers after as many seconds as the prompt's first id says; remembers what was in flight at each publication."""

    def __init__(self, *, publish_s: float = 1.0) -> None:
        super().__init__(self._answer_late)
        self.begun: list[tuple[float, str]] = []
        self.published: list[tuple[float, int]] = []
        self.in_flight: list[list[str]] = []
        self._publish_s = publish_s
        self._now: list[str] = []

    async def _answer_late(self, request: GenerateRequest) -> Sequence[int]:
        self.begun.append((now(), request.request_id))
        self._now.append(request.request_id)
        try:
            await asyncio.sleep(request.prompt_ids[0])
        finally:
            self._now.remove(request.request_id)
        return [1]

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        self.in_flight.append(sorted(self._now))
        await asyncio.sleep(self._publish_s)
        self.in_flight[-1] = sorted({*self.in_flight[-1], *self._now})
        await super().publish(version, snapshot)
        self.published.append((now(), version))


def now() -> float:
    return asyncio.get_running_loop().time()


def call(gate: RolloutEngine, name: str, seconds: int) -> Coroutine[Any, Any, Any]:
    return gate.generate(GenerateRequest(request_id=name, prompt_ids=[seconds], sampling=SamplingParams(), seed=0))


def run_virtual(main: Callable[[], Coroutine[Any, Any, Any]], seed: int = 0) -> Any:
    loop = VirtualLoop(seed)
    try:
        return loop.run_until_complete(main())
    finally:
        loop.abandon()


def test_a_publication_waits_for_the_calls_before_it_and_later_calls_wait_for_it() -> None:
    async def main() -> Any:
        inner = Inner()
        async with TurnGate(inner, publish_timeout_s=60.0) as gate, asyncio.TaskGroup() as tasks:
            first = tasks.create_task(call(gate, "first", 10))
            await asyncio.sleep(1.0)
            tasks.create_task(gate.publish(1, Weights()))
            await asyncio.sleep(1.0)
            second = tasks.create_task(call(gate, "second", 10))
            await asyncio.sleep(1.0)
            assert gate.stats()["at_gate"] == 1.0
        return inner, first.result().token_versions(), second.result().token_versions(), gate.stats()

    inner, first, second, stats = run_virtual(main)
    assert inner.begun == [(0.0, "first"), (11.0, "second")]
    assert (inner.published, inner.in_flight) == ([(11.0, 1)], [[]])
    assert (first, second) == ([0], [1])
    assert (stats["at_gate"], stats["running"]) == (0.0, 0.0)


@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.booleans()), max_size=12),
    publications=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    seed=st.integers(0, 5),
)
def test_no_call_is_in_flight_at_a_publication_whatever_comes(
    calls: list[tuple[int, int, bool]], publications: list[int], seed: int
) -> None:
    """Calls that begin at any time, take any time, and may be cancelled half-way, under a stream of new ones."""

    async def one(gate: TurnGate, number: int, begin_s: int, seconds: int, is_cancelled: bool) -> None:
        await asyncio.sleep(begin_s)
        task = asyncio.create_task(call(gate, str(number), seconds))
        if is_cancelled:
            await asyncio.sleep(seconds / 2)
            task.cancel()
        await asyncio.wait({task})

    async def publish_all(gate: TurnGate) -> list[float]:
        waits = []
        for version, pause_s in enumerate(publications, 1):
            await asyncio.sleep(pause_s)
            asked_s = now()
            await gate.publish(version, Weights())
            waits.append(now() - asked_s)
        return waits

    async def main() -> Any:
        inner = Inner()
        async with TurnGate(inner, publish_timeout_s=1e6) as gate, asyncio.TaskGroup() as tasks:
            for number, (begin_s, seconds, is_cancelled) in enumerate(calls):
                tasks.create_task(one(gate, number, begin_s, seconds, is_cancelled))
            publishing = tasks.create_task(publish_all(gate))
        return inner, publishing.result()

    inner, waits = run_virtual(main, seed)
    assert inner.in_flight == [[]] * len(publications)
    assert all(wait <= 12.0 + 1.0 for wait in waits)  # the longest call, and the swap: new calls do not hold it up
    assert len(inner.published) == len(publications)


def test_past_its_deadline_a_publication_goes_on_in_flight_and_says_so() -> None:
    told: list[Incident] = []

    async def main() -> Any:
        inner = Inner()
        gate = TurnGate(inner, publish_timeout_s=5.0, report=told.append)
        async with gate, asyncio.TaskGroup() as tasks:
            long = tasks.create_task(call(gate, "long", 100))
            await asyncio.sleep(1.0)
            tasks.create_task(gate.publish(3, Weights()))
            await asyncio.sleep(1.0)
            late = tasks.create_task(call(gate, "late", 1))
        return inner, long.result().token_versions(), late.result().token_versions()

    inner, long, late = run_virtual(main)
    assert inner.in_flight == [["long"]]
    assert inner.published == [(7.0, 3)]
    assert (inner.begun[1], long, late) == ((7.0, "late"), [3], [3])
    (incident,) = told
    assert (str(incident.kind), incident.what, incident.limit) == ("deadline", "publish", "rollout.publish_timeout_s")
    assert incident.text == "version 3 waited rollout.publish_timeout_s = 5 s for 1 generate calls, which go on under it"


def test_who_listens_hears_a_swap_of_any_length_and_its_end_but_no_wait_for_calls_that_hang() -> None:
    async def main() -> Any:
        gate = TurnGate(Inner(publish_s=25.0), publish_timeout_s=20.0)
        hanging = asyncio.create_task(call(gate, "hanging", 10_000))
        await asyncio.sleep(1.0)
        publishing = asyncio.create_task(gate.publish(1, Weights()))
        heard = [gate.beats]
        for _ in range(6):
            await asyncio.sleep(10.0)
            heard.append(gate.beats)
        for task in (hanging, publishing):
            task.cancel()
            await asyncio.wait({task})
        return [after > before for before, after in itertools.pairwise(heard)]

    # waits for 20 s, swaps for 25 s
    assert run_virtual(main) == [False, True, True, True, True, False]


def test_the_gate_opens_again_whatever_becomes_of_a_publication() -> None:
    class Ill(Inner):
        async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
            raise EngineError("it does not fit")

    async def main() -> None:
        gate = TurnGate(Ill(), publish_timeout_s=60.0)
        with pytest.raises(EngineError, match="it does not fit"):
            await gate.publish(1, Weights())
        holding = asyncio.create_task(call(gate, "long", 100))
        await asyncio.sleep(1.0)
        waiting = asyncio.create_task(gate.publish(1, Weights()))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert (await call(gate, "after", 1)).token_ids == [1]
        assert now() == 3.0
        holding.cancel()
        await asyncio.wait({holding})
        assert gate.stats()["running"] == 0.0

    run_virtual(main)


def test_what_else_an_engine_has_is_the_engines() -> None:
    async def main() -> None:
        inner = ScriptedEngine(lambda _: [1], context_len=77, version=5)
        async with TurnGate(inner, publish_timeout_s=60.0) as gate:
            assert (gate.version, gate.context_len, gate.beats) == (5, 77, 0)
            await gate.pause()
            task = asyncio.create_task(call(gate, "a", 0))
            await asyncio.wait({task}, timeout=1.0)
            assert not task.done()
            await gate.resume()
            await task
            assert gate.beats == 1

    run_virtual(main)
