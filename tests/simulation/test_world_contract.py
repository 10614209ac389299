"""What `World.offload` promises, asked of the real world and of the simulated one alike; and that the simulated one keeps time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import pytest

from asyncrl.errors import DeadlineError
from asyncrl.ports import World
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.loop import Order, VirtualLoop
from asyncrl.simulation.world import SimWorld
from asyncrl.world import RealWorld

UNIT_S = 0.05


class Kit(Protocol):
    """A world, and blocking work in it."""

    def run(self, story: Callable[[World], Awaitable[None]], *, pools: Mapping[str, int] | None = None) -> None: ...

    def work(self, units: float) -> None:
        """Blocks for so many units; to be offloaded."""
        ...


class RealKit:
    def run(self, story: Callable[[World], Awaitable[None]], *, pools: Mapping[str, int] | None = None) -> None:
        async def main() -> None:
            async with RealWorld(pools=pools) as world:
                await story(world)

        asyncio.run(main())

    def work(self, units: float) -> None:
        time.sleep(units * UNIT_S)


class SimKit:
    world: SimWorld

    def run(self, story: Callable[[World], Awaitable[None]], *, pools: Mapping[str, int] | None = None) -> None:
        loop = VirtualLoop(0, order=Order.STRICT)
        self.world = SimWorld(loop, run_seed=0, log=EventLog(), pools=pools)

        async def main() -> None:
            await story(self.world)

        try:
            loop.run_until_complete(main())
        finally:
            loop.abandon()

    def work(self, units: float) -> None:
        self.world.spend(units * UNIT_S)


@pytest.fixture(params=[RealKit, SimKit], ids=["real", "simulated"])
def kit(request: pytest.FixtureRequest) -> Kit:
    made: Kit = request.param()
    return made


async def until(condition: Callable[[], bool]) -> None:
    """Real threads end when they like."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  what is asked has no event
            await asyncio.sleep(UNIT_S / 10)


def test_results_and_errors_come_back(kit: Kit) -> None:
    async def story(world: World) -> None:
        assert await world.offload(divmod, 7, 3) == (2, 1)
        with pytest.raises(ZeroDivisionError):
            await world.offload(divmod, 1, 0, pool="model")
        with pytest.raises(RuntimeError, match="next raised StopIteration"):
            await world.offload(next, iter(()), timeout_s=60)

    kit.run(story)


def test_a_deadline_names_the_work_which_is_counted_until_it_ends(kit: Kit) -> None:
    async def story(world: World) -> None:
        with pytest.raises(DeadlineError, match=r"work in pool 'tools' took longer than 0\.01 s"):
            await world.offload(kit.work, 4, pool="tools", timeout_s=0.01)
        assert (world.abandoned("tools"), world.abandoned("files")) == (1, 0)
        await until(lambda: world.abandoned("tools") == 0)

    kit.run(story)


def test_the_works_own_timeout_is_not_the_deadline(kit: Kit) -> None:
    def raises() -> None:
        raise TimeoutError("the server's")

    async def story(world: World) -> None:
        with pytest.raises(TimeoutError, match="the server's") as caught:
            await world.offload(raises, timeout_s=60)
        assert not isinstance(caught.value, DeadlineError)

    kit.run(story)


def test_a_cancelled_caller_leaves_its_thread_busy(kit: Kit) -> None:
    async def story(world: World) -> None:
        task = asyncio.create_task(world.offload(kit.work, 4))
        await asyncio.sleep(UNIT_S / 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.abandoned("files") == 1
        await until(lambda: world.abandoned("files") == 0)

    kit.run(story)


@pytest.mark.parametrize("by_deadline", [False, True])
def test_what_is_given_up_in_the_queue_never_runs_and_holds_no_thread(kit: Kit, by_deadline: bool) -> None:
    async def story(world: World) -> None:
        ran: list[str] = []
        first = asyncio.create_task(world.offload(kit.work, 4, pool="model"))
        await asyncio.sleep(0)
        queued = asyncio.create_task(world.offload(ran.append, "x", pool="model", timeout_s=UNIT_S if by_deadline else None))
        await asyncio.sleep(UNIT_S / 2)
        if not by_deadline:
            queued.cancel()
        found = await asyncio.gather(queued, return_exceptions=True)
        assert isinstance(found[0], DeadlineError if by_deadline else asyncio.CancelledError)
        assert world.abandoned("model") == 0
        await first
        assert await world.offload(lambda: list(ran), pool="model") == []

    kit.run(story)


def test_a_pool_runs_as_many_at_once_as_it_has_threads_and_in_order(kit: Kit) -> None:
    order: list[int] = []

    def work(number: int) -> None:
        order.append(number)
        kit.work(1)

    async def story(world: World) -> None:
        tasks = [asyncio.create_task(world.offload(work, number, pool="model")) for number in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(UNIT_S / 2)
        assert order == [0]
        await asyncio.gather(*tasks)
        assert sorted(order) == [0, 1, 2, 3]

    kit.run(story, pools={"model": 1})


def test_simulated_work_takes_its_time_and_its_pools() -> None:
    loop = VirtualLoop(0, order=Order.STRICT)
    world = SimWorld(loop, run_seed=0, log=EventLog(), call_s=0.5, calls_s={"model": 1.0}, pools={"tools": 3})

    async def main() -> list[float]:
        async def timed(pool: str, seconds: float) -> float:
            await world.offload(world.spend, seconds, pool=pool)
            return world.now()

        return await asyncio.gather(*(timed("tools", 2.0) for _ in range(4)), timed("model", 0.0), timed("model", 0.25))

    assert sorted(loop.run_until_complete(main())) == [1.5, 2.5, 2.5, 2.5, 3.25, 5.0]
    loop.close()
