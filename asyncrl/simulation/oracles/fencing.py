"""I4: what was cleared, dropped or retired is gone for good, and nobody writes under a lease that is not open.
I5: a value is written once.
"""

from asyncrl.journal.entries import LeaseEntry, RowEntry
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes, RowPut
from asyncrl.simulation.oracles.status import TERMINAL


class Fencing(Oracle):
    """Every put is made under its open lease; leases only rise, end with their group, and never come back."""

    name = "I4"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._gone: set[str] = set()
        self._ended: set[str] = set()

    def entry(self, changes: Changes) -> None:
        for put in changes.put:
            self._check_lease(put.row.entry, put.lease)
            self._check_settled(put)
        for turn in changes.turns:
            if turn.lease is None or not turn.lease.is_open:
                who = f"turn {turn.put.turn} of session {turn.put.uid}_{turn.put.session_id}"
                self.fail(f"{who} was kept, but the session's lease is not open")
        for before, after in changes.leases:
            self._check_rise(before, after)
        self._ended.update(changes.ended)
        for row in changes.removed:
            if row.is_prompt:
                self._gone.add(row.entry.uid)
        for record in changes.retired:
            self._gone.update(record.uids)

    def _check_lease(self, row: RowEntry, lease: LeaseEntry | None) -> None:
        if row.uid in self._gone:
            self.fail(f"key {row.key!r} was written after its group {row.uid!r} had gone")
        if lease is None or not lease.is_open:
            self.fail(f"key {row.key!r} was written under the lease of attempt {row.attempt}, which is not open: {lease}")
        elif (lease.attempt, lease.incarnation) != (row.attempt, row.incarnation):
            found = f"attempt {row.attempt}, incarnation {row.incarnation}"
            self.fail(f"key {row.key!r} was written by {found}; open is {lease}")

    def _check_settled(self, put: RowPut) -> None:
        """Rows come with the end of their session's lease, a last status with that of the group's: in one entry."""
        row, leases = put.row.entry, self.ground.shadow.leases.get(put.row.entry.uid, {})
        if row.session_id is not None:
            lease = leases.get(row.session_id)
            if lease is not None and lease.is_open:
                self.fail(f"key {row.key!r} was written, and the lease of its session is still open")
        elif put.row.status in TERMINAL and leases:
            self.fail(f"group {row.uid!r} is {put.row.status!r}, and its lease is still open")

    def _check_rise(self, before: LeaseEntry | None, after: LeaseEntry) -> None:
        who = f"{after.uid}_{after.session_id}" if after.session_id is not None else after.uid
        if after.uid in self._gone or after.uid in self._ended:
            self.fail(f"a lease of {who!r} was opened after its group had ended")
        if before is None or not after.is_open:
            return
        if not before.is_open and after.attempt == before.attempt:
            self.fail(f"{who!r} had settled, and attempt {after.attempt} of it was opened again")
        rank = (after.incarnation, after.attempt)
        if rank < (before.incarnation, before.attempt) or (not before.is_open and rank == (before.incarnation, before.attempt)):
            self.fail(f"the lease of {who!r} went from {before} to {after}")


class Once(Oracle):
    """An equal repeat is fine."""

    name = "I5"

    def entry(self, changes: Changes) -> None:
        for each in changes.overwritten:
            if each.before[0] != each.after[0] or bytes(each.before[1]) != bytes(each.after[1]):
                row = each.row.entry
                self.fail(f"field {each.name!r} of key {row.key!r} was written twice by attempt {row.attempt}, with other values")
        for turn in changes.turns:
            if turn.put.turn != turn.num_before:
                who = f"turn {turn.put.turn} of session {turn.put.uid}_{turn.put.session_id}"
                self.fail(f"{who} was kept when the session had {turn.num_before} turns")
