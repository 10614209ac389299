"""What a step used is gone after it: 200 steps leave no key, no byte, no lease and no group behind."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

StartRig = Callable[..., AbstractAsyncContextManager[Any]]
Settled = Callable[[], Coroutine[Any, Any, None]]

BATCH = 3


async def test_two_hundred_steps_leave_nothing(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=BATCH) as rig:
        peaks: set[float] = set()
        number = 0
        for step in range(1, 201):
            for position in range(BATCH + 1):
                await rig.admission.wait_for_place()
                uid = f"u{number}"
                number += 1
                await rig.admit(uid)
                await (rig.fail(uid) if position == step % BATCH else rig.finish(uid))
                await settled()
            batch = await rig.replay.sample(step, BATCH)
            if step % 10 == 0:
                await rig.replay.restore(step)
                batch = await rig.replay.sample(step, BATCH)
            peaks.add(rig.queue.stats()["bytes"])
            await rig.train(step, batch)
            rig.admission.publish(step)
            await settled()
            rig.admission.check_conservation()
            stats = rig.queue.stats()
            assert (stats["keys"], stats["bytes"], stats["open_leases"]) == (0, 0, 0)
        assert len(peaks) <= 4, "the same work holds the same bytes; only the length of the uids differs"
        assert rig.admission.counters() == {
            "admitted": 200 * (BATCH + 1),
            "trained": 200 * BATCH,
            "open": 0,
            "dropped": 200,
            "dropped/failure": 200,
        }
        assert not rig.replay._groups
        assert rig.queue.stats()["watchers"] == 1
        assert rig.queue.stats()["refused_writes"] == 0
