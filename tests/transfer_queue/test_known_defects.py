"""What the `transferqueue` package does and this one must not: one test for each defect measured on it (release 0.1.11)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from asyncrl.errors import (
    DtypeChangeError,
    DuplicateKeyError,
    MissingColumnError,
    StaleLeaseError,
    TagCountError,
    UnknownKeyError,
    UnknownPartitionError,
)
from asyncrl.keys import SessionLease, StepLease
from asyncrl.transfer_queue import TransferQueue

OpenSession = Callable[..., Awaitable[SessionLease]]


async def put(queue: TransferQueue, key: str, lease: SessionLease, value: float = 1.0) -> None:
    await queue.kv_put(key, partition_id="train", lease=lease, fields={"x": torch.full((4,), value)}, tag={"n": int(value)})


async def test_some_keys_missing_is_no_short_batch(queue: TransferQueue, open_session: OpenSession) -> None:
    await put(queue, "a_0_0", await open_session())
    with pytest.raises(UnknownKeyError, match="'a_0_1'"):
        await queue.kv_batch_get(["a_0_0", "a_0_1"], partition_id="train", fields=["x"])


@pytest.mark.parametrize("fields", [["x", "y"], ["y"]])
async def test_unknown_fields_are_not_left_out(fields: list[str], queue: TransferQueue, open_session: OpenSession) -> None:
    await put(queue, "a_0_0", await open_session())
    with pytest.raises(MissingColumnError, match="'y'"):
        await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=fields)


async def test_fields_are_not_intersected_over_keys(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await put(queue, "a_0_0", lease)
    await queue.kv_put("a_0_1", partition_id="train", lease=lease, fields={"y": torch.ones(1)})
    with pytest.raises(MissingColumnError, match=r"'a_0_1'.*'x'"):
        await queue.kv_batch_get(["a_0_0", "a_0_1"], partition_id="train", fields=["x"])


async def test_a_get_mixes_no_dtypes(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await put(queue, "a_0_0", lease)
    with pytest.raises(DtypeChangeError):
        await queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"x": torch.ones(4, dtype=torch.float64)})
    got = await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["x"])
    assert got["x"].dtype is torch.float32


async def test_a_wrong_tag_count_leaves_no_phantom_keys(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    with pytest.raises(TagCountError):
        await queue.kv_batch_put(["a_0_0", "a_0_1"], partition_id="train", lease=lease, tags=[{"n": 1}])
    assert await queue.kv_list() == {}


async def test_duplicate_keys_leave_no_orphan_row(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    with pytest.raises(DuplicateKeyError):
        await queue.kv_batch_put(["a_0_0", "a_0_0"], partition_id="train", lease=lease, fields={"x": [torch.ones(1)] * 2})
    assert (queue.stats()["keys"], queue.stats()["bytes"]) == (0, 0)


async def test_a_cancelled_put_is_whole_or_absent(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    for index in range(20):
        writing = asyncio.create_task(put(queue, f"a_0_{index}", lease))
        for _ in range(index % 3):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
    keys = list((await queue.kv_list("train"))["train"])
    if keys:
        got = await queue.kv_batch_get(keys, partition_id="train", fields=["x"])
        assert len(got) == len(keys)
        assert all(tag == {"n": 1} for tag in (await queue.kv_list("train"))["train"].values())
    assert queue.stats()["live_bytes"] == 16 * len(keys)


async def test_a_late_put_does_not_bring_a_cleared_key_back(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await put(queue, "a_0_0", lease)
    await queue.kv_clear(["a_0_0"], partition_id="train")
    with pytest.raises(StaleLeaseError):
        await put(queue, "a_0_0", lease)
    assert await queue.kv_list() == {}
    assert queue.stats()["refused_writes"] == 1


async def test_a_put_racing_a_clear_leaves_no_ghost_row(queue: TransferQueue, open_session: OpenSession) -> None:
    for session_id in range(30):
        lease = await open_session("a", session_id)
        key = f"a_{session_id}_0"
        clearing = queue.kv_clear([key], partition_id="train")
        racers = [put(queue, key, lease), clearing] if session_id % 2 else [clearing, put(queue, key, lease)]
        await asyncio.gather(*racers, return_exceptions=True)
    assert await queue.kv_list() == {}
    assert (queue.stats()["keys"], queue.stats()["bytes"]) == (0, 0)


async def test_a_fresh_key_never_shows_the_value_of_a_cleared_one(queue: TransferQueue, open_session: OpenSession) -> None:
    await put(queue, "a_0_0", await open_session("a"), 666)
    await queue.kv_clear(["a_0_0"], partition_id="train")
    await queue.kv_put("b_0_0", partition_id="train", lease=await open_session("b"), tag={"n": 1})
    with pytest.raises(MissingColumnError, match="'b_0_0'"):
        await queue.kv_batch_get(["b_0_0"], partition_id="train", fields=["x"])


async def test_a_column_put_racing_a_tag_put_loses_no_tag(queue: TransferQueue, open_session: OpenSession) -> None:
    lease, step = await open_session(), StepLease(step=1)
    await queue.open_lease(step)
    await put(queue, "a_0_0", lease)
    for n in range(200):
        column = queue.kv_put("a_0_0", partition_id="train", lease=step, fields={"advantages": [float(n)]})
        tag = queue.kv_put("a_0_0", partition_id="train", lease=lease, tag={f"t{n}": n})
        await asyncio.gather(*((column, tag) if n % 2 else (tag, column)))
    assert len((await queue.kv_list("train"))["train"]["a_0_0"]) == 201


async def test_an_emptied_partition_is_not_listed(queue: TransferQueue, open_session: OpenSession) -> None:
    for step in range(20):
        lease = await open_session("a", step)
        await queue.kv_put(f"a_{step}_0", partition_id=f"step{step}", lease=lease, tag={"n": 1})
        await queue.kv_clear([f"a_{step}_0"], partition_id=f"step{step}")
    assert await queue.kv_list() == {}
    with pytest.raises(UnknownPartitionError, match="step0"):
        await queue.kv_batch_get(["a_0_0"], partition_id="step0", fields=[])


async def test_one_row_of_a_dense_batch_frees_the_rest(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    keys = [f"a_0_{i}" for i in range(64)]
    await queue.kv_batch_put(keys, partition_id="train", lease=lease, fields={"x": torch.zeros(64, 5000)})
    await queue.kv_clear(keys[1:], partition_id="train")
    assert queue.stats()["bytes"] == 5000 * 4


async def test_dense_stays_dense(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await queue.kv_batch_put(["a_0_0", "a_0_1"], partition_id="train", lease=lease, fields={"x": torch.arange(6).view(2, 3)})
    got = await queue.kv_batch_get(["a_0_1", "a_0_0"], partition_id="train", fields=["x"])
    assert got["x"].tolist() == [[3, 4, 5], [0, 1, 2]]


async def test_only_unknown_fields_is_no_empty_answer(queue: TransferQueue, open_session: OpenSession) -> None:
    await put(queue, "a_0_0", await open_session())
    with pytest.raises(MissingColumnError, match=r"key 'a_0_0'.*'nonsense'"):
        await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["nonsense"])


async def test_float8_and_uint16_survive_the_process(house: Any, open_session: OpenSession) -> None:
    """There, a checkpoint with them could be written and not be read."""
    lease = await open_session()
    fields = {"x": torch.ones(3).to(torch.float8_e4m3fn), "y": torch.tensor([65535], dtype=torch.uint16)}
    await house.queue.kv_put("a_0_0", partition_id="train", lease=lease, fields=fields)
    if house.is_durable:
        await house.reopen()
    got = await house.queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["x", "y"])
    assert (got["x"].dtype, got["y"].dtype) == (torch.float8_e4m3fn, torch.uint16)
    assert got["y"].values().tolist() == [65535]


async def test_a_kept_row_of_a_dense_batch_is_kept_alone(house: Any, open_session: OpenSession) -> None:
    """There, the checkpoint of one row of a batch held the bytes of all."""
    keys = [f"a_0_{index}" for index in range(64)]
    await house.queue.kv_batch_put(keys, partition_id="train", lease=await open_session(), fields={"x": torch.zeros(64, 500)})
    await house.queue.kv_clear(keys[1:], partition_id="train")
    if house.is_durable:
        await house.reopen()
    assert house.queue.stats()["bytes"] == 500 * 4


async def test_a_number_of_a_cleared_row_is_not_given_again(house: Any, open_session: OpenSession) -> None:
    """There, a record of a batch could come to name other rows."""
    lease = await open_session()
    numbers = []
    for index in range(6):
        await put(house.queue, f"a_0_{index}", lease)
        numbers += [row.row_id for row in house.queue._state.partitions["train"].rows.values()]
        if index % 2:
            await house.queue.kv_clear([f"a_0_{index}"], partition_id="train")
            lease = SessionLease(uid="a", session_id=0, attempt=index)  # of the next attempt, as the clear has shut the door
            await house.queue.open_lease(lease)
        if house.is_durable:
            await house.reopen()
    assert len(set(numbers)) == 6


async def test_one_partition_does_not_grow_with_another(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await queue.kv_batch_put([f"a_0_{i}" for i in range(32)], partition_id="train", lease=lease, tags=[{"n": i} for i in range(32)])
    await queue.kv_put("a_0_0", partition_id="val", lease=lease, fields={"x": torch.ones(4, dtype=torch.int64)})
    assert [len(tags) for tags in (await queue.kv_list()).values()] == [32, 1]
    await queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"x": torch.ones(4)})  # a dtype is a partition's own


async def test_who_waits_for_data_keeps_nobody_waiting(queue: TransferQueue, open_session: OpenSession) -> None:
    """There, a consumer short of data put the only request thread to sleep, and the producers with it."""
    watch = queue.kv_watch("train")
    await anext(watch)
    waiting = asyncio.create_task(watch.__anext__())
    await asyncio.sleep(0)
    assert await queue.kv_list() == {}
    await put(queue, "a_0_0", await open_session())
    assert await waiting == {"a_0_0": {"n": 1}}


async def test_a_gradient_and_a_device_are_the_callers_own(queue: TransferQueue, open_session: OpenSession) -> None:
    weights = torch.ones(2, requires_grad=True)
    await queue.kv_put("a_0_0", partition_id="train", lease=await open_session(), fields={"x": weights * 2})
    got = (await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["x"]))["x"]
    assert (got.requires_grad, got.device.type, got.values().tolist()) == (False, "cpu", [2.0, 2.0])


async def test_clearing_what_is_not_there_is_fine(queue: TransferQueue) -> None:
    await queue.kv_clear(["a", "a_0_0"], partition_id="train")
    assert queue.stats()["cleared"] == 0
