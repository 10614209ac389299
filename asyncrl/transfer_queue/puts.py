"""The puts of the TransferQueue: first everything that one could be refused for, then the act, which cannot fail.

store (verbs) -> [puts] -> partition, ledger -> operations for the journal
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import LeaseScopeError, StaleLeaseError, StoreError
from asyncrl.fields import Tag
from asyncrl.journal.entries import Op, PutLeases
from asyncrl.keys import GroupLease, Lease, SessionLease, StepLease
from asyncrl.transfer_queue.checks import check_unique, merged_tags
from asyncrl.transfer_queue.columns import Block
from asyncrl.transfer_queue.encoding import Fields, encode_fields
from asyncrl.transfer_queue.journaling import put_ops
from asyncrl.transfer_queue.partition import Owner
from asyncrl.transfer_queue.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Keys with what they are given: one value a key in `fields`, one tag a key in `tags`."""

    partition_id: str
    keys: list[str]
    fields: Fields | None = None
    tags: Sequence[Tag] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """A put that nothing speaks against. `owner` None: a step's."""

    put: Put
    blocks: dict[str, Block]
    tags: list[Tag] | None
    owner: Owner | None


def one_row(fields: Mapping[str, Any] | None) -> dict[str, list[Any]] | None:
    """Values of one key as columns."""
    return None if fields is None else {name: [value] for name, value in fields.items()}


# --- verbs ------------------------------------------------------------------------------------------------------------------------


def put(state: State, lease: Lease, what: Put) -> list[Op]:
    state.leases.check(lease, what.keys, what.partition_id)
    return _act(state, _check(state, lease, what))


def admit(state: State, lease: GroupLease, prompt: Put, cursor: int) -> list[Op]:
    if state.is_known(lease.uid):
        raise StaleLeaseError(f"group {lease.uid!r} cannot be admitted again: it would be counted twice")
    if cursor < state.ledger.counters["cursor"]:
        raise StoreError(
            f"group {lease.uid!r} cannot be admitted at cursor {cursor}: the feed is at {state.ledger.counters['cursor']}"
        )
    checked = _check(state, lease, prompt)
    state.leases.open_group(lease)
    counted = state.ledger.count(cursor=cursor, admitted=state.ledger.counters["admitted"] + 1)
    return [PutLeases(state.leases.entries(lease.uid)), *_act(state, checked), counted]


def begin_sessions(state: State, group: GroupLease, sessions: Sequence[SessionLease], partition_id: str, tag: Tag) -> list[Op]:
    prompt = Put(partition_id=partition_id, keys=[group.uid], tags=[tag])
    state.leases.check(group, prompt.keys, partition_id)
    check_unique([f"{lease.uid}_{lease.session_id}" for lease in sessions])
    for lease in sessions:
        if lease.uid != group.uid:
            raise LeaseScopeError(f"{lease} is no session of {group}")
        state.refuse_lower(lease)
        state.leases.check_session(lease)
    ops = _act(state, _check(state, group, prompt))
    return [*ops, *(op for lease in sessions for op in state.open_session(lease))]


def reopen_group(state: State, lease: GroupLease, partition_id: str, tag: Tag | None) -> tuple[list[SessionLease], list[Op]]:
    prompt = None if tag is None else Put(partition_id=partition_id, keys=[lease.uid], tags=[tag])
    checked = None if prompt is None else _check(state, lease, prompt)
    sessions = state.leases.reopen_group(lease)
    ops = [] if checked is None else _act(state, checked)
    return sessions, [*ops, PutLeases(state.leases.entries(lease.uid))]


def put_turn(state: State, lease: SessionLease, turn: int, fields: Mapping[str, Any]) -> list[Op]:
    state.leases.check(lease, [_any_key(lease)], "turns")
    state.ledger.check_turn(lease.uid, lease.session_id, turn)
    columns = encode_fields(one_row(fields), [f"{lease.uid}_{lease.session_id}"], step=None)
    return [state.ledger.put_turn(lease.uid, lease.session_id, columns)]


def settle_session(state: State, lease: SessionLease, rows: Put, group_tag: Tag | None, *, ends_group: bool) -> list[Op]:
    state.leases.check(lease, rows.keys or [_any_key(lease)], rows.partition_id)
    group = state.leases.group(lease.uid)
    assert group is not None, "a session's lease is open under its group's"
    checked = [_check(state, lease, rows)] if rows.keys else []
    if group_tag is not None:
        checked.append(_check(state, group, Put(partition_id=rows.partition_id, keys=[lease.uid], tags=[group_tag])))
    ops = [op for each in checked for op in _act(state, each)]
    return [*ops, *state.close(lease), *(state.close(group) if group_tag is not None and ends_group else [])]


def settle_group(state: State, lease: GroupLease, partition_id: str, tag: Tag) -> list[Op]:
    return [*put(state, lease, Put(partition_id=partition_id, keys=[lease.uid], tags=[tag])), *state.close(lease)]


# --- check and act ----------------------------------------------------------------------------------------------------------------


def _check(state: State, lease: Lease, what: Put) -> _Checked:
    """All but the lease."""
    keys = what.keys
    if not keys:
        raise StoreError(f"a put of no keys into partition {what.partition_id!r}")
    check_unique(keys)
    if what.tags is not None and isinstance(lease, StepLease):
        raise LeaseScopeError(f"{lease} may add columns, not tags; refused for key {keys[0]!r}")
    blocks = encode_fields(what.fields, keys, step=lease.step if isinstance(lease, StepLease) else None)
    partition = state.partition(what.partition_id)
    tags = None if what.tags is None else merged_tags(partition.rows, keys, what.tags, what.partition_id)
    partition.check_put(keys, blocks, lease)
    return _Checked(put=what, blocks=blocks, tags=tags, owner=None if isinstance(lease, StepLease) else Owner.of(lease))


def _act(state: State, checked: _Checked) -> list[Op]:
    """Nothing raises here. What a step writes is not for the journal: it can be computed again."""
    partition_id, keys = checked.put.partition_id, checked.put.keys
    partition = state.partitions[partition_id] = state.partition(partition_id)
    new = partition.put(keys, checked.blocks, checked.tags, checked.owner)
    state.counts["puts"] += 1
    if new or checked.tags is not None:
        state.watches.note(partition_id, new if checked.tags is None else keys, new=new)
    return [] if checked.owner is None or not state.is_journaled else put_ops(partition, keys, checked.blocks)


def _any_key(lease: SessionLease) -> str:
    """For a check of the lease alone."""
    return f"{lease.uid}_{lease.session_id}_0"
