"""Searches a model for a broken promise: every state that can be reached, or one random history.

model (moves, audit, normal) -> [explore | walk] -> Found

A model is a set of states and the moves between them; an adversary picks the move. `explore` follows every choice, so that with a
finite number of states there is no limit to the length of a history. `walk` follows one choice at a time, for cases that are too
large. Nothing here knows what the states mean.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

ENDLESS = "it never ends"

S = TypeVar("S")
A = TypeVar("A")


class Broken(Exception):
    """A promise does not hold in some state, or during some move. Its text is the promise's name."""


def promise(holds: bool, name: str) -> None:
    """An oracle. Raises Broken."""
    if not holds:
        raise Broken(name)


class Move(NamedTuple, Generic[A, S]):
    """One atomic action. `helps`: the system's own doing, which brings it nearer to its end; the others are the adversary's."""

    action: A
    helps: bool
    after: S


class Model(Protocol[A, S]):
    """What can be searched. States are hashable, and equal when their futures are."""

    @property
    def start(self) -> S: ...

    def moves(self, state: S) -> Iterator[Move[A, S]]:
        """Every move from here. Raises Broken when one of them breaks a promise."""
        ...

    def audit(self, state: S, *, can_help: bool) -> None:
        """What must hold of a state in itself; `can_help`: at least one of its moves helps. Raises Broken."""
        ...

    def normal(self, state: S) -> S:
        """The same state with the smallest numbers: what makes the number of states finite."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`broken`: the promise, or "". `way`: the actions that lead to it. `is_whole`: nothing was left out.

    `actions`: all that were taken anywhere, so that a test can see that nothing stayed impossible.
    """

    num_states: int
    actions: frozenset[str] = frozenset()
    broken: str = ""
    way: tuple[object, ...] = ()
    is_whole: bool = True


def explore(model: Model[A, S], limit: int | None = None) -> Found:
    """Breadth first over all choices; ends at the first broken promise, by a shortest way, or after `limit` states.

    States are kept as 64-bit hashes: of three million, two are taken for one with a chance of one in four millions.
    """
    start = model.normal(model.start)
    parents: dict[int, tuple[int, A | None]] = {hash(start): (0, None)}
    queue, actions = deque([start]), set[A]()
    while queue and (limit is None or len(parents) < limit):
        state = queue.popleft()
        key, can_help = hash(state), False
        try:
            for action, helps, after in model.moves(state):
                can_help |= helps
                actions.add(action)
                if after is state:  # refused
                    continue
                normal = model.normal(after)
                if (seen := hash(normal)) not in parents:
                    parents[seen] = (key, action)
                    queue.append(normal)
            model.audit(state, can_help=can_help)
        except Broken as broken:
            return Found(num_states=len(parents), broken=str(broken), way=_way(parents, key), is_whole=False)
    return Found(num_states=len(parents), actions=frozenset(map(str, actions)), is_whole=not queue)


def _way(parents: Mapping[int, tuple[int, A | None]], key: int) -> tuple[A, ...]:
    actions: list[A] = []
    parent, action = parents[key]
    while action is not None:
        actions.append(action)
        parent, action = parents[parent]
    return tuple(reversed(actions))


def reached(model: Model[A, S]) -> Iterator[tuple[S, tuple[A, ...]]]:
    """Every state of a small model with a shortest way to it. Raises Broken."""
    start = model.normal(model.start)
    queue: deque[tuple[S, tuple[A, ...]]] = deque([(start, ())])
    seen = {start}
    while queue:
        state, way = queue.popleft()
        yield state, way
        for action, _, after in model.moves(state):
            normal = model.normal(after)
            if normal not in seen:
                seen.add(normal)
                queue.append((normal, (*way, action)))


def walk(model: Model[A, S], *, seed: int, length: int, odds: Callable[[A], float], last: A) -> str:
    """One random history: the broken promise, or "".

    After `length` moves the adversary takes `last` (the feed ends) as soon as it can, and nothing more. What is under way must then
    come to its end by the moves that help, in whatever order they are picked, within another `length` moves.
    odds: how often the adversary's action is picked, beside 1.0 for each move that helps; 0.0: never before `length`.
    """
    rng, state = random.Random(seed), model.normal(model.start)
    try:
        for _ in range(length):
            moves = _audited(model, state)
            weights = [1.0 if move.helps else odds(move.action) for move in moves]
            state = model.normal(rng.choices(moves, weights)[0].after)
        for _ in range(length):
            moves = _audited(model, state)
            moves = [move for move in moves if move.action == last] or [move for move in moves if move.helps]
            if not moves:
                return ""
            state = model.normal(rng.choice(moves).after)
    except Broken as broken:
        return str(broken)
    return ENDLESS


def _audited(model: Model[A, S], state: S) -> list[Move[A, S]]:
    moves = list(model.moves(state))
    model.audit(state, can_help=any(move.helps for move in moves))
    return moves
