"""The book: every prompt that the feed ever handed out, and what became of it, over all lives of a run.

An account of the oracles' own: it is kept from the feed's cursor, the store's entries and the actor's updates, and asks neither
admission nor ledger.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.simulation.errors import Violation
from asyncrl.trainer import Border


class Fate(StrEnum):
    """What became of a prompt."""

    OPEN = "open"
    RECORDED = "recorded"  # a step is under way with it
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(slots=True)
class Line:
    """One prompt. `number`: of the feed; `step`: that trained it, or is about to; `reason`: why it was dropped."""

    number: int
    uid: str
    fate: Fate = Fate.OPEN
    step: int = 0
    reason: str = ""

    def __str__(self) -> str:
        told = {Fate.RECORDED: f" for step {self.step}", Fate.TRAINED: f" by step {self.step}", Fate.DROPPED: f" ({self.reason})"}
        return f"group {self.uid!r} (prompt {self.number}) {self.fate}{told.get(self.fate, '')}"


class Book:
    """`cursor`: prompts handed out; `num_dropped`: in this life; `ended`: groups that are over in this life."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.cursor = 0
        self.num_dropped = 0
        self.open: dict[str, Line] = {}
        """In the order of the feed."""

    def feed(self, cursor: int, uid_of: Callable[[int], str]) -> list[Line]:
        """The feed's cursor is at `cursor` now. Returns the new lines."""
        new = [Line(number, uid_of(number)) for number in range(self.cursor, cursor)]
        for line in new:
            if line.uid in self.lines:
                raise Violation("I1", f"{self.lines[line.uid]} was handed out again, as prompt {line.number}")
            self.lines[line.uid] = self.open[line.uid] = line
        self.cursor = cursor
        return new

    def record(self, uid: str, step: int) -> None:
        line = self._change(uid, Fate.OPEN, f"was recorded for step {step}")
        line.fate, line.step = Fate.RECORDED, step
        del self.open[uid]

    def train(self, uid: str, step: int) -> None:
        """`step` has retired it."""
        line = self._change(uid, Fate.RECORDED, f"was retired by step {step}")
        line.fate = Fate.TRAINED

    def drop(self, uid: str, reason: str) -> None:
        line = self._change(uid, Fate.OPEN, f"was dropped ({reason})")
        line.fate, line.reason = Fate.DROPPED, reason
        del self.open[uid]
        self.num_dropped += 1

    def restart(self, border: Border, trained: Iterable[str]) -> None:
        """A life begins at `border` with weights that were trained on these groups: what else was under way is dropped, and what
        the feed will hand out again never was."""
        learned = set(trained)
        for line in list(self.lines.values()):
            if line.number >= border.cursor:
                if line.uid in learned:
                    raise Violation("I6", f"{line} is in the weights of step {border.step}, whose feed is at {border.cursor}")
                del self.lines[line.uid]
            elif line.uid in learned:
                line.fate = Fate.TRAINED  # at the latest now: a run may have ended between its step and the end of its rows
            elif line.fate is not Fate.DROPPED:
                line.fate, line.reason = Fate.DROPPED, "restart"
        self.open = {}
        self.cursor = border.cursor
        self.num_dropped = 0

    def _change(self, uid: str, allowed: Fate, what: str) -> Line:
        line = self.lines.get(uid)
        if line is None:
            raise Violation("I1", f"group {uid!r} {what}, but the feed never handed it out")
        if line.fate is not allowed:
            raise Violation("I1", f"{line} {what} as well")
        return line
