"""Which engine a request goes to."""

import asyncio
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.pool.routing import STALE, LeastLoaded, Router
from tests.rollout.pool.fakes import Rack, Weights, run_virtual


@dataclass(slots=True)
class Thing:
    """An engine as the router sees it."""

    number: int
    load: int = 0
    takes_requests: bool = True
    version: int = 0


CHANGES = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["more", "less", "off", "on", "newer"]), st.sampled_from(["", "a", "b", "c"])),
    max_size=150,
)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 5), changes=CHANGES)
def test_the_router_agrees_with_a_search_through_all(size: int, changes: list[tuple[int, str, str]]) -> None:
    things = [Thing(number) for number in range(size)]
    router = Router(things)
    homes: dict[str, int] = {}
    seen: dict[str, int] = {}
    for number, change, session in changes:
        thing = things[number % size]
        thing.load = max(thing.load + {"more": 1, "less": -1}.get(change, 0), 0)
        thing.takes_requests = {"off": False, "on": True}.get(change, thing.takes_requests)
        thing.version += change == "newer"
        router.changed(thing)
        fit = [each for each in things if each.takes_requests and each.version >= seen.get(session, 0)]
        expected = min(fit, key=lambda each: (each.load, each.number)).number if fit else None
        if session in homes and things[homes[session]] in fit:
            expected = homes[session]
        assert router.choose(session) == expected
        if expected is not None and session:
            homes[session] = expected
            router.saw(session, things[expected].version)
            seen[session] = max(seen.get(session, 0), things[expected].version)


def test_a_change_costs_no_search_and_leaves_no_heap_behind() -> None:
    things = [Thing(number) for number in range(50)]
    least = LeastLoaded(things)
    for step in range(5000):
        number = least.choose()
        assert number is not None
        things[number].load += 1 if step % 3 else -1
        least.changed(things[number])
        assert len(least._heap) <= STALE * 50 + 1


def test_sessions_that_are_remembered_are_bounded_and_the_oldest_goes_first() -> None:
    things = [Thing(0), Thing(1)]
    router = Router(things, max_sessions=3)
    for session in "abc":
        assert router.choose(session) == 0
    things[0].load = 1
    router.changed(things[0])
    assert router.choose("a") == 0
    assert router.choose("d") == 1  # b goes
    assert [router.choose(session) for session in "acd"] == [0, 0, 1]
    assert router.choose("b") == 1
    assert len(router._homes) == 3


def test_a_session_waits_for_weights_that_it_has_seen_as_long_as_they_may_come() -> None:
    """Tokens may tell of new weights before their engine does."""
    things = [Thing(0), Thing(1)]
    router = Router(things)
    assert router.choose("a") == 0
    router.saw("a", 1)
    assert router.choose("a") is None
    assert router.choose("a", newest=0) == 0
    things[1].version = 1
    assert router.choose("a") == 1


def test_load_is_balanced_and_turns_stay_where_their_session_is() -> None:
    async def main() -> Any:
        rack = Rack(4)
        async with rack.pool:

            async def run_session(name: str) -> None:
                for turn in range(5):
                    await asyncio.sleep(0.1 * turn)
                    await rack.ask(name, tokens=3)

            async with asyncio.TaskGroup() as tasks:
                for number in range(80):
                    tasks.create_task(run_session(f"s{number}"))
        return rack

    rack = run_virtual(main)
    places = {name.split("-")[0]: {rack.went[f"{name.split('-')[0]}-{turn}"] for turn in range(1, 6)} for name in rack.went}
    assert all(len(engines) == 1 for engines in places.values())
    counts = [sum(engine == f"{place}.0" for (engine,) in places.values()) for place in range(4)]
    assert counts == [20, 20, 20, 20]


def test_a_request_without_a_session_goes_where_there_is_room() -> None:
    async def main() -> Any:
        rack = Rack(2)
        async with rack.pool, asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(rack.ask("", tokens=50))
                await asyncio.sleep(1.0)
            rack.ways[0].step_s = 0.1
        return [rack.went[f"-{number}"] for number in (1, 2, 3)]

    assert run_virtual(main) == ["0.0", "1.0", "0.0"]


def test_a_session_that_waits_for_newer_weights_hears_of_them() -> None:
    """It has seen version 1 on an engine that is gone; the other one takes it later, and nothing else happens."""

    async def main() -> Any:
        rack = Rack(2, max_restarts=0)
        rack.ways[1].publish_s = 15.0
        async with rack.pool as pool, asyncio.TaskGroup() as tasks:
            tasks.create_task(pool.publish(1, Weights()))
            await asyncio.sleep(1.0)
            await rack.ask("a", tokens=1)
            assert rack.went["a-1"] == "0.0"
            rack.engine(0).die()
            async with asyncio.timeout(30.0):
                return (await rack.ask("a", tokens=1)).token_ids, rack.went["a-2"]

    assert run_virtual(main) == ([1], "1.0")
