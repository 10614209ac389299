"""What the next process finds: everything that was acknowledged, as it was, and no door open to the dead."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from asyncrl.errors import DtypeChangeError, JournalDamagedError, MissingColumnError, StaleLeaseError
from asyncrl.fields import Tag
from asyncrl.journal.entries import Header, PutColumn, PutRows, RowEntry
from asyncrl.journal.model import MemoryJournal
from asyncrl.journal.sqlite import open_journal
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.protocol.ragged import rows_of
from asyncrl.transfer_queue import TransferQueue

Look = Callable[..., dict[str, Any]]
OpenSession = Callable[..., Awaitable[SessionLease]]
Reopen = Callable[[], Awaitable[TransferQueue]]
Furnish = Callable[[TransferQueue], Awaitable[None]]
durable = pytest.mark.parametrize("house", ["model", "sqlite"], indirect=True)


@durable
async def test_nothing_is_lost_or_added_however_often_it_is_opened(furnished: TransferQueue, reopen: Reopen, look: Look) -> None:
    """`reopen` compares rows with their numbers, order, tags and bytes, leases, turns, records and counters."""
    before = look(furnished, is_durable=True)
    assert [len(before[part]) for part in ("rows", "leases", "turns", "records", "counters")] == [1, 2, 1, 2, 2]
    for incarnation in (1, 2, 3):
        queue = await reopen()
        assert queue.incarnation == incarnation
    assert look(queue, is_durable=True) == before


async def test_both_journals_keep_the_same(furnish_queue: Furnish, folder: Any) -> None:
    model, disk = MemoryJournal(), open_journal(folder / "other.db")
    for journal in (model, disk):
        await furnish_queue(TransferQueue(journal, journal.load()))
    disk.close()
    disk = open_journal(folder / "other.db")
    try:
        assert disk.load() == model.crash().load()
    finally:
        disk.close()


@durable
async def test_what_stages_wrote_is_computed_again(furnished: TransferQueue, reopen: Reopen) -> None:
    queue = await reopen()
    with pytest.raises(MissingColumnError, match=r"'b_0_0'.*'advantages'; 'advantage' writes it"):
        await queue.kv_batch_get(["b_0_0"], partition_id="train", fields=["advantages"])
    await queue.open_lease(StepLease(step=2))
    await queue.kv_put(
        "b_0_0", partition_id="train", lease=StepLease(step=2), fields={"advantages": torch.ones(2, dtype=torch.half)}
    )


@durable
async def test_an_open_lease_is_taken_over_by_a_higher_incarnation_only(furnished: TransferQueue, reopen: Reopen) -> None:
    queue = await reopen()
    assert queue.stats()["open_leases"] == 3  # group `c` and its session, and prompt `p`
    for lower in (GroupLease(uid="c"), SessionLease(uid="c", session_id=0)):
        with pytest.raises(StaleLeaseError, match=r"is open|has written"):
            await queue.open_lease(lower)
    await queue.open_lease(GroupLease(uid="c", incarnation=queue.incarnation))
    with pytest.raises(StaleLeaseError):
        await queue.kv_put("c_0_0", partition_id="train", lease=SessionLease(uid="c", session_id=0), tag={"status": "late"})
    lease = SessionLease(uid="c", session_id=0, incarnation=queue.incarnation)
    await queue.open_lease(lease)
    await queue.kv_put("c_0_0", partition_id="train", lease=lease, fields={"responses": [5]})
    await queue.settle_session(lease, partition_id="train", group_tag={"status": "finished"})


@durable
async def test_a_settled_session_stays_settled(queue: TransferQueue, open_session: OpenSession, reopen: Reopen) -> None:
    await open_session("a", 1)
    await queue.settle_session(await open_session("a", 0, attempt=1), partition_id="train")
    queue = await reopen()
    assert queue.stats()["open_leases"] == 2
    for attempt in (0, 1):
        with pytest.raises(StaleLeaseError, match="has settled"):
            await queue.open_lease(SessionLease(uid="a", session_id=0, attempt=attempt))
    await queue.open_lease(SessionLease(uid="a", session_id=0, attempt=2))


@durable
async def test_a_lower_attempt_does_not_come_back(queue: TransferQueue, open_session: OpenSession, reopen: Reopen) -> None:
    first = await open_session("a", 0)
    await queue.kv_put("a_0_0", partition_id="train", lease=first, fields={"responses": [1]})
    second = await open_session("a", 0, attempt=1)
    queue = await reopen()
    assert await queue.kv_list() == {}
    with pytest.raises(StaleLeaseError):
        await queue.kv_put("a_0_0", partition_id="train", lease=first, fields={"responses": [1]})
    await queue.kv_put("a_0_0", partition_id="train", lease=second, fields={"responses": [2]})


@durable
@pytest.mark.parametrize("num_reopened", [1, 2])
async def test_a_row_number_is_never_given_twice(
    num_reopened: int, queue: TransferQueue, open_session: OpenSession, reopen: Reopen, look: Look
) -> None:
    """Not even that of the newest rows, when they are gone before the process ends."""
    lease = await open_session()
    keys = [f"a_0_{index}" for index in range(5)]
    await queue.kv_batch_put(keys, partition_id="train", lease=lease, tags=[{"n": 1}] * 5)
    await queue.kv_clear(keys, partition_id="train")
    for _ in range(num_reopened):
        queue = await reopen()
    assert look(queue)["row ids"] == "count(6)"
    await queue.open_lease(GroupLease(uid="b"))
    await queue.kv_put("b", partition_id="train", lease=GroupLease(uid="b"), tag={"n": 2})
    assert look(await reopen())["rows"]["train"][0][1] == 6


@durable
async def test_keys_keep_their_order_and_new_ones_follow(queue: TransferQueue, open_session: OpenSession, reopen: Reopen) -> None:
    lease = await open_session()
    for index in (3, 0, 2, 1):
        await queue.kv_put(f"a_0_{index}", partition_id="train", lease=lease, tag={"n": index})
    await queue.kv_put("a_0_3", partition_id="train", lease=lease, tag={"n": 9})
    await queue.kv_clear(["a_9_9"], partition_id="train")
    queue = await reopen()
    await queue.kv_put("a_0_4", partition_id="train", lease=lease, tag={"n": 4})
    assert list((await queue.kv_list())["train"]) == ["a_0_3", "a_0_0", "a_0_2", "a_0_1", "a_0_4"]


TAG: Tag = {"yes": True, "one": 1, "no": False, "zero": 0, "float": 1.0, "minus": -0.0, "nan": float("nan"), "inf": float("inf")}
LONG: Tag = {"most": 2**64 - 1, "least": -(2**63), "": "", "nul": "a\0b", "text": "ü😀", "long": "x" * 100_000, "tiny": 5e-324}


@durable
async def test_tags_come_back_to_the_bit_and_cannot_be_changed(
    queue: TransferQueue, open_session: OpenSession, reopen: Reopen
) -> None:
    lease = await open_session()
    await queue.kv_put("a_0_0", partition_id="train", lease=lease, tag={**TAG, **LONG})
    await queue.kv_put("a_0_1", partition_id="train", lease=lease)
    queue = await reopen()  # compares their text: True is not 1 there, and nan is nan
    for tag in (await queue.kv_list())["train"].values():
        with pytest.raises(TypeError):
            tag["status"] = "mine"  # type: ignore[index]
    await queue.kv_put("a_0_0", partition_id="train", lease=lease, tag={"one": 2})
    assert (await queue.kv_list())["train"]["a_0_0"]["text"] == "ü😀"


@durable
async def test_the_last_value_of_a_column_is_the_one_that_comes_back(
    queue: TransferQueue, open_session: OpenSession, reopen: Reopen
) -> None:
    lease = await open_session()
    for value in range(4):
        fields = {"responses": [[value] * value, [value]], **({"prompts": [[1], [2]]} if value == 1 else {})}
        await queue.kv_batch_put(["a_0_0", "a_0_1"], partition_id="train", lease=lease, fields=fields)
    await queue.kv_put("a_0_1", partition_id="train", lease=lease, fields={"responses": []})
    queue = await reopen()
    got = await queue.kv_batch_get(["a_0_1", "a_0_0"], partition_id="train", fields=["responses", "prompts"])
    assert [row.tolist() for row in rows_of(got["responses"])] == [[], [3, 3, 3]]
    assert [row.tolist() for row in rows_of(got["prompts"])] == [[2], [1]]


@durable
async def test_a_dtype_holds_as_long_as_a_row_does(queue: TransferQueue, open_session: OpenSession, reopen: Reopen) -> None:
    lease, other = await open_session("a", 0), await open_session("a", 1)
    await queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"x": torch.ones(2)})
    queue = await reopen()
    for wrong in (torch.ones(2, dtype=torch.float64), torch.ones(2, 2), torch.tensor(1.0)):
        with pytest.raises(DtypeChangeError, match="field 'x' of key 'a_1_0'"):
            await queue.kv_put("a_1_0", partition_id="train", lease=other, fields={"x": wrong})
    await queue.kv_clear(["a_0_0"], partition_id="train")
    await queue.kv_put("a_1_0", partition_id="train", lease=other, fields={"x": torch.ones(2, dtype=torch.float64)})
    await reopen()


@durable
async def test_after_a_reopen_one_row_does_not_pin_its_group(
    queue: TransferQueue, open_session: OpenSession, reopen: Reopen
) -> None:
    lease = await open_session()
    keys = [f"a_0_{index}" for index in range(64)]
    await queue.kv_batch_put(keys, partition_id="train", lease=lease, fields={"x": torch.arange(64 * 100).view(64, 100)})
    queue = await reopen()
    assert queue.stats()["bytes"] == queue.stats()["live_bytes"] == 64 * 800
    await queue.kv_clear([key for key in keys if key != "a_0_37"], partition_id="train")
    assert queue.stats()["bytes"] == 800
    queue = await reopen()
    got = await queue.kv_batch_get(["a_0_37"], partition_id="train", fields=["x"])
    assert got["x"].tolist() == [list(range(3700, 3800))]


@durable
async def test_what_came_back_is_the_stores_own_memory(queue: TransferQueue, open_session: OpenSession, reopen: Reopen) -> None:
    lease = await open_session()
    await queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"responses": [1, 2], "extra_fields": {"a": [1]}})
    queue = await reopen()
    for _ in range(2):
        got = await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["responses", "extra_fields"])
        assert (got["responses"].values().tolist(), got.get("extra_fields").tolist()) == ([1, 2], [{"a": [1]}])
        got["responses"].values().zero_()
        got.get("extra_fields").tolist()[0]["a"].clear()


@durable
async def test_a_watch_of_the_next_process_begins_with_what_is_there(furnished: TransferQueue, reopen: Reopen) -> None:
    queue = await reopen()
    watch = queue.kv_watch("train")
    assert await anext(watch) == (await queue.kv_list())["train"]


@durable
async def test_partitions_that_were_emptied_are_not_there(queue: TransferQueue, open_session: OpenSession, reopen: Reopen) -> None:
    lease = await open_session()
    for name in ("one", "two"):
        await queue.kv_put("a_0_0", partition_id=name, lease=lease, fields={"responses": [1]})
    await queue.kv_clear(["a_0_0"], partition_id="one")
    assert list(await (await reopen()).kv_list()) == ["two"]


# --- power


@pytest.mark.parametrize("is_full_sync", [False, True], ids=["normal", "full"])
async def test_power_takes_what_came_after_the_last_sync(is_full_sync: bool, furnish_queue: Furnish, look: Look) -> None:
    journal = MemoryJournal(is_full_sync=is_full_sync)
    queue = TransferQueue(journal, journal.load())
    await furnish_queue(queue)
    await queue.record(3, ["d_0_0", "d_0_1"], partition_id="train")
    synced = look(queue, is_durable=True)
    await queue.kv_clear(["p"], partition_id="train")
    left = journal.lose_power()
    found = look(TransferQueue(left, left.load(1), weights_step=1), is_durable=True)
    assert found == (look(queue, is_durable=True) if is_full_sync else synced)
    await queue.sync()
    left = journal.lose_power()
    assert look(TransferQueue(left, left.load(1), weights_step=1), is_durable=True) == look(queue, is_durable=True)


# --- damage


@pytest.mark.parametrize("header", [Header(kind="ragged", dtype="float13"), Header(kind="heap"), Header(kind="ragged", dtype="nn")])
async def test_a_column_of_a_dtype_that_there_is_not_is_damage(header: Header) -> None:
    journal = MemoryJournal()
    row = RowEntry(1, "train", "a_0_0", "a", 0, 0, 0, {})
    await journal.append([PutRows([row]), PutColumn("x", header, [1], memoryview(b"1234"), [0, 4])])
    with pytest.raises(JournalDamagedError, match=f"kind '{header.kind}' and dtype '{header.dtype}'; there is none"):
        TransferQueue(journal, journal.load())
