"""Who may start, and what a step takes: the rule of the product, one that is as safe, and those that are wrong.

A policy is five choices; a wrong one differs from the product's in one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.models.admission.model import DEADLOCK, IDLE, RESTORED, STRANDED, Case, Group, State

Alive = tuple[Group, ...]


# --- places that are held


def until_publication(x: State, case: Case) -> int:
    """The rule: alive + groups recorded since the published version."""
    return len(x.alive) + x.steps * case.batch


def until_record(x: State, case: Case) -> int:
    return len(x.alive)


def until_retired(x: State, case: Case) -> int:
    return len(x.alive) + case.batch * (x.phase != IDLE)


def until_failure(x: State, case: Case) -> int:
    return until_publication(x, case) - case.batch * (x.phase == RESTORED)


# --- places that there are


def all_places(case: Case) -> int:
    """The rule: (max_staleness + 1) x batch x updates."""
    return case.limit


def one_place_more(case: Case) -> int:
    return case.limit + 1


def places_of_one_step(case: Case) -> int:
    return (case.max_staleness + 1) * case.batch


# --- groups that a step takes, as indices into the queue, or None while it waits


def first_of_the_queue(x: State, case: Case) -> tuple[int, ...] | None:
    """The rule: the first `batch` alive groups, once they are all terminal."""
    head = x.alive[: case.batch]
    is_ready = len(head) == case.batch and all(group.is_terminal for group in head)
    return tuple(range(case.batch)) if is_ready else None


def first_terminal(x: State, case: Case) -> tuple[int, ...] | None:
    terminal = tuple(i for i, group in enumerate(x.alive) if group.is_terminal)
    return terminal[: case.batch] if len(terminal) >= case.batch else None


def first_terminal_unless_due(x: State, case: Case) -> tuple[int, ...] | None:
    """Waits only for running groups whose last chance this step is."""
    weights, is_last_step = x.steps // case.updates, (x.steps + 1) % case.updates == 0
    waits = is_last_step and any(group.age + weights >= case.max_staleness and not group.is_terminal for group in x.alive)
    return None if waits else first_terminal(x, case)


def first_terminal_if_feasible(x: State, case: Case) -> tuple[int, ...] | None:
    """Waits only while the groups left behind could otherwise not all be trained on in time."""
    chosen = first_terminal(x, case)
    if chosen is None:
        return None
    rest = [group.age + x.steps // case.updates for i, group in enumerate(x.alive) if i not in chosen]
    left_of_version = case.updates - 1 - x.steps % case.updates
    for later in range(case.max_staleness + 1):
        room = (left_of_version + later * case.updates) * case.batch
        if sum(age + later >= case.max_staleness for age in rest) > room:
            return None
    return chosen


def newest_terminal(x: State, case: Case) -> tuple[int, ...] | None:
    terminal = tuple(i for i, group in enumerate(x.alive) if group.is_terminal)
    return terminal[-case.batch :] if len(terminal) >= case.batch else None


# --- where an admitted group goes


def at_the_end(alive: Alive, group: Group) -> Alive:
    return (*alive, group)


def at_the_head(alive: Alive, group: Group) -> Alive:
    return (group, *alive)


# --- policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """held: places taken; limit: places there are; take: what a step trains on; queue: where an admitted group goes.

    drops_rest: groups that cannot fill a batch after the feed's end are dropped. keeps_position: it has the position promise.
    """

    held: Callable[[State, Case], int] = until_publication
    limit: Callable[[Case], int] = all_places
    take: Callable[[State, Case], tuple[int, ...] | None] = first_of_the_queue
    queue: Callable[[Alive, Group], Alive] = at_the_end
    drops_rest: bool = True
    keeps_position: bool = False


RIGHT = Policy(keeps_position=True)
"""What the product does."""

FEASIBLE = Policy(take=first_terminal_if_feasible)
"""As safe, and waits less; the make-up of a batch then depends on timing, which is why the product does not do it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy that is wrong, a case that shows it, and the promise that breaks first."""

    policy: Policy
    case: Case
    breaks: str


SYNC, NEXT, FAR = Case(max_staleness=0, batch=1), Case(max_staleness=1, batch=1), Case(max_staleness=2, batch=1)
TWO_STEPS = Case(max_staleness=0, batch=1, updates=2)
_WRONG = Policy()

WRONG: dict[str, Variant] = {
    "a place is freed by the record": Variant(policy=replace(_WRONG, held=until_record), case=SYNC, breaks=STRANDED),
    "a place is freed by retiring": Variant(policy=replace(_WRONG, held=until_retired), case=SYNC, breaks=STRANDED),
    "a failed step frees its places": Variant(policy=replace(_WRONG, held=until_failure), case=SYNC, breaks=STRANDED),
    "one place too many": Variant(policy=replace(_WRONG, limit=one_place_more), case=SYNC, breaks=STRANDED),
    "places for one step of each version": Variant(
        policy=replace(_WRONG, limit=places_of_one_step), case=TWO_STEPS, breaks=DEADLOCK
    ),
    "the first terminal groups are taken": Variant(policy=replace(_WRONG, take=first_terminal), case=NEXT, breaks=STRANDED),
    "earliest deadline first, waiting only for groups that are due": Variant(
        policy=replace(_WRONG, take=first_terminal_unless_due), case=FAR, breaks=STRANDED
    ),
    "the newest terminal groups are taken": Variant(policy=replace(_WRONG, take=newest_terminal), case=NEXT, breaks=STRANDED),
    "a group that replaces a dropped one goes to the head": Variant(
        policy=replace(_WRONG, queue=at_the_head), case=NEXT, breaks=STRANDED
    ),
    "the rest is kept after the feed's end": Variant(
        policy=replace(_WRONG, drops_rest=False), case=Case(max_staleness=0, batch=2), breaks=DEADLOCK
    ),
}
