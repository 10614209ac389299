"""Moves of a training step: record, update, retire, publish (rules 5, 6, 13), and the end that SIGTERM asks for (rule 7).

A restart has no way of its own through a step: where there is a record, the step takes its keys from there.
"""

from collections.abc import Iterator

from tests.models.recovery.checkpoints import begun, is_tidy, saves
from tests.models.recovery.oracles import (
    DEAD_ROW_TRAINED,
    EVALUATION_MOVED,
    OTHER_KEYS,
    ROW_MISSING,
    TOO_NEW,
    TOO_OLD,
    TRAINED_TWICE,
)
from tests.models.recovery.rules import Opens, Recorded
from tests.models.recovery.state import (
    DEAD_ROWS,
    IDLE,
    NONE,
    PUBLISHED,
    RECORDED,
    RETIRED,
    TORN,
    UPDATED,
    Case,
    Group,
    Journal,
    Process,
    Record,
    State,
)
from tests.models.search import Move, promise

StepMoves = Iterator[Move[str, State]]


def step_moves(x: State, p: Process, case: Case) -> StepMoves:
    if p.phase == IDLE:
        yield from _stop_moves(x, p, case) if is_stop(p, case) else _sample(x, p, case)
    elif p.phase == RECORDED:
        yield from _update(x, p, case)
    elif p.phase == UPDATED:
        yield Move("retire", True, _retired(x, p, case))
    elif p.phase == RETIRED:
        yield from _publish(x, p, case)
    else:
        yield Move("write the record late", True, x._replace(process=p._replace(phase=IDLE, is_late=False)))


# --- record


def _sample(x: State, p: Process, case: Case) -> StepMoves:
    """Rule 5: the keys of the record if there is one, else the first `batch` alive groups, once all of them are terminal."""
    j, step = x.journal, p.weights + 1
    if j.uids_of(step) is not None:
        yield Move("take the record", True, x._replace(journal=_marked(j, step, False, case), process=p._replace(phase=RECORDED)))
        return
    chosen = _first_groups(j, case)
    if chosen:
        _check_tokens(chosen, p, case)
        yield Move("record", True, _recorded(x, p, Record(step, tuple(group.uid for group in chosen)), case))


def _first_groups(j: Journal, case: Case) -> tuple[Group, ...]:
    groups = j.groups
    if not case.rules.batch_waits_for_its_groups:
        groups = tuple(group for group in groups if group.is_terminal(case.turns))
    head = groups[: case.batch]
    return head if len(head) == case.batch and all(group.is_terminal(case.turns) for group in head) else ()


def _check_tokens(groups: tuple[Group, ...], p: Process, case: Case) -> None:
    """The staleness bound: 0 <= version - token_version <= max_staleness, of every token of the batch."""
    version = case.version(p.weights)
    for group in groups:
        session = group.sessions[0]
        promise(session.newest <= version, TOO_NEW)
        promise(version - session.oldest <= case.max_staleness, TOO_OLD)
        promise(session.flaw != DEAD_ROWS, DEAD_ROW_TRAINED)
        promise(session.flaw != TORN, ROW_MISSING)


def _recorded(x: State, p: Process, record: Record, case: Case) -> State:
    """Rule 5: one synced transaction, before any stage runs."""
    j = x.journal
    groups = tuple(group for group in j.groups if group.uid not in record.uids)
    return x._replace(
        journal=j._replace(groups=groups, records=(*j.records, record)),
        kept=None if case.rules.record_is_synced else x.kept,
        process=p._replace(phase=RECORDED, is_late=case.rules.recorded is not Recorded.FIRST),
    )


# --- update, retire


def _update(x: State, p: Process, case: Case) -> StepMoves:
    """Where the step is one to save, its checkpoint is begun with it; it waits until the one before is out of the way (rule 8)."""
    step = p.weights + 1
    if saves(step, case) and not is_tidy(x, p, case):
        return
    uids = x.journal.uids_of(step) or ()
    _check_keys(x, step, uids)
    trained = x.trained if (step, uids) in x.trained else (*x.trained, (step, uids))
    after = p._replace(weights=step, phase=UPDATED)
    if saves(step, case) and x.checkpoints[-1].step < step:
        after = begun(x, after, case)
    if case.rules.opens is Opens.AFTER_LAST_RECORD_IS_TRAINED and step >= p.goal:
        after = after._replace(goal=NONE)
    yield Move("update", True, x._replace(process=after, trained=trained))


def _check_keys(x: State, step: int, uids: tuple[int, ...]) -> None:
    """Each key once a lineage: the steps that made these weights are all those up to here, each with the keys it always has."""
    for trained, keys in x.trained:
        promise(trained != step or keys == uids, OTHER_KEYS)
        promise(trained == step or not set(keys) & set(uids), TRAINED_TWICE)


def _retired(x: State, p: Process, case: Case) -> State:
    """Rule 6: rows are hidden in memory. What a row is follows from its record and the loaded weights."""
    return x._replace(journal=_marked(x.journal, p.weights, True, case), process=p._replace(phase=RETIRED))


def _marked(j: Journal, step: int, is_retired: bool, case: Case) -> Journal:
    """Of the variant of rule 6 alone."""
    if case.rules.rows_follow_records:
        return j
    return j._replace(records=tuple(r._replace(is_retired=is_retired) if r.step == step else r for r in j.records))


# --- publish


def _publish(x: State, p: Process, case: Case) -> StepMoves:
    """Rule 6: last in the step. Rule 13: a version whose evaluation is due waits for the evaluation before."""
    version = case.version(p.weights)
    is_due = version != p.published and is_evaluation_due(version, x.journal, case)
    if p.evaluating != NONE and (is_due or case.between) and case.rules.between_means_no_publication:
        return
    is_last = case.rules.recorded is Recorded.AFTER_PUBLISHING and p.is_late
    after = p._replace(
        phase=PUBLISHED if is_last else IDLE,
        published=version,
        goal=NONE if p.weights >= p.goal else p.goal,  # rule 11
        evaluating=version if is_due else p.evaluating,
        is_late=is_last,
    )
    yield Move("publish", True, x._replace(process=after))


def is_evaluation_due(version: int, j: Journal, case: Case) -> bool:
    """Rule 13: every `evaluate` versions, unless there is a result."""
    return case.evaluate > 0 and version % case.evaluate == 0 and version > j.evaluated


def evaluation_moves(x: State, p: Process, case: Case) -> StepMoves:
    """Rule 13: the result is one transaction."""
    if p.evaluating != NONE:
        promise(not case.between or p.evaluating == p.published, EVALUATION_MOVED)
        after = x.journal._replace(evaluated=p.evaluating)
        yield Move("evaluated", True, x._replace(journal=after, process=p._replace(evaluating=NONE)))


# --- stop


def is_stop(p: Process, case: Case) -> bool:
    """Rule 7: a process that was asked to stop goes on to the step that ends a version."""
    return p.is_stopping and (p.weights % case.updates == 0 or not case.rules.sigterm_waits_for_version)


def _stop_moves(x: State, p: Process, case: Case) -> StepMoves:
    """The last checkpoint, and the end once it is out of the way."""
    if not is_tidy(x, p, case):
        return
    if x.checkpoints[-1].step < p.weights:
        yield Move("save before the end", True, x._replace(process=begun(x, p, case)))
    else:
        yield Move("exit", True, x._replace(process=None))
