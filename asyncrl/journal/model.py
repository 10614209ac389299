"""A journal in memory that keeps what the one on disk would keep: for tests, generated pages, and the simulator.

TransferQueue -> append -> [MemoryJournal] -> acknowledged, synced -> [JournalDisk] -> the next process

What is kept is a log: a crash leaves a first part of it, with all that was acknowledged, or, when the power goes, all that was
synced. `MemoryJournal` acknowledges an entry at the next turn of the loop; the simulator's takes its time, and fails.
"""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from asyncrl.journal.entries import Entry, KeptSteps, PutCounters, PutRecord, PutRows, RemoveRecords, Saved

if TYPE_CHECKING:
    from asyncrl.errors import JournalWriteError

FOLDED_ENTRIES = 4096
"""Entries of the log that are folded at a time, once they are synced: a long run's log stays short, a short run's costs nothing."""


@dataclass(slots=True, kw_only=True)
class JournalDisk:
    """`saved`, which is synced, then the `entries` of this process that are not folded into it.

    `num_acked`, `num_synced`: entries acknowledged and synced since the process began, the `num_folded` first ones included.
    """

    saved: Saved = field(default_factory=Saved)
    entries: list[Entry] = field(default_factory=list)
    num_folded: int = 0
    num_acked: int = 0
    num_synced: int = 0

    @property
    def num_entries(self) -> int:
        return self.num_folded + len(self.entries)

    def steps(self) -> KeptSteps:
        """Which weights the next process may begin with, if all that is there stays."""
        found = Saved(records=dict(self.saved.records), counters=dict(self.saved.counters))
        found.apply([op for entry in self.entries for op in entry if isinstance(op, PutRecord | RemoveRecords | PutCounters)])
        return found.steps

    def load(self, weights_step: int = 0) -> Saved:
        """What the next process finds, without the rows of steps up to `weights_step`; it has all that is there from now on."""
        self.keep(self.num_entries)
        found = self.saved.copy()
        for row_id in found.hidden(weights_step):
            found.rows.pop(row_id, None)
        self.saved.incarnation += 1
        return found

    def append(self, entry: Entry) -> None:
        self.entries.append(tuple(_frozen(op) if isinstance(op, PutRows) else op for op in entry))

    def acknowledge(self, number: int, *, synced: bool) -> None:
        """The next `number` entries survive the process; `synced`: and all up to them the machine."""
        self.num_acked += number
        if synced:
            self.num_synced = self.num_acked
            if self.num_synced - self.num_folded >= FOLDED_ENTRIES:
                self._fold(self.num_synced - self.num_folded)

    def crash(self, u: float, *, power: bool) -> None:
        """Keep a first part, chosen by `u` in [0, 1), that has at least what must survive."""
        least = self.num_synced if power else self.num_acked
        self.keep(least + int(u * (self.num_entries - least + 1)))

    def keep(self, number: int) -> None:
        """Keep the first `number` entries; the next process begins."""
        self._fold(number - self.num_folded)
        self.entries = []
        self.num_folded = self.num_acked = self.num_synced = 0

    def copy(self) -> "JournalDisk":
        """One that changes apart from this."""
        numbers = {"num_folded": self.num_folded, "num_acked": self.num_acked, "num_synced": self.num_synced}
        return JournalDisk(saved=self.saved.copy(), entries=[*self.entries], **numbers)

    def _fold(self, number: int) -> None:
        for entry in self.entries[:number]:
            self.saved.apply(entry)
        del self.entries[:number]
        self.num_folded += number


def _frozen(op: PutRows) -> PutRows:
    """The tags as they are now: the store goes on with its own."""
    return PutRows([row._replace(tag=dict(row.tag)) for row in op.rows])


class MemoryJournal:
    """A Journal over `disk`. `saved`: what the disk has to begin with. `is_full_sync`: every entry is synced, as with
    store.sync = "full"."""

    def __init__(self, *, disk: JournalDisk | None = None, saved: Saved | None = None, is_full_sync: bool = False) -> None:
        self.disk = disk or JournalDisk(saved=saved or Saved())
        self.failure: JournalWriteError | None = None
        self._is_full_sync = is_full_sync
        self._num_commits = 0

    @property
    def saved(self) -> Saved:
        """All that it keeps now. It costs a walk over it."""
        return self._disk_with(self.disk.num_entries).saved

    def load(self, weights_step: int = 0) -> Saved:
        return self.disk.load(weights_step)

    def append(self, entry: Entry, *, synced: bool = False) -> "asyncio.Future[None]":
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            acknowledged.set_exception(self.failure)
            return acknowledged
        self.disk.append(entry)
        self._queue(acknowledged, synced=synced or self._is_full_sync)
        return acknowledged

    def _queue(self, acknowledged: "asyncio.Future[None]", *, synced: bool) -> None:
        """Write the entry that the disk has just been given, and say so."""
        self._num_commits += 1
        self.disk.acknowledge(1, synced=synced)
        asyncio.get_running_loop().call_soon(tell, acknowledged)

    def stats(self) -> dict[str, float]:
        size = sum(len(data) for saved in self.saved.rows.values() for _, data in saved.cells.values())
        return {"journal_bytes": size, "journal_commits": self._num_commits, "journal_waiting": 0}

    def close(self) -> None:
        """Nothing is queued here."""

    def crash(self) -> Self:
        """What is left after the process has ended."""
        return type(self)(disk=self._disk_with(self.disk.num_entries), is_full_sync=self._is_full_sync)

    def lose_power(self) -> Self:
        """What is left at least after the machine has lost its power."""
        return type(self)(disk=self._disk_with(self.disk.num_synced), is_full_sync=self._is_full_sync)

    def _disk_with(self, number: int) -> JournalDisk:
        disk = self.disk.copy()
        disk.keep(number)
        return disk


def tell(acknowledged: "asyncio.Future[None]") -> None:
    """An entry is kept; its caller may have gone meanwhile."""
    if not acknowledged.done():
        acknowledged.set_result(None)
