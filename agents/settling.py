"""Settling: how sessions and groups end in the store.

Place: runner (rows, failures) -> [settling] -> TransferQueue (rows, tags) -> replay.

Invariants:
1. A session writes under its own lease. Its rows or its failure, the end of its lease and, when it is the last, the group's status
   and the end of the group's lease are one transaction: no moment shows a part of them.
2. What the store refuses of a session's rows is the session's failure. What cannot be kept at all is the run's end.
"""

from collections import Counter

from asyncrl.agents.group import NO_ROWS, Group, failure_tag, last_tag
from asyncrl.agents.rows import Rows
from asyncrl.agents.session import SessionFailure, failure_of
from asyncrl.errors import FieldError, JournalWriteError, StaleLeaseError, StoreError
from asyncrl.fields import Tag
from asyncrl.keys import TRAIN, SessionLease
from asyncrl.ports import IncidentKind, Report
from asyncrl.transfer_queue import TransferQueue


class Settling:
    """Ends sessions and groups. counts: of a runner, to count into. `lengths`: policy tokens of each trajectory written."""

    def __init__(self, queue: TransferQueue, counts: Counter[str], report: Report) -> None:
        self.lengths: list[int] = []
        self._queue = queue
        self._counts = counts
        self._report = report

    async def settle_group(self, group: Group, failure: SessionFailure | str | None) -> None:
        """End a group that no session ended."""
        if group.is_settled:
            return
        group.is_settled = True
        tag = last_tag(failure)
        try:
            await self._queue.settle_group(group.lease, partition_id=TRAIN, tag=tag)
        except StaleLeaseError:  # the group was dropped meanwhile: its keys are gone, and nobody waits for it
            self._counts["groups_dropped"] += 1
        else:
            self._counts[f"groups_{tag['status']}"] += 1

    async def settle_session(self, group: Group, lease: SessionLease, rows: "Rows | SessionFailure") -> None:
        """Write a session's rows and end it, and with the last of its siblings the group. What the store refuses is its failure."""
        try:
            await self._write(group, lease, rows)
        except JournalWriteError:
            raise  # nothing can be kept any more: that is the run's end, not the session's
        except (StoreError, FieldError) as error:
            if isinstance(rows, Rows) and not isinstance(error, StaleLeaseError):  # a put is whole or it is not there
                await self._write(group, lease, failure_of(error))
                return
            self.note_refused(group, lease, error)

    def note_refused(self, group: Group, lease: SessionLease, error: Exception) -> None:
        """The session's lease was not open, or is not any more: there is nothing to settle."""
        group.live.pop(lease.session_id, None)
        group.failures[lease.session_id] = failure_of(error)
        self._counts["sessions_failed"] += 1

    async def _write(self, group: Group, lease: SessionLease, rows: "Rows | SessionFailure") -> None:
        failure = None
        if isinstance(rows, SessionFailure):
            failure = group.failures[lease.session_id] = rows
            rows = NO_ROWS
        is_last = group.num_settled + 1 == group.size
        tag = _tag_of(group, is_last=is_last, has_failed=failure is not None)
        if is_last and group.baseline is not None:
            group.baseline.cancel()  # nobody waits for it any more: it asks for nothing after the group's end
        group.num_settled += 1
        group.is_settled = is_last
        try:
            await self._queue.settle_session(
                lease,
                partition_id=TRAIN,
                keys=rows.keys,
                fields=rows.fields,
                tags=rows.tags,
                group_tag=tag,
                ends_group=is_last,
            )
        except (StoreError, FieldError):
            group.num_settled -= 1
            group.is_settled = False
            raise
        self._note_settled(group, lease, rows, failure)
        if is_last and tag is not None:
            self._counts[f"groups_{tag['status']}"] += 1

    def _note_settled(self, group: Group, lease: SessionLease, rows: Rows, failure: SessionFailure | None) -> None:
        live = group.live.pop(lease.session_id)
        self.lengths += [int(tag["policy_len"]) for tag in rows.tags]
        self._counts["sessions_finished" if failure is None else "sessions_failed"] += 1
        if failure is not None:
            self._report(live.incident(IncidentKind.FAILURE, "session", str(failure)))


def _tag_of(group: Group, *, is_last: bool, has_failed: bool) -> Tag | None:
    """What the end of a session changes in its prompt's tag: a restart must know why one has failed."""
    if is_last:
        return last_tag(group.failure)
    return failure_tag(group.failure) if has_failed and group.failure is not None else None
