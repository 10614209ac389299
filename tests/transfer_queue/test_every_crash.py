"""A process that ends after any of its entries, and a next one with any weights that its journal fits: the run ends as if none had.

The crash of a process that is itself a restart is just another one.
"""

import random
from collections.abc import Iterator

import pytest

from asyncrl.journal.model import JournalDisk
from asyncrl.keys import TRAIN
from tests.transfer_queue.small_run import NUM_GROUPS, NUM_STEPS, Log, Process, check

Steps = dict[int, tuple[str, ...]]


async def whole_run() -> tuple[Log, Steps]:
    """One that nothing ends."""
    process = Process.begin(JournalDisk(), 0)
    await process.run()
    return process.log, process.lineage


async def go_on(disk: JournalDisk, weights_step: int, steps: Steps) -> Process:
    """To the end, which is that of the whole run."""
    process = Process.begin(disk, weights_step)
    await check(process.queue, steps)
    await process.run()
    await check(process.queue, steps)
    assert process.lineage == {step: keys for step, keys in steps.items() if step > weights_step}
    queue = process.queue
    assert (queue.weights_step, queue.cursor, queue.evaluated) == (NUM_STEPS, NUM_GROUPS, 2)
    assert queue.counters()["dropped/failure"] == 1
    assert queue.groups_under_way(TRAIN) == []
    return process


def ends(log: Log, numbers: "Iterator[int] | range") -> Iterator[tuple[int, int]]:
    """Entries that are left, and the step of the next one's weights: all that the journal fits."""
    for number in numbers:
        steps = log.cut(number).steps()
        yield from ((number, weights_step) for weights_step in range(steps.purged, steps.last + 1))


async def test_the_small_run_meets_what_a_run_meets() -> None:
    log, steps = await whole_run()
    assert len(log.entries) > 50
    assert [{key.split("_")[0] for key in keys} for keys in steps.values()] == [{"g0", "g1"}, {"g3", "g4"}, {"g5", "g6"}]


async def test_a_process_may_end_after_any_entry_and_the_next_begin_with_any_weights() -> None:
    log, steps = await whole_run()
    begun = [*ends(log, range(len(log.entries) + 1))]
    assert {weights_step for _, weights_step in begun} == {0, 1, 2, 3}
    for number, weights_step in begun:
        await go_on(log.cut(number), weights_step, steps)


async def crash_twice(rng: random.Random, num_firsts: int, num_seconds: int) -> None:
    log, steps = await whole_run()
    begun = [*ends(log, range(len(log.entries) + 1))]
    for number, weights_step in rng.sample(begun, min(num_firsts, len(begun))):
        second = (await go_on(log.cut(number), weights_step, steps)).log
        again = [*ends(second, range(len(second.entries) + 1))]
        for later, weights_again in rng.sample(again, min(num_seconds, len(again))):
            await go_on(second.cut(later), weights_again, steps)


async def test_a_crash_during_recovery_is_just_a_crash() -> None:
    await crash_twice(random.Random(0), 40, 10)


@pytest.mark.long
async def test_a_crash_at_any_entry_of_any_recovery_is_just_a_crash() -> None:
    await crash_twice(random.Random(1), 10_000, 40)
