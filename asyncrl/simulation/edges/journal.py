"""A journal whose disk takes time, fails, and forgets what was not synced; and what of it survives the controller.

TransferQueue -> append -> [SimJournal] -> commit after commit -> [JournalDisk] -> the next life

Entries that are queued while a commit is under way share the next one. What survives a crash is a prefix: all that was
acknowledged, and any number of the entries after it; after a power loss, all that was synced, and any number after that.
"""

import asyncio
from dataclasses import dataclass, field

from asyncrl.config.simulation import SimJournalConfig
from asyncrl.errors import JournalWriteError
from asyncrl.journal.entries import Entry, PutRows, Saved
from asyncrl.simulation.draws import draw_of, unit
from asyncrl.simulation.seams import Seams


@dataclass(slots=True, kw_only=True)
class JournalDisk:
    """`saved`, then the entries of this life, of which the first `num_acked` are acknowledged and `num_synced` are synced."""

    saved: Saved = field(default_factory=Saved)
    entries: list[Entry] = field(default_factory=list)
    num_acked: int = 0
    num_synced: int = 0

    def crash(self, u: float, *, power: bool) -> None:
        """Keep a prefix, chosen by `u` in [0, 1)."""
        least = self.num_synced if power else self.num_acked
        keep = least + int(u * (len(self.entries) - least + 1))
        for entry in self.entries[:keep]:
            self.saved.apply(entry)
        self.entries, self.num_acked, self.num_synced = [], 0, 0


class SimJournal:
    """A Journal over `disk`. All of it runs on the loop."""

    def __init__(self, disk: JournalDisk, config: SimJournalConfig, seams: Seams, *, is_full_sync: bool) -> None:
        self.disk = disk
        self.failure: JournalWriteError | None = None
        self._commit_s, self._sync_s = draw_of(config.commit_s), draw_of(config.sync_s)
        self._seams = seams
        self._is_full_sync = is_full_sync
        self._waiting: list[tuple[asyncio.Future[None], bool]] = []
        self._num_commits = 0
        self._is_committing = False

    def load(self) -> Saved:
        found = self.disk.saved.copy()
        for record in found.records.values():
            if record.is_retired:
                for row_id in record.row_ids:
                    found.rows.pop(row_id, None)
        self.disk.saved.incarnation += 1
        return found

    def append(self, entry: Entry, *, synced: bool = False) -> "asyncio.Future[None]":
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            acknowledged.set_exception(self.failure)
            return acknowledged
        self.disk.entries.append(tuple(_frozen(op) if isinstance(op, PutRows) else op for op in entry))
        self._waiting.append((acknowledged, synced or self._is_full_sync))
        if not self._is_committing:
            self._commit()
        return acknowledged

    def _commit(self) -> None:
        self._is_committing = True
        batch, self._waiting = self._waiting, []
        u = unit(self._num_commits, 9)
        synced = any(is_synced for _, is_synced in batch)
        seconds = self._commit_s(u) + (self._sync_s(u) if synced else 0.0)
        asyncio.get_running_loop().call_later(self._seams.slowed("commit", seconds), self._end_commit, batch, synced)

    def _end_commit(self, batch: "list[tuple[asyncio.Future[None], bool]]", synced: bool) -> None:
        self._is_committing = False
        if self._seams.journal_fails():
            self._fail(batch)
            return
        self._num_commits += 1
        self.disk.num_acked += len(batch)
        if synced:
            self.disk.num_synced = self.disk.num_acked
        for acknowledged, _ in batch:
            if not acknowledged.done():
                acknowledged.set_result(None)
        if self._waiting:
            self._commit()

    def _fail(self, batch: "list[tuple[asyncio.Future[None], bool]]") -> None:
        self.failure = JournalWriteError("the simulated journal cannot be written: disk full")
        for acknowledged, _ in [*batch, *self._waiting]:
            if not acknowledged.done():
                acknowledged.set_exception(self.failure)
        self._waiting = []

    def stats(self) -> dict[str, float]:
        return {"journal_bytes": 0.0, "journal_commits": float(self._num_commits), "journal_waiting": float(len(self._waiting))}

    def close(self) -> None:
        """What is queued is written: a process that ends by itself takes its time."""
        if self.failure is None:
            self.disk.num_acked = self.disk.num_synced = len(self.disk.entries)


def _frozen(op: PutRows) -> PutRows:
    return PutRows([row._replace(tag=dict(row.tag)) for row in op.rows])
