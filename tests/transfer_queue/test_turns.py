"""Turns: what a session under way came to is kept until it settles, and by no one else."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from asyncrl.errors import FieldError, RecordError, StaleLeaseError
from asyncrl.keys import GroupLease, SessionLease
from asyncrl.protocol.ragged import rows_of
from asyncrl.transfer_queue import TransferQueue

Look = Callable[..., dict[str, Any]]
OpenSession = Callable[..., Awaitable[SessionLease]]
durable = pytest.mark.parametrize("house", ["model", "sqlite"], indirect=True)


async def numbers(queue: TransferQueue, uid: str = "a", session_id: int = 0) -> list[list[int]]:
    """The responses of each turn."""
    return [rows_of(turn["responses"])[0].tolist() for turn in await queue.kv_turns(uid, session_id)]


async def take(queue: TransferQueue, lease: SessionLease, count: int = 2) -> None:
    for turn in range(count):
        await queue.put_turn(lease, turn, {"responses": [turn] * turn})


async def test_turns_come_back_in_order_and_apart(queue: TransferQueue, open_session: OpenSession) -> None:
    first, second = await open_session("a", 0), await open_session("a", 1)
    await take(queue, first, 3)
    await take(queue, second, 1)
    assert await numbers(queue) == [[], [1], [2, 2]]
    assert await numbers(queue, session_id=1) == [[]]
    assert await numbers(queue, "nobody") == []
    assert queue.stats()["turns"] == 4


async def test_a_turn_may_hold_anything_that_a_row_can(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    fields = {"responses": [1, 2], "extra_fields": {"tool": ["9"]}, "x": torch.ones(2, 3, dtype=torch.bfloat16), "y": 1.5}
    await queue.put_turn(lease, 0, fields)
    await queue.put_turn(lease, 1, {})
    await queue.put_turn(lease, 2, {"x": torch.ones(1)})  # turns are apart: another shape and dtype is no change of a column
    first, nothing, other = await queue.kv_turns("a", 0)
    assert first.batch_size == nothing.batch_size == other.batch_size == (1,)
    assert first["x"].dtype is torch.bfloat16
    assert rows_of(first["x"])[0].shape == (2, 3)
    assert (first.get("extra_fields").tolist(), first.get("y").tolist()) == ([{"tool": ["9"]}], [1.5])
    assert list(nothing.keys()) == []


async def test_turns_are_copied_in_and_out(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    values = torch.tensor([1, 2])
    await queue.put_turn(lease, 0, {"responses": values})
    values.zero_()
    (await queue.kv_turns("a", 0))[0]["responses"].values().zero_()
    assert await numbers(queue) == [[1, 2]]


@pytest.mark.parametrize("turn", [-1, 0, 1, 3])
async def test_a_turn_follows_the_one_before(turn: int, queue: TransferQueue, open_session: OpenSession, look: Look) -> None:
    lease = await open_session()
    await take(queue, lease)
    before = look(queue)
    with pytest.raises(RecordError, match=f"turn {turn} of session a_0 cannot be written: 2 turns are"):
        await queue.put_turn(lease, turn, {"responses": [1]})
    assert look(queue) == before


async def test_a_refused_turn_changes_nothing(queue: TransferQueue, open_session: OpenSession, look: Look) -> None:
    lease = await open_session()
    await take(queue, lease)
    before = look(queue)
    with pytest.raises(FieldError, match="field 'extra_fields' of key 'a_0'"):
        await queue.put_turn(lease, 2, {"responses": [1], "extra_fields": {1, 2}})
    for stale in (SessionLease(uid="a", session_id=0, attempt=1), SessionLease(uid="a", session_id=1)):
        with pytest.raises(StaleLeaseError, match="is not open"):
            await queue.put_turn(stale, 2, {"responses": [1]})
    assert look(queue) == before
    await queue.put_turn(lease, 2, {"responses": [1]})


ENDS: dict[str, tuple[Callable[[TransferQueue, SessionLease], Awaitable[None]], int]] = {
    "retry": (lambda queue, _: queue.open_lease(SessionLease(uid="a", session_id=0, attempt=1)), 2),
    "close session": (lambda queue, lease: queue.close_lease(lease), 2),
    "close group": (lambda queue, _: queue.close_lease(GroupLease(uid="a")), 0),
    "settle": (lambda queue, lease: queue.settle_session(lease, partition_id="train"), 2),
    "settle group": (lambda queue, _: queue.settle_group(GroupLease(uid="a"), partition_id="train", tag={"n": 1}), 0),
    "clear prompt": (lambda queue, _: queue.kv_clear(["a"], partition_id="train"), 0),
    "clear its key": (lambda queue, _: queue.kv_clear(["a_0_0"], partition_id="train"), 2),
    "drop": (lambda queue, _: queue.drop(["a"], partition_id="train", reason="x"), 0),
    "settle with a tag": (
        lambda queue, lease: queue.settle_session(lease, partition_id="train", group_tag={"n": 1}, ends_group=False),
        2,
    ),
    "reopened": (lambda queue, _: queue.reopen_group(GroupLease(uid="a", incarnation=1), partition_id="train")[1], 4),
    "other group cleared": (lambda queue, _: queue.kv_clear(["a_1"], partition_id="train"), 4),
    "taken over": (lambda queue, _: queue.open_lease(GroupLease(uid="a", incarnation=1)), 4),
}


@pytest.mark.parametrize("name", ENDS)
async def test_turns_end_with_what_they_were_for(name: str, queue: TransferQueue, open_session: OpenSession) -> None:
    """Left of two turns each of sessions 0 and 1; the act is on session 0 or their group."""
    lease, other = await open_session("a", 0), await open_session("a", 1)
    await queue.kv_put("a", partition_id="train", lease=GroupLease(uid="a"), tag={"is_prompt": True})
    await take(queue, lease)
    await take(queue, other)
    act, left = ENDS[name]
    await act(queue, lease)
    assert queue.stats()["turns"] == left


async def test_a_restart_keeps_attempt_and_turns_and_a_retry_after_it_does_not(
    queue: TransferQueue, open_session: OpenSession
) -> None:
    await take(queue, await open_session())
    await queue.open_lease(GroupLease(uid="a", incarnation=1))
    same = SessionLease(uid="a", session_id=0, attempt=0, incarnation=1)
    await queue.open_lease(same)
    assert await numbers(queue) == [[], [1]]
    await queue.put_turn(same, 2, {"responses": [9]})
    await queue.open_lease(SessionLease(uid="a", session_id=0, attempt=1, incarnation=1))
    assert await numbers(queue) == []


@durable
async def test_the_next_process_goes_on_at_the_next_turn(
    queue: TransferQueue, open_session: OpenSession, reopen: Callable[[], Awaitable[TransferQueue]]
) -> None:
    await take(queue, await open_session())
    queue = await reopen()
    assert await numbers(queue) == [[], [1]]
    (await queue.kv_turns("a", 0))[1]["responses"].values().zero_()
    assert await numbers(queue) == [[], [1]]
    lease = SessionLease(uid="a", session_id=0, incarnation=queue.incarnation)
    await queue.open_lease(GroupLease(uid="a", incarnation=queue.incarnation))
    with pytest.raises(StaleLeaseError):
        await queue.put_turn(SessionLease(uid="a", session_id=0), 2, {"responses": [9]})
    await queue.open_lease(lease)
    with pytest.raises(RecordError, match="2 turns are"):
        await queue.put_turn(lease, 0, {"responses": [9]})
    await queue.put_turn(lease, 2, {"responses": [9]})
    assert await numbers(await reopen()) == [[], [1], [9]]
