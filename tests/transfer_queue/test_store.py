"""The verbs: exact gets, whole puts, merged tags, errors that name the key, and the three endings."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from enum import StrEnum
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncrl.errors import (
    AsyncRLError,
    DtypeChangeError,
    DuplicateKeyError,
    FieldError,
    MissingColumnError,
    StaleLeaseError,
    StoreError,
    TagCountError,
    TagValueError,
    UnknownKeyError,
    UnknownPartitionError,
)
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.protocol.ragged import ragged, rows_of
from asyncrl.transfer_queue import TransferQueue

OpenSession = Callable[..., Awaitable[SessionLease]]


async def put_rows(queue: TransferQueue, lease: SessionLease, count: int = 3, partition_id: str = "train") -> list[str]:
    """Rows `responses` = [i] * i with tag seq_len = i."""
    keys = [f"{lease.uid}_{lease.session_id}_{i}" for i in range(count)]
    fields = {"responses": [torch.full((i,), i) for i in range(count)]}
    await queue.kv_batch_put(
        keys, partition_id=partition_id, lease=lease, fields=fields, tags=[{"seq_len": i} for i in range(count)]
    )
    return keys


async def everything(queue: TransferQueue) -> tuple[object, ...]:
    """All that a caller can see, to show that a refused call changed nothing."""
    listed = await queue.kv_list()
    stats = queue.stats()
    return listed, stats["keys"], stats["bytes"], stats["live_bytes"]


# --- get


async def test_get_follows_the_keys_asked(queue: TransferQueue, open_session: OpenSession) -> None:
    await put_rows(queue, await open_session())
    got = await queue.kv_batch_get(["a_0_2", "a_0_0", "a_0_1", "a_0_2"], partition_id="train", fields=["responses"])
    assert got.batch_size == (4,)
    assert [row.tolist() for row in rows_of(got["responses"])] == [[2, 2], [], [1], [2, 2]]


async def test_a_missing_key_is_named(queue: TransferQueue, open_session: OpenSession) -> None:
    await put_rows(queue, await open_session())
    with pytest.raises(UnknownKeyError, match="key 'a_0_9' is not in partition 'train'"):
        await queue.kv_batch_get(["a_0_0", "a_0_9"], partition_id="train", fields=["responses"])
    with pytest.raises(UnknownKeyError, match="'a_0_9'"):
        await queue.kv_batch_get(["a_0_9"], partition_id="train", fields=[])


async def test_an_unknown_partition_is_named(queue: TransferQueue, open_session: OpenSession) -> None:
    await put_rows(queue, await open_session())
    with pytest.raises(UnknownPartitionError, match="partition 'val' holds no key at all; asked for key 'a_0_0'"):
        await queue.kv_batch_get(["a_0_0"], partition_id="val", fields=["responses"])


async def test_a_missing_column_names_key_and_producer(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await put_rows(queue, lease)
    await queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"rm_scores": []})
    with pytest.raises(MissingColumnError, match="key 'a_0_1' in partition 'train' has no field 'rm_scores'; 'agents' writes it"):
        await queue.kv_batch_get(["a_0_0", "a_0_1"], partition_id="train", fields=["responses", "rm_scores"])
    with pytest.raises(MissingColumnError, match="'advantages'; 'advantage' writes it"):
        await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["advantages"])
    with pytest.raises(MissingColumnError, match="'nonsense'; the catalogue"):
        await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["nonsense"])


async def test_a_get_of_no_keys_is_refused(queue: TransferQueue) -> None:
    with pytest.raises(StoreError, match="a get of no keys"):
        await queue.kv_batch_get([], partition_id="train", fields=["responses"])


async def test_a_text_is_no_list_of_keys(queue: TransferQueue) -> None:
    with pytest.raises(FieldError, match="'abc' is one name"):
        await queue.kv_batch_get("abc", partition_id="train", fields=["responses"])


# --- put


async def test_tags_merge_and_columns_upsert(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await queue.kv_put(
        "a_0_0", partition_id="train", lease=lease, fields={"prompts": [1], "responses": [2]}, tag={"seq_len": 2, "status": "x"}
    )
    await queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"responses": [3, 4]}, tag={"status": "y"})
    assert await queue.kv_list("train") == {"train": {"a_0_0": {"seq_len": 2, "status": "y"}}}
    got = await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["prompts", "responses"])
    assert (got["prompts"].values().tolist(), got["responses"].values().tolist()) == ([1], [3, 4])


async def test_columns_without_tags_leave_the_tag_alone(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    keys = await put_rows(queue, lease)
    await queue.kv_batch_put(keys, partition_id="train", lease=lease, fields={"reward_score": torch.ones(3)})
    assert [tag["seq_len"] for tag in (await queue.kv_list())["train"].values()] == [0, 1, 2]


async def test_a_tag_handed_out_never_changes(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await put_rows(queue, lease)
    await queue.kv_put("a_0_3", partition_id="train", lease=lease)
    for tag in (await queue.kv_list("train"))["train"].values():
        with pytest.raises(TypeError):
            tag["seq_len"] = 1  # type: ignore[index]
    before = (await queue.kv_list("train"))["train"]["a_0_0"]
    await queue.kv_put("a_0_0", partition_id="train", lease=lease, tag={"seq_len": 9})
    assert before == {"seq_len": 0}


async def test_enum_values_become_plain(queue: TransferQueue, open_session: OpenSession) -> None:
    class Colour(StrEnum):
        RED = "red"

    await queue.kv_put("a_0_0", partition_id="train", lease=await open_session(), tag={"status": Colour.RED})
    assert type((await queue.kv_list("train"))["train"]["a_0_0"]["status"]) is str


Put = Callable[[TransferQueue, SessionLease], Coroutine[Any, Any, None]]


def batch(keys: list[str], *, fields: Any = None, tags: Any = None) -> Put:
    return lambda queue, lease: queue.kv_batch_put(keys, partition_id="train", lease=lease, fields=fields, tags=tags)


ROW = torch.ones(2, dtype=torch.int64)
SHORT = TensorDict({"responses": ragged([ROW])}, batch_size=[1])
FLOAT, WIDE = {"responses": [ROW.float()]}, {"responses": [ROW.view(1, 2)]}
GOOD_AND_BAD = {"prompts": [ROW], "extra_fields": [object()]}
REFUSED: dict[str, tuple[Put, type[AsyncRLError], str]] = {
    "duplicate key": (batch(["a_0_7", "a_0_8", "a_0_7"], tags=[{}] * 3), DuplicateKeyError, "'a_0_7' stands twice"),
    "too few tags": (batch(["a_0_7", "a_0_8"], tags=[{}]), TagCountError, "1 tags for 2 keys.*none for 'a_0_8'"),
    "too many tags": (batch(["a_0_7"], tags=[{}, {}]), TagCountError, "2 tags for 1 keys.*'a_0_7'"),
    "tag with a list": (batch(["a_0_7"], tags=[{"status": [1]}]), TagValueError, "'status' of key 'a_0_7' is list"),
    "tag with a tensor": (batch(["a_0_7"], tags=[{"n": torch.ones(())}]), TagValueError, "'n' of key 'a_0_7' is Tensor"),
    "tag of more than 64 bits": (batch(["a_0_7"], tags=[{"n": 2**64}]), TagValueError, "tag of key 'a_0_7' cannot be kept"),
    "tag that is no text": (batch(["a_0_7"], tags=[{"s": "\ud800"}]), TagValueError, "tag of key 'a_0_7' cannot be kept"),
    "tag without a name": (batch(["a_0_7"], tags=[{1: 1}]), TagValueError, "1 of key 'a_0_7'"),
    "too few values": (batch(["a_0_7", "a_0_8"], fields={"responses": [ROW]}), TagCountError, "'responses'.*none for 'a_0_8'"),
    "too short TensorDict": (batch(["a_0_7", "a_0_8"], fields=SHORT), TagCountError, "none for 'a_0_8'"),
    "another dtype": (batch(["a_0_7"], fields=FLOAT), DtypeChangeError, "'responses' of key 'a_0_7'.*float32"),
    "another dtype, same key": (batch(["a_0_1"], fields=FLOAT), DtypeChangeError, "'a_0_1'"),
    "another shape": (batch(["a_0_7"], fields=WIDE), DtypeChangeError, r"'a_0_7' came as ragged int64\[2\]"),
    "second column bad": (batch(["a_0_7"], fields=GOOD_AND_BAD, tags=[{"seq_len": 1}]), FieldError, "'a_0_7'"),
    "no keys": (batch([]), StoreError, "a put of no keys"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_put_names_the_key_and_changes_nothing(name: str, queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    await put_rows(queue, lease)
    before = await everything(queue)
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        await call(queue, lease)
    assert await everything(queue) == before


async def test_a_dtype_may_change_once_no_row_holds_the_field(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    keys = await put_rows(queue, lease)
    lease = await open_session("a", 1)
    await queue.kv_put("a_1_0", partition_id="train", lease=lease, fields={"prompts": [1]})
    with pytest.raises(DtypeChangeError):
        await queue.kv_put("a_1_0", partition_id="train", lease=lease, fields={"responses": torch.zeros(2)})
    await queue.kv_clear(keys, partition_id="train")
    await queue.kv_put("a_1_0", partition_id="train", lease=lease, fields={"responses": torch.zeros(2)})


async def test_a_put_of_one_row_holds_it_when_the_call_has_begun(queue: TransferQueue, open_session: OpenSession) -> None:
    """Nothing can come between a verb's check and its act, nor cancel it halfway: what may be waited for is the journal."""
    lease = await open_session()
    put = queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"responses": [1]}, tag={"n": 1})
    writing = asyncio.create_task(put)
    assert await queue.kv_list() == {}
    await asyncio.sleep(0)
    assert await queue.kv_list() == {"train": {"a_0_0": {"n": 1}}}
    await writing


