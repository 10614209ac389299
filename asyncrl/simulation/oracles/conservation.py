"""I1: every prompt that the feed handed out is trained, dropped with a reason, or open, at any time and over restarts."""

from collections.abc import Sequence

from asyncrl.simulation.oracles.book import Line
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes


class Conservation(Oracle):
    """Three accounts that must agree: admission's, the ledger's, and the book."""

    name = "I1"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._first = ground.book.cursor
        self._told: tuple[int, ...] = ()

    def fed(self, lines: Sequence[Line]) -> None:
        """The rule of admission, with the groups recorded as the store knows them."""
        ground, version = self.ground, self.ground.engines.version
        recorded = {uid for record in ground.shadow.records.values() if record.step > version for uid in record.uids}
        limit = (ground.run.max_staleness + 1) * ground.run.data.train_batch_size
        alive = sum(uid not in recorded for uid in ground.admission._alive)  # a record is in the store before admission has it
        if alive + len(recorded) > limit:
            self.fail(
                f"{lines[-1]} was admitted without a place: {alive} alive + {len(recorded)} recorded "
                f"since version {version} > {limit}"
            )

    def turn(self) -> None:
        admission = self.ground.admission
        dropped = sum(admission._num_dropped.values())
        told = (admission._num_admitted, admission._num_trained, dropped, len(admission._alive), len(admission._records))
        if told == self._told:
            return
        self._told = told
        admitted, trained, _, alive, _ = told
        recorded = admission.num_recorded
        if admitted != trained + dropped + alive + recorded:
            self.fail(
                f"admission: {admitted} admitted != {trained} trained + {dropped} dropped + {alive} alive + {recorded} recorded"
            )
        fed = self.ground.book.cursor - self._first
        if admitted != fed:
            self.fail(f"the feed handed {fed} prompts out, and {admitted} were admitted")
        if dropped < self.ground.book.num_dropped:
            self.fail(f"the store dropped {self.ground.book.num_dropped} groups, admission only {dropped}")

    def entry(self, changes: Changes) -> None:
        self._keep_book(changes)
        shadow = self.ground.shadow
        if changes.counted or changes.removed or changes.records:
            opened, unrecorded, recorded = shadow.num_open, shadow.num_unrecorded, shadow.num_recorded
            if opened != unrecorded + recorded:
                self.fail(
                    f"the ledger has {opened} open groups ({_shown(shadow.counters)}), but {unrecorded} under way and "
                    f"{recorded} of records are there"
                )

    def _keep_book(self, changes: Changes) -> None:
        book = self.ground.book
        for before, after in changes.records:
            if before is None:
                for uid in after.uids:
                    book.record(uid, after.step)
            if after.is_retired and (before is None or not before.is_retired):
                for uid in after.uids:
                    book.train(uid, after.step)
        purged = {uid for record in changes.forgotten for uid in record.uids}
        gone = [row.entry.uid for row in changes.removed if row.is_prompt and row.entry.uid not in purged]
        if gone:
            reasons = [name.removeprefix("dropped/") for name, grown in changes.counted.items() if name.startswith("dropped/")]
            if not reasons:
                self.fail(f"groups {gone} went, and no reason was counted")
            for uid in gone:
                book.drop(uid, reasons[0])

    def end(self) -> None:
        """A finished run has nothing open but what it began for later steps, and trained what its weights say."""
        if not self.ground.machine.is_finished:
            return
        book, scenario = self.ground.book, self.ground.machine.scenario
        if len(book.open) > self.ground.run.max_staleness * scenario.data.train_batch_size:
            self.fail(f"the run is over, and {len(book.open)} groups are open, the first: {next(iter(book.open.values()))}")
        trained = {line.uid for line in book.lines.values() if line.fate == "trained"}
        learned = {uid for step in self.ground.lineage for uid in step}
        if trained != learned:
            self.fail(f"the book and the weights differ about {sorted(trained ^ learned)[:4]}")


def _shown(counters: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(counters.items()))
