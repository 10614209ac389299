"""Memory: what the oracles know of the lives before. The product knows of them only what its journal and a checkpoint say.

oracles of one life -> [Memory] -> oracles of the next
"""

from dataclasses import dataclass, field

from asyncrl.ports import Generation
from asyncrl.simulation.oracles.book import Book


@dataclass(frozen=True, slots=True)
class Call:
    """One generate call of a session: which turn, where in the turn it began, what it was asked with, what came back."""

    turn: int
    position: int
    prompt_ids: list[int]
    answer: Generation


Position = tuple[int, int, int]
"""(session, turn, position in the turn)."""


SessionAttempt = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Memory:
    """Of one run."""

    book: Book = field(default_factory=Book)
    keys: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Step -> the keys that weights have learned from."""
    calls: dict[str, dict[SessionAttempt, list[Call]]] = field(default_factory=dict)
    """uid -> (session, attempt) -> its calls so far. A crash may take a retry back, so those of lower attempts stay."""
    seeds: dict[str, dict[Position, int]] = field(default_factory=dict)
    """uid -> call -> the seed that it was asked with first."""
    measured: set[int] = field(default_factory=set)
    """Versions whose evaluation was written down."""
    num_late: int = 0
    """Evaluations that ran into their deadline."""
    _ended: list[tuple[int, str]] = field(default_factory=list)
    """(entry of this life, uid) of groups that have ended."""

    def end_group(self, entry: int, uid: str) -> None:
        """With this entry nobody asks for the group any more, once no crash can take it."""
        self._ended.append((entry, uid))

    def sweep(self, num_kept: int) -> None:
        """The first `num_kept` entries of this life stay, whatever comes."""
        for entry, uid in self._ended:
            if entry <= num_kept:
                self.calls.pop(uid, None)
                self.seeds.pop(uid, None)
        self._ended = [(entry, uid) for entry, uid in self._ended if entry > num_kept]

    def survive(self, num_entries: int) -> None:
        """The life is over, and its first `num_entries` entries are kept."""
        self.sweep(num_entries)
        self._ended = []
        self.book.survive(num_entries)
