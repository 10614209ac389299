"""describe: schema, lengths and mask sums of what the store holds, whoever wrote it and in how many puts."""

from collections.abc import Awaitable, Callable

import pytest
import torch

from asyncrl.errors import UnknownKeyError, UnknownPartitionError
from asyncrl.keys import TRAIN, SessionLease, StepLease
from asyncrl.protocol.ragged import ragged
from asyncrl.transfer_queue import TransferQueue

OpenSession = Callable[..., Awaitable[SessionLease]]


async def put(queue: TransferQueue, lease: SessionLease, mask: list[bool]) -> str:
    key = f"{lease.uid}_{lease.session_id}_0"
    fields = {
        "response_mask": torch.tensor(mask, dtype=torch.bool),
        "reward_score": torch.tensor(0.5),
        "extra_fields": {"a": [1, 2, 3]},
    }
    await queue.kv_put(key, partition_id=TRAIN, lease=lease, fields=fields, tag={"status": "finished"})
    return key


async def test_every_field_is_told_with_a_length_and_a_mask_sum_a_row(queue: TransferQueue, open_session: OpenSession) -> None:
    masks: list[list[bool]] = [[True, False, True], [], [True]]
    keys = [await put(queue, await open_session("a", number), mask) for number, mask in enumerate(masks)]
    step = StepLease(step=1)
    await queue.open_lease(step)
    returns = ragged([torch.zeros(len(mask)) for mask in masks])
    await queue.kv_batch_put(keys, partition_id=TRAIN, lease=step, fields={"returns": returns})
    held = await queue.describe(keys[::-1], partition_id=TRAIN)
    assert [(column.field, column.dtype, column.layout, column.lengths, column.by_stage) for column in held] == [
        ("response_mask", "bool", "ragged", (1, 0, 3), False),
        ("reward_score", "float32", "stacked", (1, 1, 1), False),
        ("extra_fields", "object", "object", (1, 1, 1), False),
        ("returns", "float32", "ragged", (1, 0, 3), True),
    ]
    assert {(column.mask_sums, column.shape, column.device) for column in held} == {((1, 0, 2), (), "cpu")}


async def test_rows_of_one_put_are_told_apart(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    keys = ["a_0_0", "a_0_1"]
    masks = [torch.tensor([True, True, False]), torch.tensor([False, True])]
    await queue.kv_batch_put(keys, partition_id=TRAIN, lease=lease, fields={"response_mask": masks}, tags=[{}, {}])
    (column,) = await queue.describe(keys, partition_id=TRAIN)
    assert (column.lengths, column.mask_sums) == ((3, 2), (2, 1))


async def test_entries_of_a_ragged_field_may_have_a_shape(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await queue.kv_put("a_0_0", partition_id=TRAIN, lease=lease, fields={"patches": torch.zeros(4, 3, 2)}, tag={})
    (column,) = await queue.describe(["a_0_0"], partition_id=TRAIN)
    assert (column.layout, column.shape, column.lengths, column.mask_sums) == ("ragged", (3, 2), (4,), None)


async def test_a_row_without_the_column_is_marked(queue: TransferQueue, open_session: OpenSession) -> None:
    first = await put(queue, await open_session("a", 0), [True])
    lease = await open_session("a", 1)
    await queue.kv_put("a_1_0", partition_id=TRAIN, lease=lease, fields={"reward_score": torch.tensor(1.0)}, tag={})
    held = {column.field: column for column in await queue.describe([first, "a_1_0"], partition_id=TRAIN)}
    assert held["response_mask"].lengths == (1, -1)
    assert held["reward_score"].lengths == (1, 1)
    assert held["reward_score"].mask_sums is None, "not every row has a mask"


async def test_keys_that_are_not_there_are_named(queue: TransferQueue, open_session: OpenSession) -> None:
    with pytest.raises(UnknownPartitionError, match="a_0_0"):
        await queue.describe(["a_0_0"], partition_id=TRAIN)
    await put(queue, await open_session(), [True])
    with pytest.raises(UnknownKeyError, match="b_0_0"):
        await queue.describe(["a_0_0", "b_0_0"], partition_id=TRAIN)
