"""What can be seen of a TransferQueue at once, without its keys: steps and their records, and all that is counted.

State, Journal -> [counts] -> store, recovery, metrics
"""

from collections.abc import Mapping
from types import MappingProxyType

from asyncrl.errors import DeadlineError, JournalWriteError
from asyncrl.journal.entries import StepRecord, counted_by
from asyncrl.journal.port import Journal
from asyncrl.transfer_queue.commit_deadline import CommitDeadline
from asyncrl.transfer_queue.state import State


class Counts:
    """The part of a TransferQueue that reads numbers and changes none."""

    _state: State
    _journal: Journal | None
    _deadline: CommitDeadline

    @property
    def failure(self) -> JournalWriteError | DeadlineError | None:
        """Why nothing can be kept any more."""
        return None if self._journal is None else self._journal.failure or self._deadline.failure

    @property
    def records(self) -> Mapping[int, StepRecord]:
        """Step -> its record, of those that are not purged."""
        return MappingProxyType(self._state.ledger.records)

    @property
    def weights_step(self) -> int:
        """The last step that the weights have learned: that of the loaded ones, or the last that was retired since."""
        return self._state.ledger.weights_step

    @property
    def last_step(self) -> int:
        """The last step that was recorded, purged or not; 0: none."""
        return self._state.ledger.last_step

    @property
    def purged_step(self) -> int:
        """The step up to which records are purged; 0: none is."""
        return self._state.ledger.counters["purged_step"]

    @property
    def cursor(self) -> int:
        """Number of prompts that the feed has handed out to admissions."""
        return self._state.ledger.counters["cursor"]

    @property
    def evaluated(self) -> int:
        """The newest version whose evaluation has a result; -1: none has one."""
        return self._state.ledger.evaluated

    @property
    def num_trained(self) -> int:
        """Groups that the weights have learned, in steps that are purged or retired. It falls when older weights are loaded."""
        return self._state.ledger.num_trained

    def counters(self) -> dict[str, int]:
        """What the run counts, through all restarts: admitted, dropped/<reason>, failed_row/<dataset row>, cursor, evaluated,
        purged_step, purged_groups; what was never counted is missing."""
        return dict(self._state.ledger.counters)

    def failed_rows(self) -> dict[int, int]:
        """Dataset row -> its groups that were dropped as failures."""
        return {int(row): number for row, number in counted_by(self._state.ledger.counters, "failed_row").items()}

    def failures_of(self, row: int) -> int:
        """Groups of one dataset row that were dropped as failures; asked at each admission."""
        return self._state.ledger.counters[f"failed_row/{row}"]

    def recorded(self, step: int) -> StepRecord | None:
        """The record of a step; None: it has none, or is purged."""
        return self._state.ledger.records.get(step)

    def stats(self) -> dict[str, float]:
        """Numbers now: keys, bytes (held), live_bytes (needed), open_leases, watchers, records (steps not purged), turns (of
        sessions under way); counters since the start: puts, gets, cleared and retired keys, refused_writes (StaleLeaseError); those
        of the journal; and what the run counts: ledger/admitted, ledger/dropped/<reason>, ... (not failed_row/<dataset row>: these
        may be as many as the rows)"""
        state = self._state
        partitions = state.partitions.values()
        return {
            "keys": sum(len(partition.rows) for partition in partitions),
            "bytes": sum(partition.size_bytes for partition in partitions),
            "live_bytes": sum(partition.live_bytes for partition in partitions),
            "open_leases": len(state.leases),
            "watchers": len(state.watches),
            "records": len(state.ledger.records),
            "turns": state.ledger.num_turns,
            **state.counts,
            **{f"ledger/{name}": value for name, value in state.ledger.counters.items() if not name.startswith("failed_row/")},
            **({} if self._journal is None else self._journal.stats()),
        }
