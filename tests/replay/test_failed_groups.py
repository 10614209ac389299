"""Failed groups: refill, train in part, or end the run; and the rows that fail again and again."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from asyncrl.errors import GroupFailedError
from asyncrl.ports import IncidentKind

StartRig = Callable[..., AbstractAsyncContextManager[Any]]
Settled = Callable[[], Coroutine[Any, Any, None]]


async def test_a_failed_group_with_two_sessions_is_trained_on_in_part(start_rig: StartRig) -> None:
    async with start_rig(batch_size=1, failed_groups="train_partial") as rig:
        await rig.admit("a")
        await rig.fail("a", num_done=2)
        batch = await rig.replay.sample(1, 1)
        assert batch.keys == ("a_0_0", "a_1_0")
        assert rig.replay.stats()["partial"] == 1
        assert rig.admission.counters()["dropped"] == 0


async def test_a_failed_group_with_one_session_has_nobody_to_be_compared_with(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=1, failed_groups="train_partial") as rig:
        await rig.admit("a")
        await rig.fail("a", num_done=1)
        await settled()
        assert rig.admission.counters()["dropped/failure"] == 1
        assert rig.replay.stats()["partial"] == 0


async def test_a_group_that_is_trained_on_in_part_ends_the_row_of_failures(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=2, failed_groups="train_partial", max_failed=2) as rig:
        for lost, partial in (("a", "b"), ("c", "d")):
            await rig.admit(lost)
            await rig.fail(lost, num_done=0)
            await settled()
            await rig.admit(partial)
            await rig.fail(partial, num_done=2)
            await settled()
        assert (await rig.replay.sample(1, 2)).uids == ("b", "b", "d", "d")


async def test_a_failed_group_may_end_the_run_and_stays_in_the_store(start_rig: StartRig) -> None:
    async with start_rig(batch_size=1, failed_groups="abort") as rig:
        sampling = asyncio.create_task(rig.replay.sample(1, 1))
        await rig.admit("a")
        await rig.fail("a", "infra: engine lost")
        with pytest.raises(GroupFailedError, match=r"group a failed, and replay.failed_groups is .abort.: infra: engine lost"):
            await sampling
        assert "a" in (await rig.queue.kv_list("train"))["train"]
        assert rig.admission.is_alive("a")


async def test_a_row_that_fails_again_and_again_is_told_once(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=1, quarantine_after=2) as rig:
        for number in range(4):
            await rig.admit(f"u{number}")
            await rig.fail(f"u{number}", row=7 if number != 1 else 8)
            await settled()
        told = [incident for incident in rig.incidents if incident.kind is IncidentKind.QUARANTINE]
        assert [incident.uid for incident in told] == ["u2"]
        assert "row 7 of data.train_files failed 2 times" in told[0].text
        assert rig.queue.failed_rows() == {7: 3, 8: 1}
        assert rig.replay.stats()["quarantined_rows"] == 1
        assert [incident.uid for incident in rig.incidents if incident.kind is IncidentKind.DROP] == ["u0", "u1", "u2", "u3"]


async def test_without_a_limit_no_row_is_left_out(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=1, quarantine_after=0) as rig:
        await rig.admit("a")
        await rig.fail("a", row=7)
        await settled()
        assert rig.replay.stats()["quarantined_rows"] == 0
        assert all(incident.kind is not IncidentKind.QUARANTINE for incident in rig.incidents)
