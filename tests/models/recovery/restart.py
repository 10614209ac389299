"""Moves of crash and restart (rules 4, 10, 11): what survives, which checkpoint is loaded, and when generation begins again.

    running ──crash──> down ──start──> recovering ──delete damaged──> ──load──> running
                        ^                   │
                        └────── crash ──────┘

Nothing durable changes on the way but the incarnation and what is damaged, so that a crash in the middle is just a crash.
"""

from collections.abc import Iterator

from tests.models.recovery.oracles import (
    EVALUATION_LOST,
    LOST_TURNS,
    NEWER_THAN_JOURNAL,
    NO_CHECKPOINT,
    PURGED,
    SAME_INCARNATION,
    TWO_WEIGHTS,
)
from tests.models.recovery.rules import Opens
from tests.models.recovery.state import IDLE, NONE, Case, Checkpoint, Group, Journal, Process, Record, Session, State
from tests.models.recovery.steps import is_evaluation_due
from tests.models.search import Move, promise

Moves = Iterator[Move[str, State]]


def fault_moves(x: State, p: Process, case: Case) -> Moves:
    """At any moment. The adversary picks beforehand what a power loss will leave: what the journal has now, at least."""
    if case.power and x.kept is None:
        yield Move("lose from here", False, x._replace(kept=_without_calls(x.journal)))
    if case.sigterm and not p.is_stopping:
        yield Move("SIGTERM", False, x._replace(process=p._replace(is_stopping=True)))
    yield Move("crash", False, _crashed(x, p, case))


def _crashed(x: State, p: Process, case: Case) -> State:
    """Rule 4: attempts and turns stay, the turn that was running is lost."""
    j = x.kept if x.kept is not None else _without_calls(x.journal)
    if p.is_late:
        j = _given_back(j, j.records[-1], case)
    return State(j, None, x.checkpoints, None, x.trained)


def _without_calls(j: Journal) -> Journal:
    """Calls in flight are no entry of the journal; they stand beside their session only to keep the state small."""
    return j._replace(groups=tuple(Group(g.uid, tuple(sorted(map(_without_call, g.sessions)))) for g in j.groups))


def _without_call(session: Session) -> Session:
    return session if session.turns > 0 else session._replace(oldest=NONE)


def down_moves(x: State, case: Case) -> Moves:
    """Meanwhile the newest checkpoint may get damaged, where another one is left."""
    newest = x.checkpoints[-1]
    if newest.is_whole and len(x.checkpoints) > 1:
        damaged = (*x.checkpoints[:-1], newest._replace(is_whole=False))
        yield Move("the newest checkpoint is damaged", False, x._replace(checkpoints=damaged))
    yield Move("start", True, _started(x, case))


def _started(x: State, case: Case) -> State:
    """Rule 4: the first transaction is the incarnation, and it is synced."""
    promise(x.journal.behind == 0, SAME_INCARNATION)
    unsynced = x.journal._replace(behind=1) if case.power and not case.rules.incarnation_is_synced else None
    return x._replace(kept=unsynced, process=Process())


def recovery_moves(x: State, case: Case) -> Moves:
    """Rule 10: damaged checkpoints are deleted, then the newest is loaded."""
    whole = tuple(checkpoint for checkpoint in x.checkpoints if checkpoint.is_whole)
    if len(whole) < len(x.checkpoints) and case.rules.damaged_is_deleted:
        yield Move("delete the damaged", True, x._replace(checkpoints=whole))
        return
    promise(bool(whole), NO_CHECKPOINT)
    yield Move("load", True, _loaded(x, whole[-1], case))


def _loaded(x: State, checkpoint: Checkpoint, case: Case) -> State:
    """Rule 10: its version is published, and rule 5 does the rest. Rule 11: nothing is generated until the last record is done."""
    _check_loadable(x.journal, checkpoint, case)
    j = _as_variants_see_it(x.journal, checkpoint, case)
    promise(set(x.journal.groups) <= set(j.groups), LOST_TURNS)
    step = checkpoint.step
    version, goal = case.version(step), _goal(j, case)
    is_due = is_evaluation_due(version, j, case) and case.rules.evaluation_due_at_load
    process = Process(
        phase=IDLE,
        weights=step,
        published=version,
        goal=goal if goal > step else NONE,
        evaluating=version if is_due else NONE,
    )
    return x._replace(journal=j, process=process)


def _check_loadable(j: Journal, checkpoint: Checkpoint, case: Case) -> None:
    step = checkpoint.step
    promise(step <= j.last, NEWER_THAN_JOURNAL)
    promise(j.purged <= step, PURGED)
    promise(step % case.updates == 0, TWO_WEIGHTS)
    if case.evaluate:
        promise(case.version(step) <= (j.evaluated // case.evaluate + 1) * case.evaluate, EVALUATION_LOST)


def _goal(j: Journal, case: Case) -> int:
    if case.rules.opens is Opens.AT_ONCE:
        return NONE
    if case.rules.opens is Opens.AT_NEWEST_TOKEN:  # of alive groups; those of the last record have at most the version before it
        return max([j.last - 1, *(session.newest * case.updates for group in j.groups for session in group.sessions)])
    return j.last


# --- what the wrong variants do to the journal


def _as_variants_see_it(j: Journal, checkpoint: Checkpoint, case: Case) -> Journal:
    """By the rules a restart changes nothing here: the journal is the truth."""
    rules = case.rules
    if not rules.rows_follow_records or not rules.recorded_keys_are_taken_again:
        for record in reversed(j.records):
            is_undone = record.step > checkpoint.step if rules.rows_follow_records else not record.is_retired
            j = _given_back(j, record, case) if is_undone else j
    if not rules.restart_keeps_attempts:
        j = j._replace(groups=tuple(g if g.is_terminal(case.turns) else Group(g.uid, (Session(),) * case.group) for g in j.groups))
    if checkpoint.groups is not None:
        known = {group.uid for group in j.groups}.union(*(record.uids for record in j.records))
        j = j._replace(groups=tuple(group for group in checkpoint.groups if group.uid not in known) + j.groups)
    if checkpoint.cursor != NONE:
        j = j._replace(cursor=checkpoint.cursor)
    if checkpoint.num_open != NONE:
        j = j._replace(num_open=checkpoint.num_open)
    return j


def _given_back(j: Journal, record: Record, case: Case) -> Journal:
    """Its groups at the head of the queue, as if never recorded, and as young as they can be."""
    version = case.version(record.step - 1)
    groups = tuple(Group(uid, (Session(case.turns, version, version),)) for uid in record.uids)
    return j._replace(groups=groups + j.groups, records=tuple(r for r in j.records if r != record))
