"""The same state with small numbers, so that endless runs have finitely many states.

Nothing in the rules depends on how large a step, version or admission number is, only on differences, on remainders by the
intervals, and on the order of admission. So steps count from the oldest purged one, rounded down such that remainders stay and no
number falls below 0; and admission numbers become ranks.
"""

from math import lcm

from tests.models.recovery.state import NONE, Case, Checkpoint, Group, Journal, Process, Record, Session, State


class _Frame:
    """step, version: what is subtracted of each. ranks: new admission numbers."""

    def __init__(self, x: State, case: Case) -> None:
        unit = lcm(case.every, case.updates * max(1, case.evaluate))
        self.purged = min(x.journal.purged, x.kept.purged) if x.kept is not None else x.journal.purged
        margin = (case.max_staleness + 1) * case.updates + 1
        self.step = (self.purged // unit - margin) * unit
        self.version = self.step // case.updates
        self.has_evaluations = case.evaluate > 0
        self.ranks = {uid: rank for rank, uid in enumerate(sorted(_numbers(x)))}
        is_dense = len(self.ranks) == max(self.ranks) + 1
        self.is_identity = self.step == 0 and is_dense and not (x.trained and x.trained[0][0] <= self.purged)

    def session(self, s: Session) -> Session:
        oldest, newest = (version if version == NONE else version - self.version for version in (s.oldest, s.newest))
        return Session(s.turns, oldest, newest, s.flaw)

    def groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return tuple(Group(self.ranks[group.uid], tuple(map(self.session, group.sessions))) for group in groups)

    def uids(self, uids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.ranks[uid] for uid in uids)

    def journal(self, j: Journal) -> Journal:
        return Journal(
            self.ranks[j.cursor],
            self.groups(j.groups),
            tuple(Record(record.step - self.step, self.uids(record.uids), record.is_retired) for record in j.records),
            j.purged - self.step,
            j.num_open,
            j.evaluated - self.version if self.has_evaluations else 0,
            j.is_ended,
            j.behind,
        )

    def checkpoint(self, c: Checkpoint) -> Checkpoint:
        cursor = NONE if c.cursor == NONE else self.ranks[c.cursor]
        groups = None if c.groups is None else self.groups(c.groups)
        return Checkpoint(c.step - self.step, c.is_whole, cursor, c.num_open, groups)

    def process(self, p: Process) -> Process:
        if p.phase == 0:
            return p
        return p._replace(
            weights=p.weights - self.step,
            published=p.published - self.version,
            goal=NONE if p.goal == NONE else p.goal - self.step,
            saving=None if p.saving is None else self.checkpoint(p.saving),
            evaluating=NONE if p.evaluating == NONE else p.evaluating - self.version,
        )


def relative(x: State, case: Case) -> State:
    """The same future, and the state itself where its numbers are small already."""
    frame = _Frame(x, case)
    if frame.is_identity:
        return x
    return State(
        frame.journal(x.journal),
        None if x.kept is None else frame.journal(x.kept),
        tuple(map(frame.checkpoint, x.checkpoints)),
        None if x.process is None else frame.process(x.process),
        tuple((step - frame.step, frame.uids(uids)) for step, uids in x.trained if step > frame.purged),
    )


def _numbers(x: State) -> set[int]:
    """Every admission number of a state."""
    found: set[int] = set()
    for j in (x.journal, x.kept):
        if j is not None:
            found.update((j.cursor,), (group.uid for group in j.groups), *(record.uids for record in j.records))
    for checkpoint in (*x.checkpoints, *(() if x.process is None or x.process.saving is None else (x.process.saving,))):
        found.update((checkpoint.cursor,) if checkpoint.cursor != NONE else (), (g.uid for g in checkpoint.groups or ()))
    return found.union(*(uids for _, uids in x.trained))
