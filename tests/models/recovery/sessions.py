"""Moves of groups and sessions: drop and turn (rule 2), retry and late write (rule 3); rule 11 says when there may be a turn."""

from collections.abc import Iterator

from tests.models.recovery.oracles import VERSIONS_FALL
from tests.models.recovery.state import CLEAN, DEAD_ROWS, NONE, TORN, Case, Group, Process, Session, State
from tests.models.search import Move, promise


def group_moves(x: State, p: Process, case: Case) -> Iterator[Move[str, State]]:
    """A group may be dropped at any time until it is recorded. Equal sessions have equal moves: one of them is enough."""
    for place, group in enumerate(x.journal.groups):
        yield Move("drop", False, _dropped(x, place, case))
        for i, session in enumerate(group.sessions):
            if session.turns < case.turns and (i == 0 or session != group.sessions[i - 1]):
                for action, helps, after in _session_moves(session, p, case):
                    sessions = (*group.sessions[:i], after, *group.sessions[i + 1 :])
                    yield Move(action, helps, _with_group(x, place, Group(group.uid, _settled(sessions, case))))
                yield _late_write(x, place, i, case)


def _dropped(x: State, place: int, case: Case) -> State:
    """Rule 2: rows, reason and count go in one transaction."""
    j = x.journal
    num_open = j.num_open - case.rules.drop_is_counted_with_its_rows
    return x._replace(journal=j._replace(groups=j.groups[:place] + j.groups[place + 1 :], num_open=num_open))


def _session_moves(session: Session, p: Process, case: Case) -> Iterator[Move[str, Session]]:
    """One transaction each.

    A call in flight is told from a turn only where weights may change under it, and only at turn 0: later the oldest token has its
    version already, and the newest gets its own at the end of the call.
    """
    if p.goal == NONE:
        promise(session.newest <= p.published, VERSIONS_FALL)
        if case.in_flight and session.is_untouched:
            yield Move("begin a call", True, session._replace(oldest=p.published))
        else:
            yield Move("turn", True, _after_turn(session, p, case))
    if not session.is_untouched:
        has_rows = session.turns > 0 and not case.rules.retry_deletes_older_rows
        yield Move("retry", False, Session(flaw=DEAD_ROWS if has_rows else CLEAN))


def _after_turn(session: Session, p: Process, case: Case) -> Session:
    """Rule 2: the last turn settles the session, with its rows and reward."""
    oldest = p.published if session.is_untouched else session.oldest
    is_torn = session.turns + 1 == case.turns and not case.rules.settling_is_one_transaction
    return Session(session.turns + 1, oldest, p.published, TORN if is_torn else session.flaw)


def _late_write(x: State, place: int, i: int, case: Case) -> Move[str, State]:
    """Rule 3: a writer of a dead attempt, or of an earlier process, has no open lease; its write changes nothing."""
    if case.rules.late_writes_are_refused:
        return Move("late write", False, x)
    group = x.journal.groups[place]
    sessions = (*group.sessions[:i], group.sessions[i]._replace(flaw=DEAD_ROWS), *group.sessions[i + 1 :])
    return Move("late write", False, _with_group(x, place, Group(group.uid, _settled(sessions, case))))


def _settled(sessions: tuple[Session, ...], case: Case) -> tuple[Session, ...]:
    """In order; of a terminal group only the extremes matter from now on."""
    ordered = tuple(sorted(sessions))
    if ordered[0].turns < case.turns:
        return ordered
    oldest, newest = min(s.oldest for s in ordered), max(s.newest for s in ordered)
    return (Session(case.turns, oldest, newest, max(s.flaw for s in ordered)),)


def _with_group(x: State, place: int, group: Group) -> State:
    groups = x.journal.groups
    return x._replace(journal=x.journal._replace(groups=(*groups[:place], group, *groups[place + 1 :])))
