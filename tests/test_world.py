"""The real world: deadlines, abandoned threads, and seeds that are the same everywhere."""

import asyncio
import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import DeadlineError
from asyncrl.event_loop import run_loop
from asyncrl.world import DaemonPool, RealWorld, derive_seed


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hung function waits for; opened at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


async def _until(condition: "asyncio.Event") -> None:
    async with asyncio.timeout(10):
        await condition.wait()


async def test_offload_returns_the_result_and_raises_the_error() -> None:
    async with RealWorld() as world:
        assert await world.offload(divmod, 7, 3) == (2, 1)
        assert await world.offload(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await world.offload(divmod, 1, 0)


async def test_a_deadline_names_function_pool_and_seconds_and_counts_the_thread(gate: threading.Event) -> None:
    async with RealWorld() as world:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hung_tool() -> None:
            loop.call_soon_threadsafe(started.set)
            gate.wait()

        with pytest.raises(DeadlineError, match=r"hung_tool in pool 'tools' took longer than 0\.01 s"):
            await world.offload(hung_tool, pool="tools", timeout_s=0.01)
        await _until(started)
        assert world.abandoned("tools") == 1
        assert world.abandoned("files") == 0
        gate.set()
        world._pools["tools"].close()
        for thread in threading.enumerate():
            if thread.name.startswith("asyncrl-tools"):
                await asyncio.to_thread(thread.join, 10)
        assert world.abandoned("tools") == 0, "a thread that ended is no longer abandoned"


async def test_a_cancelled_caller_leaves_a_counted_thread(gate: threading.Event) -> None:
    async with RealWorld() as world:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            loop.call_soon_threadsafe(started.set)
            gate.wait()

        task = asyncio.create_task(world.offload(work))
        await _until(started)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.abandoned("files") == 1


async def test_work_whose_deadline_passes_in_the_queue_never_runs(gate: threading.Event) -> None:
    async with RealWorld(pools={"model": 1}) as world:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def occupy() -> str:
            loop.call_soon_threadsafe(started.set)
            gate.wait()
            return "done"

        ran: list[int] = []
        first = asyncio.create_task(world.offload(occupy, pool="model"))
        await _until(started)
        with pytest.raises(DeadlineError):
            await world.offload(ran.append, 1, pool="model", timeout_s=0.01)
        assert world.abandoned("model") == 0, "it never started, so it holds no thread"
        gate.set()
        assert await first == "done"
        assert await world.offload(len, ran, pool="model") == 0


async def test_the_functions_own_timeout_error_is_not_our_deadline() -> None:
    def raises() -> None:
        raise TimeoutError("the server's")

    async with RealWorld() as world:
        with pytest.raises(TimeoutError, match="the server's") as caught:
            await world.offload(raises, timeout_s=60)
        assert not isinstance(caught.value, DeadlineError)


async def test_stop_iteration_reaches_the_waiter_instead_of_hanging_it() -> None:
    async with RealWorld() as world:
        with pytest.raises(RuntimeError, match="next raised StopIteration"):
            await world.offload(next, iter(()), timeout_s=60)


async def test_a_closed_world_refuses_work_instead_of_hanging() -> None:
    async with RealWorld() as world:
        await world.offload(len, "")
    with pytest.raises(RuntimeError, match="thread pool 'files' is closed"):
        await world.offload(len, "")


async def test_a_pool_grows_to_its_size_and_no_further() -> None:
    async with RealWorld(pools={"tools": 3}) as world:
        barrier = threading.Barrier(3, timeout=10)
        # three waiting at once need three threads; six calls share them
        await asyncio.gather(*(world.offload(barrier.wait, pool="tools") for _ in range(6)))
        names = await asyncio.gather(*(world.offload(threading.current_thread, pool="tools") for _ in range(20)))
        assert len({thread.name for thread in names}) <= 3


def test_an_idle_thread_keeps_no_result_alive() -> None:
    class Payload:
        pass

    pool, freed = DaemonPool("probe", 1), threading.Event()
    payload = pool.submit(Payload).result(timeout=10)
    alive = weakref.ref(payload, lambda _: freed.set())
    del payload
    assert freed.wait(timeout=10), f"{alive()} is still held by the pool's idle thread"
    pool.close()


def test_a_hung_thread_does_not_keep_the_process_alive() -> None:
    code = """if True:
        import asyncio, threading
        from asyncrl.errors import DeadlineError
        from asyncrl.world import RealWorld

        async def main():
            async with RealWorld() as world:
                try:
                    await world.offload(threading.Event().wait, pool="tools", timeout_s=0.05)
                except DeadlineError:
                    print("abandoned", world.abandoned("tools"))

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "abandoned 1\n"


def test_pool_threads_are_daemons() -> None:
    pool = DaemonPool("probe", 1)
    thread = pool.submit(threading.current_thread).result(timeout=10)
    pool.close()
    assert thread.daemon
    assert thread.name == "asyncrl-probe-0"


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_seeds_and_uids_are_the_same_in_every_process(hash_seed: str) -> None:
    code = "from asyncrl.world import RealWorld; w = RealWorld(run_seed=7); print(w.seed('turn', 3, 'é'), w.uid(5))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    # A fixed number: a change of the derivation changes every run's data order and samples, and must be seen.
    assert done.stdout.split() == ["8882326736694527786", "02109a0c44afe70f"]


@given(parts=st.lists(st.one_of(st.text(), st.integers())), others=st.lists(st.one_of(st.text(), st.integers())))
def test_different_parts_give_different_seeds(parts: list[str | int], others: list[str | int]) -> None:
    assert (derive_seed(*parts) == derive_seed(*others)) == (parts == others)
    assert 0 <= derive_seed(*parts) < 2**63


def test_seeds_tell_kinds_and_borders_apart() -> None:
    cases: list[tuple[str | int, ...]] = [("1",), (1,), ("1", ""), ("", "1"), ("a\x1fstr:b",), ("a", "b"), ("ab",), ()]
    assert len({derive_seed(*parts) for parts in cases}) == len(cases)


def test_uids_of_a_run_are_sixteen_hex_digits_and_differ() -> None:
    world, other = RealWorld(run_seed=1), RealWorld(run_seed=2)
    uids = [world.uid(number) for number in range(1000)]
    assert len(set(uids)) == 1000
    assert all(len(uid) == 16 and int(uid, 16) >= 0 for uid in uids)
    assert world.uid(0) != other.uid(0)


def test_now_tells_less_than_a_millisecond_apart_on_the_loop_of_a_run() -> None:
    async def seen(world: RealWorld) -> set[float]:
        return {world.now() for _ in range(10_000)}

    times = sorted(run_loop(seen(RealWorld())))
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) < 1e-4


async def test_now_is_the_loops_clock() -> None:
    async with RealWorld() as world:
        before = asyncio.get_running_loop().time()
        assert before <= world.now() <= asyncio.get_running_loop().time()
        assert world.wall_time() > 1.7e9
