"""Admission and sampling, without asyncio: which groups may start, and which ones a step trains on.

feed -> [admit] -> finish -> [record] -> update -> retire -> [publish]

An adversary picks when groups are admitted and in what order they finish, drops any of them at any time, lets steps fail, ends the
feed, and picks when to publish. Versions are counted from the published one, so there are finitely many states and no limit to the
length of a history. A group counts with the version at which it was admitted: no token of it can be older.

Promises:
1. No group is trained on more than max_staleness versions after its admission.
2. No alive group is ever too old to be trained on: nothing needs to be thrown away.
3. There is always a move that helps, until the feed has ended and no group is left.
4. The position promise, of the right policy (see docs/proofs/staleness.md): it is what makes 1 and 2 true.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tests.models.search import Move, promise

if TYPE_CHECKING:
    from tests.models.admission.policies import Policy

TOO_OLD = "a group is trained on after more than max_staleness versions"
STRANDED = "an alive group is too old for any step to come"
DEADLOCK = "deadlock"
POSITION = "a group is too far back in the queue for its age"

IDLE, RECORDED, RESTORED, UPDATED = range(4)
"""Where the newest step is. RESTORED: it failed, and was not taken again yet. After it is retired: IDLE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """batch: groups a step; updates: steps a version. is_lagging: further steps may be recorded while a publication is owed."""

    max_staleness: int
    batch: int
    updates: int = 1
    is_lagging: bool = False

    @property
    def limit(self) -> int:
        return (self.max_staleness + 1) * self.batch * self.updates

    def __str__(self) -> str:
        text = f"max_staleness={self.max_staleness} batch={self.batch} updates={self.updates}"
        return text + " lagging" * self.is_lagging


class Group(NamedTuple):
    """age: publications since its admission."""

    age: int
    is_terminal: bool


class State(NamedTuple):
    """alive: neither recorded nor dropped, in the order of the queue. steps: recorded since the published version."""

    alive: tuple[Group, ...] = ()
    steps: int = 0
    phase: int = IDLE
    is_open: bool = True


class Verb(StrEnum):
    ADMIT = "admit"
    FINISH = "finish"
    DROP = "drop"
    DROP_REST = "drop the rest"
    FEED_ENDS = "the feed ends"
    RECORD = "record"
    FAIL = "the step fails"
    TAKE_AGAIN = "take again"
    UPDATE = "update"
    RETIRE = "retire"
    PUBLISH = "publish"


class Action(NamedTuple):
    """at: which alive group; of a publication: how many versions at once. groups: which ones a record takes."""

    verb: Verb
    at: int = 0
    groups: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.verb} {self.at}" if self.verb in (Verb.FINISH, Verb.DROP) else str(self.verb)


AdmissionMove = Move[Action, State]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionModel:
    """A case under a policy, as `explore` wants it. looks_ahead: without it, promises 2 and 4 are not looked at, only 1 and 3."""

    case: Case
    policy: "Policy"
    looks_ahead: bool = True

    @property
    def start(self) -> State:
        return State()

    def moves(self, state: State) -> Iterator[AdmissionMove]:
        yield from self._feed_moves(state)
        yield from _group_moves(state)
        yield from self._step_moves(state)
        yield from self._publications(state)

    def normal(self, state: State) -> State:
        """Ages and steps count from the published version as it is."""
        return state

    def audit(self, state: State, *, can_help: bool) -> None:
        if self.looks_ahead:
            self._look_ahead(state)
        is_over = not state.is_open and not state.alive and state.phase == IDLE and state.steps < self.case.updates
        promise(can_help or is_over, DEADLOCK)

    def _look_ahead(self, x: State) -> None:
        """Promises 2 and 4: the age of each alive group at the next step, and at its own step, should no other be dropped."""
        case, trained = self.case, x.steps * self.case.batch
        promise(all(group.age + x.steps // case.updates <= case.max_staleness for group in x.alive), STRANDED)
        ages = (group.age + (trained + place) // (case.batch * case.updates) for place, group in enumerate(x.alive))
        promise(not self.policy.keeps_position or all(age <= case.max_staleness for age in ages), POSITION)

    # --- what the system does

    def _feed_moves(self, x: State) -> Iterator[AdmissionMove]:
        if x.is_open:
            yield Move(Action(Verb.FEED_ENDS), False, x._replace(is_open=False))
            if self.policy.held(x, self.case) + 1 <= self.policy.limit(self.case):
                yield Move(Action(Verb.ADMIT), True, x._replace(alive=self.policy.queue(x.alive, Group(0, False))))
        elif (
            self.policy.drops_rest
            and x.phase == IDLE
            and 0 < len(x.alive) < self.case.batch
            and all(g.is_terminal for g in x.alive)
        ):
            yield Move(Action(Verb.DROP_REST), True, x._replace(alive=()))

    def _step_moves(self, x: State) -> Iterator[AdmissionMove]:
        if x.phase == IDLE:
            yield from self._records(x)
        elif x.phase == RECORDED:
            yield Move(Action(Verb.FAIL), False, x._replace(phase=RESTORED))
            yield Move(Action(Verb.UPDATE), True, x._replace(phase=UPDATED))
        elif x.phase == RESTORED:
            yield Move(Action(Verb.TAKE_AGAIN), True, x._replace(phase=RECORDED))
        else:
            yield Move(Action(Verb.RETIRE), True, x._replace(phase=IDLE))

    def _records(self, x: State) -> Iterator[AdmissionMove]:
        """Without `is_lagging` a version that is complete is published first."""
        chosen = self.policy.take(x, self.case) if self.case.is_lagging or x.steps < self.case.updates else None
        if chosen is None:
            return
        weights = x.steps // self.case.updates
        promise(all(x.alive[i].age + weights <= self.case.max_staleness for i in chosen), TOO_OLD)
        rest = tuple(group for i, group in enumerate(x.alive) if i not in chosen)
        yield Move(Action(Verb.RECORD, groups=chosen), True, x._replace(alive=rest, steps=x.steps + 1, phase=RECORDED))

    def _publications(self, x: State) -> Iterator[AdmissionMove]:
        """Any version that is whole, retired steps only; the actor may be ahead of it where it may lag."""
        retired = x.steps - (x.phase != IDLE)
        if x.phase != IDLE and not self.case.is_lagging:
            return
        for versions in range(1, retired // self.case.updates + 1):
            alive = tuple(group._replace(age=group.age + versions) for group in x.alive)
            after = x._replace(alive=alive, steps=x.steps - versions * self.case.updates)
            yield Move(Action(Verb.PUBLISH, versions), True, after)


def _group_moves(x: State) -> Iterator[AdmissionMove]:
    for i, group in enumerate(x.alive):
        before, behind = x.alive[:i], x.alive[i + 1 :]
        yield Move(Action(Verb.DROP, i), False, x._replace(alive=before + behind))
        if not group.is_terminal:
            yield Move(Action(Verb.FINISH, i), True, x._replace(alive=(*before, group._replace(is_terminal=True), *behind)))
