"""What the TransferQueue sees of a journal. The one on disk is `sqlite.py`; the one in memory, for simulation, `model.py`.

Invariants of every journal:
1. Entries are kept in the order of the `append` calls, each whole or not at all; what is kept is always a prefix of that order.
2. The future of an entry is done only when the entry survives the end of the process; with `synced`, that of the machine as well.
3. After a failure no entry is acknowledged any more: `failure` is set, and every waiting and later future raises it.
"""

from typing import TYPE_CHECKING, Protocol

from asyncrl.errors import JournalWriteError
from asyncrl.journal.entries import Entry, Saved

if TYPE_CHECKING:
    import asyncio


class Journal(Protocol):
    """Durable entries of one run. One process at a time has it open; all calls but `load` and `close` come from its event loop."""

    @property
    def failure(self) -> JournalWriteError | None:
        """Why nothing can be written any more."""
        ...

    def load(self, weights_step: int = 0) -> Saved:
        """What was kept when it was opened, without the rows of steps up to `weights_step`, which the weights have learned; those
        of later steps are there again. Blocking; to be called once, before any append."""
        ...

    def append(self, entry: Entry, *, synced: bool = False) -> "asyncio.Future[None]":
        """Queue an entry; returns at once. The buffers that it names must not change any more."""
        ...

    def stats(self) -> dict[str, float]:
        """`journal_bytes` (files now), `journal_commits` (group commits so far), `journal_waiting` (entries not acknowledged)."""
        ...

    def close(self) -> None:
        """Write what is queued and let the files go. Blocking."""
        ...
