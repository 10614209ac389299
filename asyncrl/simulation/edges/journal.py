"""A journal whose disk takes time and fails: commit after commit, on the loop.

TransferQueue -> append -> [SimJournal] -> commit -> JournalDisk -> the next life

Entries that are queued while a commit is under way share the next one. What survives a crash is the disk's business.
"""

import asyncio

from asyncrl.config.simulation import SimJournalConfig
from asyncrl.errors import JournalWriteError
from asyncrl.journal.model import JournalDisk, MemoryJournal, tell
from asyncrl.simulation.draws import draw_of, unit
from asyncrl.simulation.seams import Seams

_Queued = tuple["asyncio.Future[None]", bool]
"""(acknowledged, synced) of an entry."""


class SimJournal(MemoryJournal):
    """A Journal over `disk`."""

    def __init__(self, disk: JournalDisk, config: SimJournalConfig, seams: Seams, *, is_full_sync: bool) -> None:
        super().__init__(disk=disk, is_full_sync=is_full_sync)
        self._commit_s, self._sync_s = draw_of(config.commit_s), draw_of(config.sync_s)
        self._seams = seams
        self._waiting: list[_Queued] = []
        self._committing: list[_Queued] = []

    def _queue(self, acknowledged: "asyncio.Future[None]", *, synced: bool) -> None:
        self._waiting.append((acknowledged, synced))
        if not self._committing:
            self._commit()

    def _commit(self) -> None:
        self._committing, self._waiting = self._waiting, []
        u = unit(self._num_commits, 9)
        synced = any(is_synced for _, is_synced in self._committing)
        seconds = self._commit_s(u) + (self._sync_s(u) if synced else 0.0)
        asyncio.get_running_loop().call_later(self._seams.slowed("commit", seconds), self._end_commit, synced)

    def _end_commit(self, synced: bool) -> None:
        if self._seams.journal_fails():
            self._fail()
            return
        committed, self._committing = self._committing, []
        self._num_commits += 1
        self.disk.acknowledge(len(committed), synced=synced)
        for acknowledged, _ in committed:
            tell(acknowledged)
        if self._waiting:
            self._commit()

    def _fail(self) -> None:
        self.failure = JournalWriteError("the simulated journal cannot be written: disk full")
        for acknowledged, _ in [*self._committing, *self._waiting]:
            if not acknowledged.done():
                acknowledged.set_exception(self.failure)
        self._waiting = []

    def stats(self) -> dict[str, float]:
        waiting = len(self._committing) + len(self._waiting)
        return {"journal_bytes": 0.0, "journal_commits": float(self._num_commits), "journal_waiting": float(waiting)}

    def close(self) -> None:
        """What is queued is written: a process that ends by itself takes its time."""
        if self.failure is None:
            self.disk.acknowledge(self.disk.num_entries - self.disk.num_acked, synced=True)
