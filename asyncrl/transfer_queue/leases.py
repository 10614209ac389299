"""Which writes are allowed: the open leases of groups, sessions and steps.

runner, trainer -> [open] -> put ... -> [close]

A session's lease is opened under its group's, and ends with it. Only what is open is kept, and beside each open group the latest
lease of each of its sessions, so the memory ends with the group. Invariants:
1. At most one lease is open a group, a session and a step. That of a session is of the incarnation of its group's.
2. (incarnation, attempt) of a session never falls, and a settled session is only reopened by a higher one.
3. A step that was revived is only opened by a higher attempt or incarnation: a stage of the failed one finds its lease closed.
4. A group that was cleared or retired has no lease, and no session of it can open one: a late write finds no door (no tombstones).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from asyncrl.errors import LeaseScopeError, StaleLeaseError
from asyncrl.journal.entries import LeaseEntry
from asyncrl.keys import GroupLease, Lease, SessionLease, StepLease


@dataclass(slots=True, kw_only=True)
class _Session:
    """`is_open`: it has not settled. Its lease may be stale all the same, when the group was taken over."""

    lease: SessionLease
    is_open: bool = True


@dataclass(slots=True, kw_only=True)
class _Group:
    lease: GroupLease
    sessions: dict[int, _Session] = field(default_factory=dict)

    def has_open(self, session: _Session) -> bool:
        return session.is_open and session.lease.incarnation >= self.lease.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """`keys`: those that the step may write; None: every key that exists."""

    lease: StepLease
    keys: frozenset[str] | None
    partition_id: str | None


class Leases:
    """Table of the open leases."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._steps: dict[int, _Step] = {}
        self._revived: dict[int, StepLease] = {}  # the last lease of a step that failed, until the step has ended

    def __len__(self) -> int:
        open_sessions = sum(group.has_open(session) for group in self._groups.values() for session in group.sessions.values())
        return len(self._groups) + open_sessions + len(self._steps)

    # --- open and close

    def open_group(self, lease: GroupLease) -> None:
        """A higher incarnation takes the group over and makes its sessions' leases stale. Raises StaleLeaseError for any other."""
        group = self._groups.get(lease.uid)
        if group is None:
            self._groups[lease.uid] = _Group(lease=lease)
            return
        if lease.incarnation <= group.lease.incarnation:
            raise StaleLeaseError(f"{lease} cannot be opened: {group.lease} is open")
        group.lease = lease

    def reopen_group(self, lease: GroupLease) -> list[SessionLease]:
        """The group and its sessions that have not settled go on under the incarnation of `lease`, each at its attempt.

        Returns these sessions' leases. Raises StaleLeaseError unless the group is open under a lower incarnation.
        """
        group = self._groups.get(lease.uid)
        if group is None or lease.incarnation <= group.lease.incarnation:
            held = "it has settled, or is gone" if group is None else f"{group.lease} is open"
            raise StaleLeaseError(f"{lease} cannot be reopened: {held}")
        group.lease = lease
        unsettled = [session for session in group.sessions.values() if session.is_open]
        for session in unsettled:
            session.lease = replace(session.lease, incarnation=lease.incarnation)
        return [session.lease for session in unsettled]

    def open_session(self, lease: SessionLease) -> None:
        """A higher attempt or incarnation takes the session over. Raises StaleLeaseError for any other, or without its group."""
        self.check_session(lease)
        self._groups[lease.uid].sessions[lease.session_id] = _Session(lease=lease)

    def check_session(self, lease: SessionLease) -> None:
        """Raises StaleLeaseError when `open_session` would."""
        group = self._groups.get(lease.uid)
        if group is None or lease.incarnation < group.lease.incarnation:
            raise StaleLeaseError(
                f"{lease} cannot be opened: group {lease.uid!r} has no open lease of incarnation {lease.incarnation}"
            )
        latest = group.sessions.get(lease.session_id)
        if latest is not None and not _is_later(lease, latest.lease):
            state = "is open" if group.has_open(latest) else "is stale" if latest.is_open else "has settled"
            raise StaleLeaseError(f"{lease} cannot be opened: {latest.lease} {state}; a retry is a higher attempt")

    def open_step(self, lease: StepLease, *, keys: Collection[str] | None, partition_id: str | None) -> None:
        """Raises StaleLeaseError while an equal or higher lease of the step is open, or was when the step was revived."""
        held, revived = self._steps.get(lease.step), self._revived.get(lease.step)
        if held is not None and _rank(lease) <= _rank(held.lease):
            raise StaleLeaseError(f"{lease} cannot be opened: {held.lease} is open; close it, or revive the step")
        if revived is not None and _rank(lease) <= _rank(revived):
            raise StaleLeaseError(f"{lease} cannot be opened: {revived} failed and was revived; another try is a higher attempt")
        bound = None if keys is None else frozenset(keys)
        self._steps[lease.step] = _Step(lease=lease, keys=bound, partition_id=partition_id)

    def close(self, lease: Lease) -> None:
        """Ends the lease; a group's takes those of its sessions along. A lease that is not open (any more) stays so."""
        if not self.is_open(lease):
            return
        if isinstance(lease, GroupLease):
            del self._groups[lease.uid]
        elif isinstance(lease, SessionLease):
            self._groups[lease.uid].sessions[lease.session_id].is_open = False
        else:
            del self._steps[lease.step]
            self._revived.pop(lease.step, None)

    def close_owners(self, owners: Iterable[tuple[str, int | None]]) -> None:
        """Rows of these are gone: a prompt's group has no lease any more, and a session only a later one."""
        for uid, session_id in owners:
            group = self._groups.get(uid)
            if group is not None and session_id is None:
                del self._groups[uid]
            elif group is not None and session_id in group.sessions:
                group.sessions[session_id].is_open = False

    def revive_step(self, step: int) -> None:
        """The step failed: its lease is closed, and only a higher attempt opens again."""
        failed = self._steps.pop(step, None)
        if failed is not None:
            self._revived[step] = failed.lease

    def close_all(self) -> None:
        self._groups.clear()
        self._steps.clear()
        self._revived.clear()

    # --- sight

    @property
    def uids(self) -> list[str]:
        """Groups that have an open lease."""
        return list(self._groups)

    def group(self, uid: str) -> GroupLease | None:
        """The open lease of a group."""
        group = self._groups.get(uid)
        return None if group is None else group.lease

    def entries(self, uid: str, session_id: int | None = None) -> list[LeaseEntry]:
        """What is so of one session of an open group, or of the group (`session_id` None) and all its sessions."""
        group = self._groups.get(uid)
        if group is None:
            return []
        if session_id is not None:
            return [_entry_of(group.sessions[session_id])] if session_id in group.sessions else []
        lease = LeaseEntry(uid=uid, session_id=None, attempt=0, incarnation=group.lease.incarnation, is_open=True)
        return [lease, *map(_entry_of, group.sessions.values())]

    def add_saved(self, entries: Collection[LeaseEntry]) -> None:
        """As they were kept: groups, then their sessions."""
        for entry in entries:
            if entry.session_id is None:
                self._groups[entry.uid] = _Group(lease=GroupLease(uid=entry.uid, incarnation=entry.incarnation))
        for entry in entries:
            if entry.session_id is not None:
                lease = SessionLease(
                    uid=entry.uid, session_id=entry.session_id, attempt=entry.attempt, incarnation=entry.incarnation
                )
                self._groups[entry.uid].sessions[entry.session_id] = _Session(lease=lease, is_open=entry.is_open)

    # --- check

    def is_open(self, lease: Lease) -> bool:
        if isinstance(lease, StepLease):
            step = self._steps.get(lease.step)
            return step is not None and step.lease == lease
        group = self._groups.get(lease.uid)
        if group is None:
            return False
        if isinstance(lease, GroupLease):
            return group.lease == lease
        session = group.sessions.get(lease.session_id)
        return session is not None and group.has_open(session) and session.lease == lease

    def check(self, lease: Lease, keys: Collection[str], partition_id: str) -> None:
        """Raises StaleLeaseError unless the lease is open, LeaseScopeError for the first key that it does not cover."""
        if not self.is_open(lease):
            raise StaleLeaseError(f"refused a write of {_some(keys)} in {partition_id!r}: {lease} is not open")
        if isinstance(lease, GroupLease):
            stray = next((key for key in keys if key != lease.uid), None)
        elif isinstance(lease, SessionLease):
            prefix = f"{lease.uid}_{lease.session_id}_"
            stray = next((key for key in keys if not _is_index(key, prefix)), None)
        else:
            stray = self._stray_of_step(self._steps[lease.step], keys, partition_id)
        if stray is not None:
            raise LeaseScopeError(f"refused a write of key {stray!r} in {partition_id!r}: {lease} does not cover it")

    @staticmethod
    def _stray_of_step(step: _Step, keys: Collection[str], partition_id: str) -> str | None:
        if step.partition_id not in (None, partition_id):
            return next(iter(keys), None)
        if step.keys is None:
            return None
        return next((key for key in keys if key not in step.keys), None)


