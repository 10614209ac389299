"""ReplayBuffer: whole groups in admission order, waits that end, failures that make room."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import pytest

from asyncrl.config import ReplayConfig
from asyncrl.errors import (
    AdmissionError,
    GroupsExhaustedError,
    MissingColumnError,
    ReplayError,
    StalledError,
    TooManyFailuresError,
)
from asyncrl.fields import Tag
from asyncrl.journal.model import MemoryJournal
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.watch import Watch
from asyncrl.world import RealWorld

StartRig = Callable[..., AbstractAsyncContextManager[Any]]
Settled = Callable[[], Coroutine[Any, Any, None]]


async def test_a_batch_is_whole_groups_in_admission_order(start_rig: StartRig) -> None:
    async with start_rig(batch_size=2, max_staleness=1) as rig:
        for uid in ("b", "a", "c"):
            await rig.admit(uid)
        for uid in ("c", "a", "b"):
            await rig.finish(uid)
        batch = await rig.replay.sample(1, 2)
        assert batch.keys == ("b_0_0", "b_1_0", "a_0_0", "a_1_0")
        assert batch.tags == ({"response_len": 5},) * 4
        assert batch.partition_id == "train"
        assert rig.admission.recorded(1) == ("b", "a")
        assert rig.replay.counts() == {"pending": 0, "running": 0, "finished": 1, "failure": 0}


async def test_a_session_with_several_outputs_gives_them_all(start_rig: StartRig) -> None:
    async with start_rig(batch_size=1) as rig:
        await rig.admit("a")
        await rig.status("a", "running")
        await rig.write("a", 1, num_outputs=11)
        await rig.write("a", 0, num_outputs=2)
        await rig.settle("a", "finished")
        batch = await rig.replay.sample(1, 1)
        assert batch.keys == ("a_0_0", "a_0_1", *(f"a_1_{index}" for index in range(11)))


async def test_a_slow_head_holds_a_batch_back(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=1, max_staleness=1) as rig:
        await rig.admit("slow")
        await rig.admit("fast")
        await rig.finish("fast")
        sampling = asyncio.create_task(rig.replay.sample(1, 1))
        await settled()
        assert not sampling.done()
        await rig.finish("slow")
        assert (await sampling).uids == ("slow", "slow")


async def test_a_sample_that_waits_looks_at_the_group_that_it_waits_for_and_at_no_other(settled: Settled) -> None:
    """Else a batch of 6,250 groups costs a look at all of them for each of the 100,000 changes that are none of its business."""

    class Counting(Admission):
        num_looks = 0

        def first_alive(self, number: int) -> tuple[str, ...]:
            self.num_looks += 1
            return super().first_alive(number)

    queue, admission = TransferQueue(), Counting(batch_size=30)
    replay = ReplayBuffer(queue, admission, group_size=1, config=ReplayConfig(), world=RealWorld())
    following = asyncio.create_task(replay.run())
    uids = [f"u{number:02}" for number in range(30)]
    for uid in uids:
        admission.admit(uid)
    sampling = asyncio.create_task(replay.sample(1, 30))
    for uid in reversed(uids):
        await settled()
        lease = GroupLease(uid=uid)
        await queue.open_lease(lease)
        await queue.kv_put(uid, partition_id="train", lease=lease, tag={"status": "running", "is_prompt": True})
        session = SessionLease(uid=uid, session_id=0)
        await queue.open_lease(session)
        await queue.kv_put(f"{uid}_0_0", partition_id="train", lease=session, fields={"responses": [1]}, tag={"response_len": 1})
        await queue.kv_put(uid, partition_id="train", lease=lease, tag={"status": "finished"})
        await queue.close_lease(session)
        await queue.close_lease(lease)
    batch = await sampling
    assert [key.partition("_")[0] for key in batch.keys] == uids
    assert admission.num_looks == 2, "once to find whom it waits for, once when that one has finished"
    following.cancel()
    await asyncio.wait([following])


async def test_a_snapshot_taken_late_serves_as_well(start_rig: StartRig) -> None:
    async with start_rig(batch_size=1) as rig:
        await rig.admit("a")
        await rig.finish("a")
        late = ReplayBuffer(rig.queue, rig.admission, group_size=2, config=ReplayConfig(), world=RealWorld())
        running = asyncio.create_task(late.run())
        assert len(await late.sample(1, 1)) == 2
        running.cancel()
        await asyncio.wait([running])


# --- deadlines and ends


async def test_a_deadline_names_the_groups_and_their_sessions(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=4, sample_timeout_s=0.05) as rig:
        for uid in ("done", "half", "new"):
            await rig.admit(uid)
        rig.admission.admit("unseen")
        await rig.finish("done")
        await rig.status("half", "running")
        await rig.write("half", 1)
        await settled()
        with pytest.raises(StalledError) as caught:
            await rig.replay.sample(1, 4)
        text = str(caught.value)
        assert text.startswith("step 1 waited 0.")
        assert "for 3 of its 4 groups: half running, 1 of 2 sessions done, for 0." in text
        assert "new pending, 0 of 2 sessions done, for 0." in text
        assert text.endswith("unseen admitted, not in the store yet")
        assert "done r" not in text
        assert rig.admission.recorded(1) is None


async def test_a_deadline_without_groups_says_so(start_rig: StartRig) -> None:
    async with start_rig(batch_size=2, sample_timeout_s=0.01) as rig:
        await rig.admit("a")
        await rig.finish("a")
        with pytest.raises(StalledError, match=r"for 0 of its 2 groups; only 1 groups are admitted, and the feed is open"):
            await rig.replay.sample(1, 2)


async def test_a_long_list_of_groups_is_cut(start_rig: StartRig) -> None:
    async with start_rig(batch_size=20, sample_timeout_s=0.01) as rig:
        for number in range(20):
            rig.admission.admit(f"u{number}")
        with pytest.raises(StalledError, match=r"u15 admitted, not in the store yet; and 4 more$"):
            await rig.replay.sample(1, 20)


async def test_after_a_deadline_the_step_can_still_be_sampled(start_rig: StartRig) -> None:
    async with start_rig(batch_size=1, sample_timeout_s=0.01) as rig:
        await rig.admit("a")
        with pytest.raises(StalledError):
            await rig.replay.sample(1, 1)
        await rig.finish("a")
        assert len(await rig.replay.sample(1, 1)) == 2


async def test_the_feeds_end_drops_what_cannot_fill_a_batch_once_it_is_terminal(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=3) as rig:
        await rig.admit("a")
        await rig.admit("b")
        rig.replay.close_feed()
        sampling = asyncio.create_task(rig.replay.sample(1, 3))
        await rig.finish("a")
        await settled()
        assert not sampling.done()
        await rig.finish("b")
        with pytest.raises(GroupsExhaustedError, match="2 groups left, a batch needs 3"):
            await sampling
        assert rig.admission.counters() == {"admitted": 2, "trained": 0, "open": 0, "dropped": 2, "dropped/feed_end": 2}
        assert rig.queue.stats()["keys"] == 0
        with pytest.raises(GroupsExhaustedError):
            await rig.replay.sample(1, 3)


async def test_closing_the_feed_wakes_a_sample_that_waits_for_nothing(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig() as rig:
        sampling = asyncio.create_task(rig.replay.sample(1, 2))
        await settled()
        rig.replay.close_feed()
        with pytest.raises(GroupsExhaustedError):
            await sampling


async def test_a_full_batch_is_served_after_the_feeds_end(start_rig: StartRig) -> None:
    async with start_rig(batch_size=1) as rig:
        await rig.admit("a")
        rig.replay.close_feed()
        await rig.finish("a")
        assert len(await rig.replay.sample(1, 1)) == 2


# --- failures


async def test_a_failed_group_is_cleared_counted_and_makes_room(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=2) as rig:
        await rig.admit("a")
        await rig.admit("b")
        feeding = asyncio.create_task(rig.admission.wait_for_place())
        await rig.fail("a")
        await asyncio.wait_for(feeding, 10)
        assert rig.admission.alive == ("b",)
        assert rig.replay.counts() == {"pending": 1, "running": 0, "finished": 0, "failure": 1}
        await settled()
        assert list((await rig.queue.kv_list("train"))["train"]) == ["b"]
        await rig.admit("c")
        for uid in ("c", "b"):
            await rig.finish(uid)
        assert (await rig.replay.sample(1, 2)).uids == ("b", "b", "c", "c")
        assert rig.admission.counters()["dropped/failure"] == 1


async def fail_in_a_row(rig: Any, settled: Settled, uids: list[str]) -> None:
    for uid in uids:
        await rig.admit(uid)
        await rig.fail(uid, f"infra: {uid} broke")
        await settled()


async def test_too_many_failures_in_a_row_end_the_run_with_the_last_error(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(max_failed=3) as rig:
        sampling = asyncio.create_task(rig.replay.sample(1, 2))
        await fail_in_a_row(rig, settled, ["a", "b"])
        assert not sampling.done()
        await fail_in_a_row(rig, settled, ["c"])
        with pytest.raises(TooManyFailuresError, match=r"^3 groups failed in a row .*; the last, 'c': infra: c broke$"):
            await sampling
        with pytest.raises(TooManyFailuresError):
            await rig.replay.sample(1, 2)
        assert rig.queue.stats()["keys"] == 0
        assert not rig.admission.has_place, "what else failed until somebody samples would count against its row"


class Twice(TransferQueue):
    """Every set of changes comes twice, the second one late."""

    def kv_watch(self, partition_id: str) -> Watch:
        return cast("Watch", self._twice(super().kv_watch(partition_id)))

    async def _twice(self, watch: Watch) -> AsyncIterator[dict[str, Tag | None]]:
        async for changes in watch:
            yield changes
            await asyncio.sleep(0)
            yield changes


async def test_a_failure_that_is_told_twice_is_dropped_once_and_replay_goes_on(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=2, queue=Twice()) as rig:
        await rig.admit("a")
        await rig.admit("b")
        await settled()
        await rig.fail("a")
        await settled()
        await rig.finish("b")
        await rig.admit("c")
        await rig.finish("c")
        batch = await rig.replay.sample(1, 2)
        assert dict.fromkeys(batch.uids) == {"b": None, "c": None}
        assert rig.admission.counters()["dropped/failure"] == 1
        assert rig.replay._gone == {}, "what is gone from the store is forgotten"


async def test_a_finished_group_ends_the_row_of_failures(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=2, max_failed=3) as rig:
        await fail_in_a_row(rig, settled, ["a", "b"])
        await rig.admit("c")
        await rig.finish("c")
        await settled()
        await fail_in_a_row(rig, settled, ["d", "e"])
        await rig.admit("f")
        await rig.finish("f")
        assert (await rig.replay.sample(1, 2)).uids == ("c", "c", "f", "f")


async def test_a_group_that_others_clear_is_dropped_and_unblocks_the_next(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=1, max_staleness=1) as rig:
        await rig.admit("a")
        await rig.admit("b")
        await rig.finish("b")
        sampling = asyncio.create_task(rig.replay.sample(1, 1))
        await settled()
        await rig.queue.kv_clear(["a"], partition_id="train")
        assert (await sampling).uids == ("b", "b")
        assert rig.admission.counters()["dropped/cleared"] == 1


async def test_a_drop_by_others_unblocks_the_next_without_any_write(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=1, max_staleness=1) as rig:
        await rig.admit("a")
        await rig.admit("b")
        await rig.finish("b")
        sampling = asyncio.create_task(rig.replay.sample(1, 1))
        await settled()
        rig.admission.drop("a", "no_signal")
        assert (await sampling).uids == ("b", "b")


# --- restore


async def test_a_failed_step_gets_its_own_groups_again(start_rig: StartRig) -> None:
    async with start_rig(batch_size=1, max_staleness=1) as rig:
        await rig.admit("a")
        await rig.admit("b")
        for uid in ("a", "b"):
            await rig.finish(uid)
        batch = await rig.replay.sample(1, 1)
        lease = StepLease(step=1)
        await rig.queue.open_lease(lease)
        await rig.queue.kv_batch_put(batch.keys, partition_id="train", lease=lease, fields={"advantages": [[0.0] * 5] * 2})
        await rig.replay.restore(1)
        with pytest.raises(MissingColumnError):
            await rig.queue.kv_batch_get(batch.keys, partition_id="train", fields=["advantages"])
        assert not rig.admission.has_place, "a restored step holds its places"
        with pytest.raises(AdmissionError, match="step 2 cannot be sampled: step 1 was restored"):
            await rig.replay.sample(2, 1)
        with pytest.raises(AdmissionError, match="version 1 cannot be published: step 1 failed and was not trained"):
            rig.admission.publish(1)
        assert await rig.replay.sample(1, 1) == batch
        await rig.train(1, batch, attempt=1)
        rig.admission.publish(1)
        assert (await rig.replay.sample(2, 1)).uids == ("b", "b")
        rig.admission.check_conservation()


async def test_a_sample_that_is_cut_short_while_its_record_is_written_gets_the_same_groups(
    start_rig: StartRig, settled: Settled
) -> None:
    async with start_rig(batch_size=1, max_staleness=1, journal=MemoryJournal()) as rig:
        for uid in ("a", "b"):
            await rig.admit(uid)
            await rig.finish(uid)
        await settled()
        sampling = asyncio.create_task(rig.replay.sample(1, 1))
        await asyncio.sleep(0)
        assert rig.queue.stats()["records"] == 1
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling
        rig.admission.check_conservation()
        batch = await rig.replay.sample(1, 1)
        assert batch.uids == ("a", "a")
        await rig.train(1, batch)
        assert (await rig.replay.sample(2, 1)).uids == ("b", "b")


async def test_only_a_step_under_way_can_be_restored(start_rig: StartRig, settled: Settled) -> None:
    async with start_rig(batch_size=1) as rig:
        with pytest.raises(AdmissionError, match="step 1 cannot be restored"):
            await rig.replay.restore(1)
        await rig.admit("a")
        await rig.finish("a")
        batch = await rig.replay.sample(1, 1)
        with pytest.raises(AdmissionError, match="step 1 cannot be sampled after step 1"):
            await rig.replay.sample(1, 1)
        await rig.replay.restore(1)
        with pytest.raises(AdmissionError, match="not under way"):
            await rig.replay.restore(1)
        await rig.replay.sample(1, 1)
        await rig.train(1, batch)
        await settled()
        with pytest.raises(ReplayError, match=r"\['a'\] were retired or cleared"):
            await rig.replay.restore(1)
