"""Dynamic sampling: a group whose sessions all have one reward makes room for another, and no batch ever has it."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from asyncrl.errors import TooManyFailuresError
from asyncrl.world import RealWorld

StartRig = Callable[..., AbstractAsyncContextManager[Any]]
Settled = Callable[[], Coroutine[Any, Any, None]]


async def test_a_group_without_signal_is_dropped_and_its_place_is_free(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=2, filter_groups=True) as rig:
        await rig.admit("dull")
        await rig.admit("a")
        await rig.finish("dull", 0.97, 0.97)
        await rig.finish("a", 0.0, 1.0)
        sampling = asyncio.create_task(rig.replay.sample(1, 2))
        await settled()
        assert not sampling.done()
        assert rig.admission.has_place
        await rig.admit("b")
        await rig.finish("b", 1.0, 0.5)
        assert (await sampling).uids == ("a", "a", "b", "b")
        assert rig.admission.counters() == {"admitted": 3, "trained": 0, "open": 2, "dropped": 1, "dropped/no_signal": 1}
        rig.admission.check_conservation()
        assert sorted((await rig.queue.kv_list("train"))["train"]) == ["a", "a_0_0", "a_1_0", "b", "b_0_0", "b_1_0"]


async def test_a_constant_reward_that_a_float32_mean_misses_is_no_signal(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=1, filter_groups=True) as rig:
        await rig.admit("a")
        await rig.finish("a", 0.1 + 0.2, 0.3)  # two numbers, however close: a signal
        assert (await rig.replay.sample(1, 1)).uids == ("a", "a")
    async with start_rig(batch_size=1, filter_groups=True) as rig:
        await rig.admit("a")
        await rig.finish("a", 0.3, 0.3)
        await settled()
        assert rig.admission.counters()["dropped/no_signal"] == 1


class Slow(RealWorld):
    """Every site takes some turns of the loop, in which others run."""

    async def site(self, name: str) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_no_batch_has_it_while_its_end_is_under_way(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=1, max_staleness=1, filter_groups=True, world=Slow()) as rig:
        sampling = asyncio.create_task(rig.replay.sample(1, 1))
        await rig.admit("dull")
        await rig.admit("a")
        await rig.finish("a", 0.0, 1.0)
        await rig.finish("dull", 1.0, 1.0)
        assert (await sampling).uids == ("a", "a")
        await settled()
        assert rig.admission.counters()["dropped/no_signal"] == 1


async def test_without_the_filter_it_is_trained_on(start_rig: StartRig) -> None:
    async with start_rig(batch_size=1) as rig:
        await rig.admit("dull")
        await rig.finish("dull", 1.0, 1.0)
        assert (await rig.replay.sample(1, 1)).uids == ("dull", "dull")


async def test_a_failed_and_a_silent_group_of_one_set_of_changes_are_both_replaced(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=2, filter_groups=True) as rig:
        await rig.admit("dull")
        await rig.admit("ill")
        await asyncio.gather(rig.finish("dull", 0.0, 0.0), rig.fail("ill"))
        await settled()
        counters = rig.admission.counters()
        assert (counters["dropped/no_signal"], counters["dropped/failure"], counters["open"]) == (1, 1, 0)
        assert rig.queue.stats()["keys"] == 0


async def test_too_many_in_a_row_end_the_run_and_a_good_one_starts_the_count_again(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=2, filter_groups=True, max_filtered=3) as rig:
        sampling = asyncio.create_task(rig.replay.sample(1, 2))
        for uid, scores in (("a", (1, 1)), ("b", (0, 0)), ("good", (0, 1)), ("c", (1, 1)), ("d", (1, 1))):
            await rig.admit(uid)
            await rig.finish(uid, *scores)
            await settled()
        assert not sampling.done()
        await rig.admit("e")
        await rig.finish("e", 0, 0)
        with pytest.raises(TooManyFailuresError, match=r"^3 groups in a row had the same reward .*algorithm\.filter_groups"):
            await sampling
