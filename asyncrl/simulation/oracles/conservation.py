"""I1: every prompt that the feed handed out is trained, dropped with a reason, or open, at any time and over restarts."""

from collections import Counter
from collections.abc import Sequence

from asyncrl.simulation.errors import Violation
from asyncrl.simulation.oracles.book import Book, Fate, Line
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes


class Conservation(Oracle):
    """Three accounts that must agree: admission's, the ledger's, and the book."""

    name = "I1"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._told: tuple[int, ...] = ()

    def begin(self) -> None:
        """After a restart the journal and the book agree about every prompt that was ever admitted."""
        book, shadow = self.ground.book, self.ground.shadow
        if not self.ground.run.store.journal:
            return
        recorded = {uid for record in shadow.records.values() for uid in record.uids}
        under_way = {row.entry.uid for row in shadow.keys.values() if row.is_prompt} - recorded
        if under_way != set(book.open):
            self.fail(f"after the restart groups {sorted(under_way ^ set(book.open))[:4]} are lost, or came back")
        purged = shadow.counters.get("purged_step", 0)
        for line in book.lines.values():
            is_kept = line.fate in (Fate.RECORDED, Fate.TRAINED) and line.step > purged
            if is_kept != (line.uid in recorded):
                self.fail(f"after the restart {line}, and it is in {'no' if is_kept else 'a'} record")
        self._check_counters()

    def _check_counters(self) -> None:
        """admitted = trained + dropped by reason + open, by the journal's counters and by the book."""
        book, counters = self.ground.book, self.ground.shadow.counters
        dropped = Counter(line.reason for line in book.lines.values() if line.fate is Fate.DROPPED)
        counted = {name.removeprefix(DROPPED): count for name, count in counters.items() if name.startswith(DROPPED) and count}
        if counters.get("admitted", 0) != len(book.lines) or counted != dropped:
            self.fail(
                f"the counters are {_shown(counters)}; there were {len(book.lines)} prompts, and dropped were {dict(dropped)}"
            )

    def fed(self, lines: Sequence[Line]) -> None:
        """The rule of admission, with the groups recorded as the store knows them; the next prompts, none but those left out."""
        ground, version = self.ground, self.ground.engines.version
        for line in lines:
            if line.uid != ground.world.uid(line.number):
                self.fail(f"prompt {line.number} was admitted as group {line.uid!r}, which is another one's name")
        recorded = {
            uid
            for record in ground.shadow.records.values()
            if record.step > version * ground.run.publish_freq
            for uid in record.uids
        }
        alive = len(ground.book.open.keys() - recorded)
        if alive + len(recorded) > ground.num_places:
            self.fail(
                f"{lines[-1]} was admitted without a place: {alive} alive + {len(recorded)} recorded "
                f"since version {version} > {ground.num_places}"
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
        book, ends = self.ground.book, self.ground.is_ending or self.ground.has_journal_failed
        if admitted != len(book.lines) and not ends:  # the last one may not come into a store that takes nothing more
            self.fail(f"{len(book.lines)} prompts were admitted, and admission counts {admitted}")
        if dropped < book.num(Fate.DROPPED):
            self.fail(f"the store dropped {book.num(Fate.DROPPED)} groups, admission only {dropped}")

    def entry(self, changes: Changes) -> None:
        shadow = self.ground.shadow
        if changes.counted or changes.removed or changes.records:
            opened, unrecorded, recorded = shadow.num_open, shadow.num_unrecorded, shadow.num_recorded
            if opened != unrecorded + recorded:
                self.fail(
                    f"the ledger has {opened} open groups ({_shown(shadow.counters)}), but {unrecorded} under way and "
                    f"{recorded} of records are there"
                )

    def end(self) -> None:
        """The counters are right; and a finished run has nothing open, and trained what its weights say."""
        self._check_counters()
        if not self.ground.machine.is_finished:
            return
        book = self.ground.book
        if book.open:
            self.fail(f"the run is over, and {len(book.open)} groups are open, the first: {next(iter(book.open.values()))}")
        trained = {line.uid for line in book.lines.values() if line.fate is Fate.TRAINED}
        learned = {uid for step in self.ground.lineage for uid in step}
        if trained != learned:
            self.fail(f"the book and the weights differ about {sorted(trained ^ learned)[:4]}")


DROPPED = "dropped/"


def keep_book(book: Book, changes: Changes) -> None:
    """Write down what an entry did with prompts, admissions but for. Raises Violation."""
    number = changes.number
    for record in changes.recorded:
        for uid in record.uids:
            book.record(number, uid, record.step)
    for record in changes.retired:
        for uid in record.uids:
            book.train(number, uid, record.step)
    purged = {uid for record in changes.forgotten for uid in record.uids}
    gone = [row.entry.uid for row in changes.removed if row.is_prompt and row.entry.uid not in purged]
    reasons = [name.removeprefix(DROPPED) for name in changes.counted if name.startswith(DROPPED)]
    if gone and not reasons:
        raise Violation("I1", f"groups {gone} went, and no reason was counted")
    for uid in gone:
        book.drop(number, uid, reasons[0])


def _shown(counters: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(counters.items()))
