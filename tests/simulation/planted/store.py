"""Bugs in the store: leases, endings, records, watches, the ledger."""

import asyncio
from collections.abc import Iterator
from typing import Any

from asyncrl.journal.entries import RemoveRows
from asyncrl.keys import StepLease
from asyncrl.transfer_queue import TransferQueue, endings, puts
from asyncrl.transfer_queue.leases import Leases
from asyncrl.transfer_queue.ledger import Ledger
from asyncrl.transfer_queue.partition import Partition
from asyncrl.transfer_queue.watch import Watch, Watches
from tests.simulation.planted.bug import bug, replaced

# --- leases and endings


@bug("a drop closes the leases of its groups, and deletes nothing: a fence without deletion")
def fence_without_deletion() -> Iterator[None]:
    def drop(state: Any, uids: Any, partition_id: str, reason: str) -> Any:
        return [*state.end([(uid, None) for uid in uids]), state.ledger.count_dropped(reason, len(uids))]

    with replaced(endings, drop=drop):
        yield


@bug("a dropped group's keys go from memory, but not from the journal")
def drop_not_journaled() -> Iterator[None]:
    right = endings.clear

    def clear(*arguments: Any, **named: Any) -> Any:
        return [op for op in right(*arguments, **named) if not isinstance(op, RemoveRows)]

    with replaced(endings, clear=clear):
        yield


@bug("a cleared group's prompt is forgotten in the index, and its row stays")
def cleared_key_stays() -> Iterator[None]:
    right = Partition.remove

    def remove(self: Any, keys: Any) -> None:
        prompts = {key: self.rows[key] for key in keys if self.rows[key].owner.session_id is None}
        right(self, keys)
        self.rows.update(prompts)

    with replaced(Partition, remove=remove):
        yield


@bug("whether a lease is open is not asked: late writes are accepted as long as the group is there")
def late_write_accepted() -> Iterator[None]:
    def check(self: Any, lease: Any, keys: Any, partition_id: str) -> None:
        return None

    with replaced(Leases, check=check), replaced(puts, settle_session=_settle_without_group(puts.settle_session)):
        yield


def _settle_without_group(right: Any) -> Any:
    def settle_session(state: Any, lease: Any, rows: Any, group_tag: Any, *, ends_group: bool) -> Any:
        return [] if state.leases.group(lease.uid) is None else right(state, lease, rows, group_tag, ends_group=ends_group)

    return settle_session


@bug("the lease of a session stays open when the session settles")
def lease_open_after_settle() -> Iterator[None]:
    right = Leases.close

    def close(self: Any, lease: Any) -> None:
        if not hasattr(lease, "session_id"):
            right(self, lease)

    with replaced(Leases, close=close):
        yield


@bug("the lease of a group stays open when the group is at its end")
def group_lease_stays() -> Iterator[None]:
    def settle_group_too(state: Any, lease: Any, rows: Any, group_tag: Any, *, ends_group: bool) -> Any:
        checked = [puts._check(state, lease, rows)] if rows.keys else []
        if group_tag is not None:
            group = state.leases.group(lease.uid)
            last = puts.Put(partition_id=rows.partition_id, keys=[lease.uid], tags=[group_tag])
            checked.append(puts._check(state, group, last))
        return [*(op for each in checked for op in puts._act(state, each)), *state.close(lease)]

    with replaced(puts, settle_session=settle_group_too):
        yield


@bug("a settled session is written twice, the second time with another reward")
def duplicate_write() -> Iterator[None]:
    right = puts._act

    def act(state: Any, checked: Any) -> Any:
        ops = right(state, checked)
        if "reward_score" in checked.blocks:
            block = checked.blocks["reward_score"]
            changed = type(block)(block.schema, 1 - block.values, block.bounds, block.step, checked.put.keys)
            again = type(checked)(put=checked.put, blocks={"reward_score": changed}, tags=checked.tags, owner=checked.owner)
            ops = [*ops, *right(state, again)]
        return ops

    with replaced(puts, _act=act):
        yield


@bug("the turns of a session are kept after it has settled")
def turns_stay() -> Iterator[None]:
    with replaced(Ledger, remove_turns=lambda self, sessions: []):
        yield


# --- steps


@bug("the record of a step is not synced before its stages run")
def record_not_synced() -> Iterator[None]:
    async def record(self: Any, step: int, keys: Any, *, partition_id: str) -> int:
        await self._commit(self._write(lambda: endings.record(self._state, step, list(keys), partition_id)))
        return 1

    with replaced(TransferQueue, record=record):
        yield


@bug("verbs do not wait for the journal")
def commit_not_awaited() -> Iterator[None]:
    async def commit(self: Any, ops: Any, *, synced: bool = False) -> None:
        if ops:
            self._deadline.watch(self._journal.append(ops, synced=synced))

    with replaced(TransferQueue, _commit=commit):
        yield


@bug("retire hides the trajectories and leaves their prompts")
def prompts_outlive_their_step() -> Iterator[None]:
    with replaced(endings, _with_prompts=lambda partition, keys: dict.fromkeys(keys)):
        yield


@bug("retire deletes the record's rows for good, before any checkpoint has the step")
def retire_deletes() -> Iterator[None]:
    right = endings.retire

    def retire(state: Any, keys: Any, partition_id: str, step: int, lease: Any) -> Any:
        ops = right(state, keys, partition_id, step, lease)
        return [*ops, RemoveRows(list(state.ledger.records[step].row_ids))]

    with replaced(endings, retire=retire):
        yield


@bug("the lease of a step is not closed at its end")
def step_lease_stays() -> Iterator[None]:
    right = TransferQueue.close_lease

    async def close_lease(self: Any, lease: Any) -> None:
        if not isinstance(lease, StepLease):
            await right(self, lease)

    with replaced(TransferQueue, close_lease=close_lease):
        yield


# --- the ledger


@bug("an admission is not counted")
def admission_not_counted() -> Iterator[None]:
    right = Ledger.count

    def count(self: Any, **values: int) -> Any:
        values.pop("admitted", None)
        return right(self, **values)

    with replaced(Ledger, count=count):
        yield


@bug("a drop is counted twice")
def drop_counted_twice() -> Iterator[None]:
    right = Ledger.count_dropped

    with replaced(Ledger, count_dropped=lambda self, reason, number: right(self, reason, 2 * number)):
        yield


# --- watches


@bug("a watch forgets what changes between its wake and its read")
def wake_up_lost() -> Iterator[None]:
    async def following(self: Any) -> Any:
        while self._has_begun and not self._changed:
            if self._is_closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        if not self._has_begun:
            self._has_begun = True
            return self._snapshot()
        changes = {key: self._read(key) for key in self._changed}
        await asyncio.sleep(0)
        self._changed.clear()
        return changes

    with replaced(Watch, __anext__=following):
        yield


@bug("a watch is not told of keys that go")
def removals_not_told() -> Iterator[None]:
    right = Watches.note

    def note(self: Any, partition_id: str, keys: Any, *, new: Any = (), exists: bool = True) -> None:
        if exists:
            right(self, partition_id, keys, new=new, exists=exists)

    with replaced(Watches, note=note):
        yield


@bug("a put of a tag alone wakes nobody")
def tags_wake_nobody() -> Iterator[None]:
    right = Watches.note

    def note(self: Any, partition_id: str, keys: Any, *, new: Any = (), exists: bool = True) -> None:
        if new or not exists:
            right(self, partition_id, keys, new=new, exists=exists)

    with replaced(Watches, note=note):
        yield
