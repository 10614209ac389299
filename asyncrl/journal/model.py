"""A journal in memory that keeps what the one on disk would keep: for tests, generated pages, and the simulator.

An entry is acknowledged at the next turn of the loop. `crash` is the end of the process, `lose_power` that of the machine, which
takes everything after the last synced entry along; the journal that they return is what the next process opens.
"""

import asyncio
import copy
from typing import TYPE_CHECKING, Self

from asyncrl.journal.entries import Entry, Saved

if TYPE_CHECKING:
    from asyncrl.errors import JournalWriteError


class MemoryJournal:
    """`saved`: all that it keeps now. `is_full_sync`: every entry is synced, as with store.sync = "full"."""

    def __init__(self, *, saved: Saved | None = None, is_full_sync: bool = False) -> None:
        self.saved = saved or Saved()
        self._synced = copy.deepcopy(self.saved)
        self._is_full_sync = is_full_sync
        self._num_commits = 0
        self.failure: JournalWriteError | None = None

    def load(self) -> Saved:
        found = copy.deepcopy(self.saved)
        retired = {row_id for record in found.records.values() if record.is_retired for row_id in record.row_ids}
        for row_id in retired:
            found.rows.pop(row_id, None)
        self.saved.incarnation += 1
        self._synced = copy.deepcopy(self.saved)
        return found

    def append(self, entry: Entry, *, synced: bool = False) -> "asyncio.Future[None]":
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            acknowledged.set_exception(self.failure)
            return acknowledged
        self.saved.apply(entry)
        self._num_commits += 1
        if synced or self._is_full_sync:
            self._synced = copy.deepcopy(self.saved)
        asyncio.get_running_loop().call_soon(_acknowledge, acknowledged)
        return acknowledged

    def stats(self) -> dict[str, float]:
        size = sum(len(data) for saved in self.saved.rows.values() for _, data in saved.cells.values())
        return {"journal_bytes": size, "journal_commits": self._num_commits, "journal_waiting": 0}

    def close(self) -> None:
        """Nothing is queued here."""

    def crash(self) -> Self:
        """What is left after the process has ended."""
        return type(self)(saved=copy.deepcopy(self.saved), is_full_sync=self._is_full_sync)

    def lose_power(self) -> Self:
        """What is left at least after the machine has lost its power."""
        return type(self)(saved=copy.deepcopy(self._synced), is_full_sync=self._is_full_sync)


def _acknowledge(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
