"""The worked example is a trajectory that a run could have: it breaks no invariant, and its tag spells the four lengths."""

import torch

from asyncrl.keys import TRAIN, GroupLease, SessionLease
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants import check_batch
from asyncrl.protocol_page import example
from asyncrl.stages.contract import ROW_FIELDS
from asyncrl.transfer_queue import TransferQueue


async def test_the_example_breaks_no_invariant() -> None:
    queue, rows = TransferQueue(), example.rows()
    session = SessionLease(uid="a1b2", session_id=0)
    await queue.open_lease(GroupLease(uid="a1b2"))
    await queue.open_lease(session)
    await queue.kv_batch_put(rows.keys, partition_id=TRAIN, lease=session, fields=rows.fields, tags=rows.tags)
    columns = await queue.kv_batch_get(rows.keys, partition_id=TRAIN, fields=ROW_FIELDS)
    check_batch(KVBatchMeta(partition_id=TRAIN, keys=tuple(rows.keys), tags=tuple(rows.tags)), columns)


def test_the_observation_is_in_the_middle_and_counts_for_no_policy_token() -> None:
    mask = torch.tensor(example.OUTPUT.response_mask)
    first, last = int(mask.argmax()), len(mask) - 1 - int(mask.flip(0).argmax())
    assert 0 in mask[first:last]
    tag = example.rows().tags[0]
    assert (tag["prompt_len"], tag["response_len"], tag["seq_len"], tag["policy_len"]) == (4, 7, 11, 5)
    assert (tag["min_global_steps"], tag["max_global_steps"]) == (7, 8)


def test_the_columns_of_an_axis_stand_under_each_other() -> None:
    lines = [line for line in example.columns_text().splitlines() if "response" in line or "sequence" in line]
    assert len(lines) > 5
    assert len({len(line) for line in lines}) == 1, "all end at the last position"