async def test_without_a_journal_no_verb_suspends(
    any_verb: Callable[[TransferQueue], Coroutine[Any, Any, None]], furnish_queue: Callable[[TransferQueue], Awaitable[None]]
) -> None:
    await furnish_queue(queue := TransferQueue())
    with pytest.raises(StopIteration):
        any_verb(queue).send(None)


# --- endings


async def test_clearing_a_prompt_clears_its_group(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session("a")
    await queue.kv_put("a", partition_id="train", lease=GroupLease(uid="a"), tag={"is_prompt": True})
    await put_rows(queue, lease)
    await put_rows(queue, await open_session("b"))
    await queue.kv_clear(["a"], partition_id="train")
    assert list((await queue.kv_list("train"))["train"]) == ["b_0_0", "b_0_1", "b_0_2"]
    for late in (GroupLease(uid="a"), lease):
        with pytest.raises(StaleLeaseError):
            await queue.kv_put("a" if late is not lease else "a_0_0", partition_id="train", lease=late, tag={"status": "late"})
    with pytest.raises(StaleLeaseError):
        await queue.open_lease(SessionLease(uid="a", session_id=1))


async def test_clearing_what_was_never_written_still_shuts_the_door(queue: TransferQueue, open_session: OpenSession) -> None:
    lease, other = await open_session("a", 0), await open_session("a", 1)
    await queue.kv_clear(["a_0_0"], partition_id="train")
    with pytest.raises(StaleLeaseError):
        await put_rows(queue, lease)
    await queue.kv_clear(["a", "never_heard_of_it"], partition_id="train")
    with pytest.raises(StaleLeaseError):
        await put_rows(queue, other)
    assert queue.stats()["open_leases"] == 0


async def test_a_partition_vanishes_with_its_last_key(queue: TransferQueue, open_session: OpenSession) -> None:
    keys = await put_rows(queue, await open_session())
    assert list(await queue.kv_list()) == ["train"]
    await queue.kv_clear(keys, partition_id="train")
    assert await queue.kv_list() == {}
    assert await queue.kv_list("train") == {"train": {}}
    assert queue.stats()["bytes"] == 0


async def test_clearing_a_key_twice_in_one_call_is_refused(queue: TransferQueue, open_session: OpenSession) -> None:
    await put_rows(queue, await open_session())
    with pytest.raises(DuplicateKeyError, match="'a_0_0'"):
        await queue.kv_clear(["a_0_0", "a_0_0"], partition_id="train")
    assert queue.stats()["keys"] == 3


async def put_group(queue: TransferQueue, open_session: OpenSession, uid: str) -> list[str]:
    lease = await open_session(uid)
    await queue.kv_put(uid, partition_id="train", lease=GroupLease(uid=uid), tag={"is_prompt": True})
    return await put_rows(queue, lease)


async def test_retiring_all_trajectories_retires_their_prompts(queue: TransferQueue, open_session: OpenSession) -> None:
    keys = await put_group(queue, open_session, "a")
    other = await put_group(queue, open_session, "b")
    step = StepLease(step=3)
    await queue.open_lease(step)
    await queue.retire([*keys, other[0]], partition_id="train", step=3, lease=step)
    assert list((await queue.kv_list("train"))["train"]) == ["b", other[1], other[2]]
    with pytest.raises(UnknownKeyError):
        await queue.kv_batch_get(keys, partition_id="train", fields=["responses"])
    with pytest.raises(StaleLeaseError):
        await queue.kv_put("a", partition_id="train", lease=GroupLease(uid="a"), tag={"status": "late"})
    await queue.retire(["b", *other[1:]], partition_id="train", step=3, lease=step)
    assert (queue.stats()["keys"], queue.stats()["bytes"], queue.stats()["retired"]) == (0, 0, 8)


async def test_only_the_open_lease_of_the_step_retires(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    keys = await put_rows(queue, lease)
    await queue.open_lease(StepLease(step=2))
    for wrong in (lease, StepLease(step=1), StepLease(step=2)):
        with pytest.raises(StaleLeaseError, match="of step 1"):
            await queue.retire(keys, partition_id="train", step=1, lease=wrong)
    with pytest.raises(UnknownKeyError, match="'a_0_9'"):
        await queue.retire([*keys, "a_0_9"], partition_id="train", step=2, lease=StepLease(step=2))
    assert queue.stats()["keys"] == 3


async def test_revive_takes_back_what_the_step_wrote_and_nothing_else(queue: TransferQueue, open_session: OpenSession) -> None:
    keys = await put_rows(queue, await open_session())
    before = await everything(queue)
    step = StepLease(step=1)
    await queue.open_lease(step)
    await queue.kv_batch_put(keys, partition_id="train", lease=step, fields={"advantages": [torch.ones(i) for i in range(3)]})
    await queue.revive(keys, partition_id="train", step=1)
    assert await everything(queue) == before
    with pytest.raises(MissingColumnError, match="'advantages'"):
        await queue.kv_batch_get(keys, partition_id="train", fields=["advantages"])
    with pytest.raises(StaleLeaseError):
        await queue.kv_put(keys[0], partition_id="train", lease=step, fields={"advantages": []})
    with pytest.raises(StaleLeaseError, match="failed and was revived; another try is a higher attempt"):
        await queue.open_lease(step)
    again = StepLease(step=1, attempt=1)
    await queue.open_lease(again)
    with pytest.raises(StaleLeaseError):  # a stage of the failed attempt that is still under way
        await queue.kv_put(keys[0], partition_id="train", lease=step, fields={"advantages": []})
    with pytest.raises(UnknownKeyError, match="'a_0_9'"):
        await queue.revive(["a_0_9"], partition_id="train", step=1)


async def test_partitions_are_apart(queue: TransferQueue, open_session: OpenSession) -> None:
    await put_rows(queue, await open_session("a"), partition_id="train")
    await put_rows(queue, await open_session("b"), partition_id="val")
    listed = await queue.kv_list()
    assert {name: len(tags) for name, tags in listed.items()} == {"train": 3, "val": 3}
    await queue.kv_clear(["b_0_0"], partition_id="train")
    assert queue.stats()["keys"] == 6
