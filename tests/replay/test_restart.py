"""Replay and admission after a restart: recorded steps have their batches, and what was alive is where it was."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from asyncrl.errors import AdmissionError, PoisonedStepError
from asyncrl.journal.model import MemoryJournal
from asyncrl.transfer_queue import TransferQueue

StartRig = Callable[..., AbstractAsyncContextManager[Any]]
Settled = Callable[[], Coroutine[Any, Any, None]]


def restarted(journal: MemoryJournal, *, weights_step: int) -> TransferQueue:
    """The next process's store."""
    after = journal.crash()
    return TransferQueue(after, after.load(weights_step), weights_step=weights_step)


async def three_steps(start_rig: StartRig, journal: MemoryJournal) -> list[tuple[str, ...]]:
    """Steps 1 to 3 of two groups each, and a group alive; the keys of each step."""
    keys = []
    async with start_rig(batch_size=2, max_staleness=1, journal=journal) as rig:
        for step in (1, 2, 3):
            for uid in (f"a{step}", f"b{step}"):
                await rig.admit(uid)
                await rig.finish(uid)
            batch = await rig.replay.sample(step, 2)
            await rig.train(step, batch)
            rig.admission.publish(step)
            keys.append(batch.keys)
        await rig.admit("alive")
    return keys


@pytest.mark.parametrize("weights_step", [0, 1, 2, 3])
async def test_recorded_steps_are_repeated_on_their_batches_in_their_order(start_rig: StartRig, weights_step: int) -> None:
    journal = MemoryJournal()
    keys = await three_steps(start_rig, journal)
    queue = restarted(journal, weights_step=weights_step)
    async with start_rig(batch_size=2, max_staleness=1, queue=queue, version=weights_step) as rig:
        rig.admission.check_conservation()
        assert rig.admission.alive == ("alive",)
        assert rig.admission.counters()["trained"] == 2 * weights_step
        assert rig.admission.last_step == 3
        for step in range(weights_step + 1, 4):
            batch = await rig.replay.sample(step, 2)
            assert batch.keys == keys[step - 1]
            await rig.train(step, batch)
            rig.admission.publish(step)
        rig.admission.check_conservation()
        assert rig.admission.counters()["trained"] == 6


async def test_a_restart_holds_the_places_of_the_steps_that_are_repeated(start_rig: StartRig) -> None:
    journal = MemoryJournal()
    await three_steps(start_rig, journal)
    async with start_rig(batch_size=2, max_staleness=1, queue=restarted(journal, weights_step=1), version=1) as rig:
        assert rig.admission.num_recorded == 4  # of steps 2 and 3; one group is alive, four are allowed
        assert not rig.admission.has_place


async def test_the_steps_of_a_restart_come_in_their_order(start_rig: StartRig) -> None:
    journal = MemoryJournal()
    await three_steps(start_rig, journal)
    async with start_rig(batch_size=2, max_staleness=1, queue=restarted(journal, weights_step=1), version=1) as rig:
        with pytest.raises(AdmissionError, match="step 3 cannot be sampled: step 2 was restored and comes first"):
            await rig.replay.sample(3, 2)


async def test_a_step_that_ends_the_process_again_and_again_is_named(start_rig: StartRig) -> None:
    journal = MemoryJournal()
    async with start_rig(batch_size=1, journal=journal) as rig:
        await rig.admit("poison")
        await rig.finish("poison")
        await rig.replay.sample(1, 1)
    for _ in range(2):
        queue = restarted(journal, weights_step=0)
        journal = queue._journal  # type: ignore[assignment]
        async with start_rig(batch_size=1, queue=queue, max_tries=3) as rig:
            await rig.replay.sample(1, 1)
    for _ in range(2):  # a step that is refused has not begun
        queue = restarted(journal, weights_step=0)
        journal = queue._journal  # type: ignore[assignment]
        async with start_rig(batch_size=1, queue=queue, max_tries=3) as rig:
            with pytest.raises(PoisonedStepError, match=r"step 1 was begun 3 times .* its 2 keys: poison_0_0, poison_1_0"):
                await rig.replay.sample(1, 1)
    async with start_rig(batch_size=1, queue=restarted(journal, weights_step=0), max_tries=4) as rig:
        assert (await rig.replay.sample(1, 1)).keys == ("poison_0_0", "poison_1_0")


async def test_steps_that_come_to_their_end_may_be_repeated_as_often_as_it_takes(start_rig: StartRig) -> None:
    journal = MemoryJournal()
    await three_steps(start_rig, journal)
    for _ in range(5):
        queue = restarted(journal, weights_step=0)
        journal = queue._journal  # type: ignore[assignment]
        async with start_rig(batch_size=2, max_staleness=1, queue=queue, max_tries=2) as rig:
            for step in (1, 2, 3):
                await rig.train(step, await rig.replay.sample(step, 2))


async def test_a_group_that_failed_before_the_restart_is_dropped_after_it(start_rig: StartRig, settled: Settled) -> None:
    journal = MemoryJournal()
    async with start_rig(batch_size=1, journal=journal, failed_groups="abort") as rig:
        await rig.admit("ill")
        await rig.fail("ill", row=4)
        await settled()
    async with start_rig(batch_size=1, queue=restarted(journal, weights_step=0)) as rig:
        await settled()
        assert rig.admission.counters()["dropped/failure"] == 1
        assert rig.queue.failed_rows() == {4: 1}
