"""How rows go: cleared or dropped for good, retired with their step, given back when it failed; and the steps' records.

store (verbs) -> [endings] -> partition, leases, ledger -> operations for the journal

record -> (stages) -> retire -> purge, or -> revive -> (stages again)
"""

from collections.abc import Collection, Sequence

from asyncrl.errors import RecordError, StaleLeaseError, StoreError
from asyncrl.journal.entries import Op, StepRecord
from asyncrl.keys import TRAIN, Lease, StepLease
from asyncrl.transfer_queue.checks import check_unique
from asyncrl.transfer_queue.leases import owners_named
from asyncrl.transfer_queue.partition import Partition
from asyncrl.transfer_queue.state import State, removal

FAILURE = "failure"
"""The reason for which a drop counts against the dataset row of the group."""


def clear(state: State, keys: Sequence[str], partition_id: str, reason: str = "cleared") -> list[Op]:
    """The groups that go are counted under `reason`: those of the partition that is trained on, for only they were admitted."""
    check_unique(keys)
    partition = state.partition(partition_id)
    gone: dict[str, None] = {}
    owners: list[tuple[str, int | None]] = []
    for key in keys:
        row = partition.rows.get(key)
        if row is None:
            owners += owners_named(key)
        else:
            gone.update(dict.fromkeys(partition.group_keys(key) if row.owner.session_id is None else [key]))
    state.ledger.refuse_recorded(gone)
    gone_owners = partition.owners(gone)
    ops = state.end([*owners, *gone_owners])
    state.counts["cleared"] += len(gone)
    num_groups = sum(session_id is None for _, session_id in gone_owners) if partition_id == TRAIN else 0
    dropped = [state.ledger.count_dropped(reason, num_groups)] if num_groups else []
    return [*ops, *removal(state.remove(partition, gone)), *dropped]


def drop(state: State, uids: Sequence[str], partition_id: str, reason: str) -> list[Op]:
    rows = state.partition(partition_id).rows
    for uid in uids:
        if uid in rows and rows[uid].owner.session_id is not None:
            raise StoreError(f"{uid!r} is a trajectory of group {rows[uid].owner.uid!r}, which is dropped whole, by its uid")
    failed = _dataset_rows(state.partition(partition_id), uids) if reason == FAILURE and partition_id == TRAIN else []
    return [*clear(state, uids, partition_id, reason), *state.ledger.count_failed(failed)]


def _dataset_rows(partition: Partition, uids: Sequence[str]) -> list[int]:
    """Of the groups that are there, and whose prompts' tags name one."""
    tags = [partition.rows[uid].tag for uid in uids if uid in partition.rows]
    return [row for row in (int(tag.get("row", -1)) for tag in tags) if row >= 0]


# --- steps ------------------------------------------------------------------------------------------------------------------------


def record(state: State, step: int, keys: Sequence[str], partition_id: str) -> list[Op]:
    if not keys:
        raise StoreError(f"a record of step {step} without keys: there is no batch of nothing")
    check_unique(keys)
    state.ledger.check_record(step, keys)
    if step in state.ledger.records:
        return [state.ledger.begin_again(step)]  # synced again, as whoever asked first may not have waited until it was kept
    partition = state.partition(partition_id)
    uids = tuple(dict.fromkeys(partition.row(key).owner.uid for key in keys))
    state.ledger.check_trained_once(step, uids)
    _check_settled(state, step, partition, uids, frozenset(keys))
    prompts = [uid for uid in uids if uid in partition.rows]
    row_ids = tuple(partition.rows[key].row_id for key in [*keys, *prompts])
    made = StepRecord(step=step, partition_id=partition_id, uids=uids, keys=tuple(keys), row_ids=row_ids)
    return [state.ledger.record(made)]


def _check_settled(state: State, step: int, partition: Partition, uids: Sequence[str], keys: frozenset[str]) -> None:
    """Raises RecordError unless the groups are whole, and nobody may write to them any more."""
    for uid in uids:
        # A trajectory that was left out, or the prompt that was not.
        left = next((key for key in partition.group_keys(uid) if (key in keys) == (key == uid)), None)
        if left is not None:
            what = "is a prompt" if left == uid else f"of group {uid!r} is missing"
            raise RecordError(f"step {step} cannot be recorded: key {left!r} {what}; a step takes all trajectories of its groups")
        if state.leases.group(uid) is not None:
            raise RecordError(f"step {step} cannot be recorded: group {uid!r} has not settled, {state.leases.group(uid)} is open")


def retire(state: State, keys: Sequence[str], partition_id: str, step: int, lease: Lease) -> list[Op]:
    check_unique(keys)
    if not isinstance(lease, StepLease) or lease.step != step or not state.leases.is_open(lease):
        raise StaleLeaseError(f"refused to retire {len(keys)} keys of step {step}: {lease} is not its open lease")
    partition = state.partition(partition_id)
    gone = _with_prompts(partition, keys)
    state.ledger.check_retire(step, keys)
    ops = state.end(partition.owners(gone))
    row_ids = state.remove(partition, gone)
    state.counts["retired"] += len(gone)
    # The rows of a recorded step are its record's, no more and no less: a journal hides them until the step is purged.
    return [*ops, *([state.ledger.retire(step)] if step in state.ledger.records else removal(row_ids))]


def _with_prompts(partition: Partition, keys: Collection[str]) -> dict[str, None]:
    """The prompt of a group goes with its last trajectory. Raises UnknownKeyError."""
    gone = dict.fromkeys(keys)
    for uid in {partition.row(key).owner.uid: None for key in keys}:
        left = [key for key in partition.group_keys(uid) if key not in gone]
        if left == [uid]:
            gone[uid] = None
    return gone


def revive(state: State, keys: Sequence[str], partition_id: str, step: int) -> list[Op]:
    """Nothing for the journal: it knows neither columns nor leases of steps."""
    partition = state.partition(partition_id)
    for key in keys:
        partition.row(key)
    state.leases.revive_step(step)
    partition.remove_step_columns(keys)
    return []