def _entry_of(session: _Session) -> LeaseEntry:
    lease = session.lease
    return LeaseEntry(
        uid=lease.uid,
        session_id=lease.session_id,
        attempt=lease.attempt,
        incarnation=lease.incarnation,
        is_open=session.is_open,
    )


def owners_named(key: str) -> list[tuple[str, int | None]]:
    """Whose a key is that was never written, by its name: a group, and perhaps a session of another."""
    parts = key.rsplit("_", 2)
    return [(key, None), *([(parts[0], int(parts[1]))] if len(parts) == 3 and parts[1].isdecimal() else [])]


def _rank(lease: StepLease) -> tuple[int, int]:
    return lease.incarnation, lease.attempt


def _is_later(lease: SessionLease, than: SessionLease) -> bool:
    """A retry raises the attempt, a restart the incarnation; neither may fall."""
    if lease.attempt < than.attempt or lease.incarnation < than.incarnation:
        return False
    return lease != than


def _is_index(key: str, prefix: str) -> bool:
    """`key` is the prefix and a plain decimal number (as TrajectoryKey.parse, which is ten times slower)."""
    index = key[len(prefix) :]
    return key.startswith(prefix) and index.isascii() and index.isdigit() and (index[0] != "0" or index == "0")


def _some(keys: Collection[str]) -> str:
    first = [repr(key) for _, key in zip(range(3), keys, strict=False)]
    return f"key {first[0]}" if len(keys) == 1 else f"keys {', '.join(first)}{', ...' if len(keys) > 3 else ''}"
