"""The tap: a journal that notes every entry that the store gives, before it passes it on.

TransferQueue -> append -> [Tap] -> journal, oracles

Every verb that changes what a run remembers is one entry, so the entries, in order, are all that the store did. What stages write
is no entry.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.errors import JournalWriteError
from asyncrl.journal.entries import Entry, PutRows, Saved
from asyncrl.journal.port import Journal


@dataclass(frozen=True, slots=True)
class Written:
    """One entry. `number`: entries of this life up to it. `synced`: it was asked to survive a power loss."""

    entry: Entry
    number: int
    synced: bool


class Tap:
    """A Journal in front of `inner`; without one, a journal that keeps nothing and acknowledges at once."""

    def __init__(self, inner: Journal | None, note: Callable[[Written], None]) -> None:
        self._inner = inner
        self._note = note
        self._number = 0

    @property
    def failure(self) -> JournalWriteError | None:
        return None if self._inner is None else self._inner.failure

    def load(self, weights_step: int = 0) -> Saved:
        return Saved() if self._inner is None else self._inner.load(weights_step)

    def append(self, entry: Entry, *, synced: bool = False) -> "asyncio.Future[None]":
        if self.failure is None:
            self._number += 1
            self._note(Written(tuple(_kept(op) if isinstance(op, PutRows) else op for op in entry), self._number, synced))
        if self._inner is not None:
            return self._inner.append(entry, synced=synced)
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        acknowledged.set_result(None)
        return acknowledged

    def stats(self) -> dict[str, float]:
        return {} if self._inner is None else self._inner.stats()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


def _kept(op: PutRows) -> PutRows:
    """Rows are looked at when the turn is over."""
    return PutRows([row._replace(tag=dict(row.tag)) for row in op.rows])
