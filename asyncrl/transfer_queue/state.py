"""What a TransferQueue is at one moment, and what its verbs share. Synchronous: whatever happens here happens whole.

store (verbs) -> puts, endings -> [state] -> operations for the journal
"""

import itertools
from collections.abc import Collection

from asyncrl.errors import StaleLeaseError
from asyncrl.fields import Tag
from asyncrl.journal.entries import Op, PutLeases, RemoveLeases, RemoveRows, Saved
from asyncrl.keys import GroupLease, Lease, SessionLease, StepLease
from asyncrl.transfer_queue.journaling import check_saved, partitions_of, turn_of
from asyncrl.transfer_queue.leases import Leases
from asyncrl.transfer_queue.ledger import Ledger, SessionOf
from asyncrl.transfer_queue.partition import Owner, Partition
from asyncrl.transfer_queue.watch import Watches


class State:
    """Partitions, leases, ledger and watches. `is_journaled`: somebody wants the operations of a put. weights_step: the last step
    that the weights have learned. Raises JournalDamagedError for what cannot be gone on from with them."""

    def __init__(self, saved: Saved, *, is_journaled: bool, weights_step: int = 0) -> None:
        check_saved(saved, weights_step)
        self.is_journaled = is_journaled
        self.row_ids = itertools.count(saved.next_row_id)
        self.partitions = partitions_of(saved, self.row_ids, hidden=saved.hidden(weights_step))
        self.leases = Leases()
        self.leases.add_saved(saved.leases.values())
        turns = {key: [turn_of(*key, cells) for cells in turns] for key, turns in saved.turns.items()}
        self.ledger = Ledger(counters=saved.counters, records=saved.records, turns=turns, weights_step=weights_step)
        self.watches = Watches()
        self.counts = dict.fromkeys(("puts", "gets", "cleared", "retired", "refused_writes"), 0)

    # --- sight

    def partition(self, partition_id: str) -> Partition:
        """The partition; where there is none, an empty one that nobody keeps."""
        return self.partitions.get(partition_id) or Partition(partition_id, self.row_ids)

    def tag(self, partition_id: str, key: str) -> Tag | None:
        row = self.partition(partition_id).rows.get(key)
        return None if row is None else row.tag

    def tags(self, partition_id: str) -> dict[str, Tag]:
        return {key: row.tag for key, row in self.partition(partition_id).rows.items()}

    def is_known(self, uid: str) -> bool:
        """The group has a row, a lease or a record."""
        if self.leases.group(uid) is not None or self.ledger.step_of(uid) is not None:
            return True
        return any(partition.group_keys(uid) for partition in self.partitions.values())

    def rows_of(self, lease: GroupLease | SessionLease) -> list[tuple[Partition, str, Owner]]:
        """Partition, key and owner of what a group's or session's leases wrote."""
        session_id = lease.session_id if isinstance(lease, SessionLease) else None
        found = [
            (partition, key, partition.rows[key].owner)
            for partition in self.partitions.values()
            for key in partition.group_keys(lease.uid)
        ]
        return [row for row in found if row[2].session_id == session_id]

    def refuse_lower(self, lease: GroupLease | SessionLease) -> None:
        """Rows remember who wrote them, so that a settled writer cannot come back after its lease was forgotten; and nobody may
        write to a group that a step trains on, or has trained on."""
        step = self.ledger.step_of(lease.uid)
        if step is not None:
            verb = "has trained" if self.ledger.is_done(step) else "trains"
            raise StaleLeaseError(f"{lease} cannot be opened: step {step} {verb} on its group")
        for _, _, owner in self.rows_of(lease):
            if isinstance(lease, SessionLease) and lease.attempt < owner.attempt:
                raise StaleLeaseError(f"{lease} cannot be opened: attempt {owner.attempt} has written")
            if lease.incarnation < owner.incarnation or (isinstance(lease, GroupLease) and lease.incarnation == owner.incarnation):
                raise StaleLeaseError(f"{lease} cannot be opened: incarnation {owner.incarnation} has written")

    # --- what verbs share

    def open_session(self, lease: SessionLease) -> list[Op]:
        """A higher attempt deletes what lower ones wrote. Raises StaleLeaseError."""
        before = next(iter(self.leases.entries(lease.uid, lease.session_id)), None)
        lower = [(partition, key) for partition, key, owner in self.rows_of(lease) if owner.attempt < lease.attempt]
        self.leases.open_session(lease)
        row_ids = [row_id for partition, key in lower for row_id in self.remove(partition, [key])]
        is_retry = before is not None and before.attempt < lease.attempt
        turns = self.ledger.remove_turns([(lease.uid, lease.session_id)]) if is_retry else []
        return [*removal(row_ids), *turns, PutLeases(self.leases.entries(lease.uid, lease.session_id))]

    def close(self, lease: Lease) -> list[Op]:
        """The lease is open. Turns of what it covers were for going on with it."""
        self.leases.close(lease)
        if isinstance(lease, StepLease):
            return []
        if isinstance(lease, GroupLease):
            return [RemoveLeases([lease.uid]), *self.ledger.remove_turns([(lease.uid, None)])]
        owner = (lease.uid, lease.session_id)
        return [PutLeases(self.leases.entries(*owner)), *self.ledger.remove_turns([owner])]

    def end(self, owners: Collection[SessionOf]) -> list[Op]:
        """Rows of these are gone: a prompt's group has no lease any more, and a session only a later one."""
        groups = [uid for uid, session_id in owners if session_id is None and self.leases.group(uid) is not None]
        self.leases.close_owners(owners)
        sessions = [entry for uid, number in owners if number is not None for entry in self.leases.entries(uid, number)]
        leases: list[Op] = [RemoveLeases(groups)] if groups else []
        return [*leases, *([PutLeases(sessions)] if sessions else []), *self.ledger.remove_turns(owners)]

    def remove(self, partition: Partition, keys: Collection[str]) -> list[int]:
        """The rows are gone from memory. Returns their numbers. Every key exists."""
        row_ids = [partition.rows[key].row_id for key in keys]
        partition.remove(keys)
        self.watches.note(partition.partition_id, keys, exists=False)
        if not partition.rows:
            self.partitions.pop(partition.partition_id, None)
        return row_ids


def removal(row_ids: Collection[int]) -> list[Op]:
    """The operation, when there is anything to remove."""
    return [RemoveRows(list(row_ids))] if row_ids else []
