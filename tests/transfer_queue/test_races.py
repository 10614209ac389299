"""Verbs that meet: a cancel at every point where one waits, and whatever comes while another waits for the journal."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import torch

from asyncrl.errors import DtypeChangeError, RecordError, StaleLeaseError, UnknownKeyError
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.protocol.ragged import rows_of
from asyncrl.transfer_queue import TransferQueue

Look = Callable[..., dict[str, Any]]
OpenSession = Callable[..., Awaitable[SessionLease]]
Verb = Callable[[TransferQueue], Coroutine[Any, Any, None]]
A0 = SessionLease(uid="a", session_id=0)


async def put(queue: TransferQueue, key: str, lease: SessionLease, value: int = 1) -> None:
    await queue.kv_put(key, partition_id="train", lease=lease, fields={"responses": [value] * 3}, tag={"n": value})


async def begin(*verbs: Coroutine[Any, Any, object]) -> list[asyncio.Task[object]]:
    """Each has acted; with a journal none has returned."""
    tasks: list[asyncio.Task[object]] = []
    for verb in verbs:
        tasks.append(asyncio.create_task(verb))
        await asyncio.sleep(0)
    return tasks


async def outcomes(tasks: list[asyncio.Task[object]]) -> list[type | None]:
    return [None if result is None else type(result) for result in await asyncio.gather(*tasks, return_exceptions=True)]


# --- cancelled


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_cancelled_verb_is_whole_or_absent(turns: int, any_verb: Verb, furnished: TransferQueue, look: Look) -> None:
    """In memory and, as every test ends with a reopen, in the journal."""
    before = look(furnished)
    task = asyncio.create_task(any_verb(furnished))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert (look(furnished) == before) is (turns == 0)
    if turns == 0:
        await any_verb(furnished)  # what never began can still be done
        assert look(furnished) != before


async def test_who_is_cancelled_while_waiting_takes_nobody_along(queue: TransferQueue, open_session: OpenSession) -> None:
    leases = [await open_session("a", number) for number in range(6)]
    tasks = await begin(*[put(queue, f"a_{number}_0", lease) for number, lease in enumerate(leases)])
    for task in tasks[::2]:
        task.cancel()
    found = await outcomes(tasks)
    assert found[1::2] == [None] * 3
    assert set(found[::2]) <= {None, asyncio.CancelledError}
    assert len((await queue.kv_list())["train"]) == 6


# --- two at once


async def test_a_clear_while_a_put_waits_wins(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    tasks = await begin(put(queue, "a_0_0", lease), queue.kv_clear(["a_0_0"], partition_id="train"), put(queue, "a_0_0", lease, 2))
    assert await outcomes(tasks) == [None, None, StaleLeaseError]
    assert await queue.kv_list() == {}
    assert queue.stats()["bytes"] == 0


async def test_a_retry_while_a_put_waits_wins(queue: TransferQueue, open_session: OpenSession) -> None:
    first = await open_session()
    second = SessionLease(uid="a", session_id=0, attempt=1)
    tasks = await begin(
        put(queue, "a_0_0", first), queue.open_lease(second), put(queue, "a_0_1", first), put(queue, "a_0_2", second)
    )
    assert await outcomes(tasks) == [None, None, StaleLeaseError, None]
    assert list((await queue.kv_list())["train"]) == ["a_0_2"]


async def test_a_drop_while_a_session_settles_wins(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await queue.kv_put("a", partition_id="train", lease=GroupLease(uid="a"), tag={"is_prompt": True})
    settle = queue.settle_session(
        lease, partition_id="train", keys=["a_0_0"], fields={"responses": [[1]]}, tags=[{"n": 1}], group_tag={"status": "finished"}
    )
    drop = queue.drop(["a"], partition_id="train", reason="failure")
    assert await outcomes(await begin(settle, drop)) == [None, None]
    assert await queue.kv_list() == {}


async def test_a_tag_and_a_column_at_once_are_both_there(queue: TransferQueue, open_session: OpenSession) -> None:
    lease, step = await open_session(), StepLease(step=1)
    await queue.open_lease(step)
    await put(queue, "a_0_0", lease)
    for number in range(20):
        column = queue.kv_put("a_0_0", partition_id="train", lease=step, fields={"advantages": [float(number)] * 3})
        tag = queue.kv_put("a_0_0", partition_id="train", lease=lease, tag={f"t{number}": number})
        await outcomes(await begin(*((column, tag) if number % 2 else (tag, column))))
    assert len((await queue.kv_list())["train"]["a_0_0"]) == 21
    got = await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["advantages", "responses"])
    assert got["advantages"].values().tolist() == [19.0] * 3


async def test_two_tags_of_one_key_at_once_are_both_there(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    tags = [{f"t{number}": number, "last": number} for number in range(20)]
    await outcomes(await begin(*[queue.kv_put("a_0_0", partition_id="train", lease=lease, tag=tag) for tag in tags]))
    assert (await queue.kv_list())["train"]["a_0_0"] == {**{f"t{number}": number for number in range(20)}, "last": 19}


async def test_of_two_dtypes_at_once_the_first_holds(queue: TransferQueue, open_session: OpenSession) -> None:
    leases = [await open_session("a", number) for number in range(2)]
    puts = [
        queue.kv_put(f"a_{number}_0", partition_id="train", lease=lease, fields={"x": value})
        for (number, lease), value in zip(enumerate(leases), (torch.ones(2), torch.ones(2, dtype=torch.float64)), strict=True)
    ]
    assert await outcomes(await begin(*puts)) == [None, DtypeChangeError]
    assert list((await queue.kv_list())["train"]) == ["a_0_0"]


async def test_a_put_that_waits_can_be_got_and_watched(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    watch = queue.kv_watch("train")
    await anext(watch)
    tasks = await begin(put(queue, "a_0_0", lease, 5))
    assert await anext(watch) == {"a_0_0": {"n": 5}}
    got = await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["responses"])
    assert rows_of(got["responses"])[0].tolist() == [5, 5, 5]
    assert await outcomes(tasks) == [None]


async def test_a_get_that_began_before_a_clear_is_whole(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    keys = [f"a_0_{index}" for index in range(8)]
    await queue.kv_batch_put(keys, partition_id="train", lease=lease, fields={"responses": [[i] for i in range(8)]})
    got = queue.kv_batch_get(keys, partition_id="train", fields=["responses"])
    late = queue.kv_batch_get(keys, partition_id="train", fields=["responses"])
    getting, clearing = asyncio.create_task(got), asyncio.create_task(queue.kv_clear(keys[:4], partition_id="train"))
    with pytest.raises(UnknownKeyError, match="'a_0_0'"):
        await asyncio.gather(getting, clearing, asyncio.create_task(late))
    assert (await getting)["responses"].values().tolist() == list(range(8))
    await clearing


async def test_of_two_steps_at_once_that_want_a_group_one_gets_it(furnished: TransferQueue) -> None:
    keys = ["d_0_0", "d_0_1"]
    tasks = await begin(*[furnished.record(step, keys, partition_id="train") for step in (3, 4)])
    assert await outcomes(tasks) == [int, RecordError]


async def test_a_clear_and_a_record_at_once(furnished: TransferQueue) -> None:
    keys = ["d_0_0", "d_0_1"]
    tasks = await begin(furnished.record(3, keys, partition_id="train"), furnished.kv_clear(["d"], partition_id="train"))
    assert await outcomes(tasks) == [int, RecordError]


async def test_a_clear_just_before_a_record(furnished: TransferQueue) -> None:
    keys = ["d_0_0", "d_0_1"]
    tasks = await begin(furnished.kv_clear(["d"], partition_id="train"), furnished.record(3, keys, partition_id="train"))
    assert await outcomes(tasks) == [None, UnknownKeyError]


async def test_two_takers_of_one_session_are_one(queue: TransferQueue, open_session: OpenSession) -> None:
    await open_session()
    retry = SessionLease(uid="a", session_id=0, attempt=1)
    assert await outcomes(await begin(*[queue.open_lease(retry) for _ in range(3)])) == [None, StaleLeaseError, StaleLeaseError]


async def test_two_admissions_of_one_group_are_one(queue: TransferQueue) -> None:
    async def admit() -> None:
        await queue.admit(GroupLease(uid="a"), partition_id="train", cursor=1, tag={"n": 1})

    admissions = [admit() for _ in range(3)]
    assert await outcomes(await begin(*admissions)) == [None, StaleLeaseError, StaleLeaseError]
    assert queue.stats()["ledger/admitted"] == 1


async def test_turns_and_a_settling_at_once(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    tasks = await begin(
        queue.put_turn(lease, 0, {"responses": [1]}),
        queue.put_turn(lease, 0, {"responses": [2]}),
        queue.settle_session(lease, partition_id="train"),
        queue.put_turn(lease, 1, {"responses": [3]}),
    )
    assert await outcomes(tasks) == [None, RecordError, None, StaleLeaseError]
    assert await queue.kv_turns("a", 0) == []


async def test_a_hundred_sessions_at_once(queue: TransferQueue, look: Look) -> None:
    async def live(uid: str, session_id: int) -> None:
        lease = SessionLease(uid=uid, session_id=session_id)
        await queue.open_lease(lease)
        for turn in range(2):
            await queue.put_turn(lease, turn, {"responses": [turn]})
        await put(queue, f"{uid}_{session_id}_0", lease, session_id)
        if session_id == 3:
            await queue.kv_clear([f"{uid}_{session_id}_0"], partition_id="train")
        else:
            await queue.settle_session(lease, partition_id="train", keys=[f"{uid}_{session_id}_1"], tags=[{"n": session_id}])

    async def group(number: int) -> None:
        uid = f"g{number}"
        await queue.admit(GroupLease(uid=uid), partition_id="train", cursor=number, tag={"is_prompt": True})
        await asyncio.gather(*[live(uid, session_id) for session_id in range(4)])
        await queue.settle_group(GroupLease(uid=uid), partition_id="train", tag={"status": "finished"})

    await asyncio.gather(*[group(number) for number in range(25)])
    stats = queue.stats()
    assert (stats["keys"], stats["open_leases"], stats["turns"]) == (25 * 7, 0, 0)
    row_ids = [row_id for _, row_id, *_ in look(queue)["rows"]["train"]]
    assert row_ids == sorted(set(row_ids))
