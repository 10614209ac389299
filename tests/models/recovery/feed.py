"""Moves of the feed: admission (rule 1) and its end (rule 14)."""

from collections.abc import Iterator

from tests.models.recovery.oracles import ADMITTED_TWICE
from tests.models.recovery.state import Case, Group, Journal, Process, Session, State
from tests.models.search import Move, promise

FEED_ENDS = "the feed ends"


def feed_moves(x: State, p: Process, case: Case) -> Iterator[Move[str, State]]:
    j = x.journal
    if j.is_ended:
        if (
            case.rules.rest_is_dropped
            and 0 < len(j.groups) < case.batch
            and all(group.is_terminal(case.turns) for group in j.groups)
        ):
            rest = j._replace(groups=(), num_open=j.num_open - len(j.groups))
            yield Move("drop the rest", True, x._replace(journal=rest))
        return
    yield Move(FEED_ENDS, False, x._replace(journal=j._replace(is_ended=True)))
    if held(j, p, case) + 1 <= case.places:
        yield Move("admit", True, x._replace(journal=_admitted(x, case)))


def held(j: Journal, p: Process, case: Case) -> int:
    """Rule 1: alive + groups recorded since the published version. Only a publication or a drop makes it fall."""
    recorded = case.batch * (j.last - p.published * case.updates)
    return len(j.groups) + recorded * case.rules.places_freed_by_publication


def _admitted(x: State, case: Case) -> Journal:
    """Rule 1: one transaction. The number of the admission is the uid, and the row of the data set."""
    j = x.journal
    known = {group.uid for group in j.groups}.union(*(record.uids for record in j.records), *(uids for _, uids in x.trained))
    promise(j.cursor not in known, ADMITTED_TWICE)
    group = Group(j.cursor, (Session(),) * case.group)
    groups = (*j.groups, group) if case.rules.admission_is_one_transaction else j.groups  # otherwise: what a crash would find now
    return j._replace(cursor=j.cursor + 1, groups=groups, num_open=j.num_open + 1)
