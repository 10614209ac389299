"""The book: every prompt that was ever admitted, and what became of it, over all lives of a run.

An account of the oracles' own: it is kept from the store's entries and the loaded weights, and asks neither admission nor ledger. A
crash takes from it what it takes from the journal, and no restart begins it anew.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from asyncrl.simulation.errors import Violation


class Fate(StrEnum):
    """What became of a prompt."""

    OPEN = "open"
    RECORDED = "recorded"  # a step is under way with it, or will be repeated
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
    """`cursor`: prompts handed out, and left out, so far."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.cursor = 0
        self.open: dict[str, Line] = {}
        """In the order of the feed."""
        self._before: list[tuple[int, str, Line | None, int]] = []
        """(entry, uid, its line before it, cursor before it) of this life."""

    def admit(self, entry: int, uid: str, number: int) -> Line:
        """Entry number `entry` of this life admitted prompt `number`."""
        if uid in self.lines:
            raise Violation("I1", f"{self.lines[uid]} was handed out again, as prompt {number}")
        if number < self.cursor:
            raise Violation("I1", f"group {uid!r} was handed out as prompt {number}, and the feed had been at {self.cursor}")
        self._before.append((entry, uid, None, self.cursor))
        line = self.lines[uid] = self.open[uid] = Line(number, uid)
        self.cursor = number + 1
        return line

    def record(self, entry: int, uid: str, step: int) -> None:
        self._change(entry, uid, Fate.OPEN, f"was recorded for step {step}", Fate.RECORDED, step=step)

    def train(self, entry: int, uid: str, step: int) -> None:
        """`step` has retired it."""
        self._change(entry, uid, Fate.RECORDED, f"was retired by step {step}", Fate.TRAINED, step=step)

    def drop(self, entry: int, uid: str, reason: str) -> None:
        self._change(entry, uid, Fate.OPEN, f"was dropped ({reason})", Fate.DROPPED, reason=reason)

    # --- lives

    def survive(self, num_entries: int) -> None:
        """The life is over, and its first `num_entries` entries are kept: what came after them never was."""
        while self._before and self._before[-1][0] > num_entries:
            _, uid, before, self.cursor = self._before.pop()
            if before is None:
                del self.lines[uid]
            else:
                self.lines[uid] = before
        self._before = []
        self._list_open()

    def restart(self, step: int, trained: Iterable[str]) -> None:
        """A life begins with the weights of `step`, which were trained on these groups. Later steps are to be repeated."""
        learned = set(trained)
        for line in self.lines.values():
            if line.uid in learned and line.fate in (Fate.RECORDED, Fate.TRAINED):
                line.fate = Fate.TRAINED  # at the latest now: a run may have ended between its step and the end of its rows
            elif line.uid in learned:
                raise Violation("I6", f"the weights of step {step} have seen {line}")
            elif line.fate is Fate.TRAINED:
                if line.step <= step:
                    raise Violation("I6", f"the weights of step {step} have not seen {line}")
                line.fate = Fate.RECORDED
        self._list_open()

    def _list_open(self) -> None:
        lines = sorted((line for line in self.lines.values() if line.fate is Fate.OPEN), key=lambda line: line.number)
        self.open = {line.uid: line for line in lines}

    # --- sight

    def num(self, fate: Fate) -> int:
        return sum(line.fate is fate for line in self.lines.values())

    def _change(
        self, entry: int, uid: str, allowed: Fate, what: str, fate: Fate, *, step: int | None = None, reason: str = ""
    ) -> None:
        line = self.lines.get(uid)
        if line is None:
            raise Violation("I1", f"group {uid!r} {what}, but the feed never handed it out")
        if line.fate is not allowed:
            raise Violation("I1", f"{line} {what} as well")
        self._before.append((entry, uid, replace(line), self.cursor))
        line.fate, line.reason = fate, reason
        line.step = line.step if step is None else step
        self.open.pop(uid, None)
