"""Await coverage: which lines that wait have met a cancellation and an error.

resumes (frames of each fault) -> [AwaitCoverage] -> report

A line counts once, whatever waits in it. It has met what was thrown while it waited, and what went through it on its way to the end
of a task. An `async with` or `async for` has also met what was thrown inside its block, as that leaves through it.
"""

import ast
import asyncio
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from asyncrl.simulation.faults.ends import chain_of
from asyncrl.simulation.faults.kinds import FaultKind

PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AwaitLine:
    """A line that waits: `file` within the package, and its text."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Lines `first` to `last` are those of the wait; up to `end`, its block."""

    first: int
    last: int
    end: int


class Seen(NamedTuple):
    """A resume: its number, the task's name, and the lines in which it waited."""

    number: int
    task: str
    lines: frozenset[AwaitLine]


class AwaitCoverage:
    """`files`: sources whose waits are asked about, relative to the package."""

    def __init__(self, files: Sequence[str]) -> None:
        self._places: dict[str, list[_Place]] = {}
        self._lines: dict[tuple[str, int], AwaitLine] = {}
        self._names: dict[str, str] = {}
        self._found: dict[tuple[CodeType, int], tuple[AwaitLine, ...]] = {}
        for file in files:
            self._read(file)
        self._met: dict[FaultKind, set[AwaitLine]] = {FaultKind.AWAIT_CANCEL: set(), FaultKind.AWAIT_ERROR: set()}

        self.seen: list[Seen] | None = None
        """Every resume of a run; None: nobody asks."""

    def _read(self, file: str) -> None:
        path = (PACKAGE / file).resolve()
        source = path.read_text(encoding="utf-8")
        self._names[str(path)] = file
        texts = source.splitlines()
        places = sorted(_places(ast.parse(source)), key=lambda place: (place.first, place.last))
        self._places[file] = places
        for place in places:
            key = (file, place.first)
            self._lines.setdefault(key, AwaitLine(file=file, line=place.first, text=texts[place.first - 1].strip()))

    @property
    def lines(self) -> list[AwaitLine]:
        """All that there are, by file and line."""
        return sorted(self._lines.values())

    def missing(self, kind: FaultKind) -> list[AwaitLine]:
        """Lines that have not met it."""
        return [line for line in self.lines if line not in self._met[kind]]

    # --- what happens

    def resumed(self, number: int, task: str, frames: Sequence[FrameType]) -> None:
        """The `number`-th resume is that of this task, which waits in these frames."""
        if self.seen is not None:
            lines = frozenset(line for frame in frames for line in self._lines_at(frame.f_code, frame.f_lineno))
            self.seen.append(Seen(number, task, lines))

    def met(self, kind: FaultKind, frames: Sequence[FrameType]) -> None:
        """A fault was thrown into a task that waits in these frames."""
        if kind in self._met:
            for frame in frames:
                self._met[kind].update(self._lines_at(frame.f_code, frame.f_lineno))

    def failed(self, error: BaseException) -> None:
        """A task ends with `error`; it, and what it came from, went through lines of its own."""
        kind = FaultKind.AWAIT_CANCEL if isinstance(error, asyncio.CancelledError) else FaultKind.AWAIT_ERROR
        for each in chain_of(error):
            for frame, line in traceback.walk_tb(each.__traceback__):
                self._met[kind].update(self._lines_at(frame.f_code, line))

    def _lines_at(self, code: CodeType, line: int) -> tuple[AwaitLine, ...]:
        found = self._found.get((code, line))
        if found is None:
            found = self._found[code, line] = tuple(self._look_up(code, line))
        return found

    def _look_up(self, code: CodeType, line: int) -> Iterator[AwaitLine]:
        file = self._named(code.co_filename)
        for place in self._places.get(file, ()):
            # In a block, but not in a function of its own there.
            if place.first <= line <= place.end and (line <= place.last or code.co_firstlineno <= place.first):
                yield self._lines[(file, place.first)]

    def _named(self, path: str) -> str:
        """A file may be known by the name of a link to its folder."""
        if path not in self._names:
            self._names[path] = self._names.get(str(Path(path).resolve()), "")
        return self._names[path]


def _places(tree: ast.AST) -> Iterator[_Place]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Await):
            last = node.end_lineno or node.lineno
            yield _Place(first=node.lineno, last=last, end=last)
        elif isinstance(node, ast.AsyncWith):
            last = max(item.context_expr.end_lineno or node.lineno for item in node.items)
            yield _Place(first=node.lineno, last=last, end=node.end_lineno or last)
        elif isinstance(node, ast.AsyncFor):
            last = node.iter.end_lineno or node.lineno
            yield _Place(first=node.lineno, last=last, end=node.end_lineno or last)


def report(coverage: AwaitCoverage, *, but: Mapping[FaultKind, Sequence[str]] | None = None) -> str:
    """`coverage of awaits: n of m lines met a cancel, n of m an error`, and the missing ones. `but`: by kind, texts of lines that
    cannot meet one, and are left out."""
    words = {FaultKind.AWAIT_CANCEL: ("lines met a cancel", "cancel"), FaultKind.AWAIT_ERROR: ("an error", "error")}
    told, counts = [], []
    for kind, (met, word) in words.items():
        texts = tuple((but or {}).get(kind, ()))
        asked = [line for line in coverage.lines if not any(text in line.text for text in texts)]
        missing = [line for line in coverage.missing(kind) if line in asked]
        counts.append(f"{len(asked) - len(missing)} of {len(asked)} {met}")
        told += [f"\n  no {word}: {line}" for line in missing]
    return f"coverage of awaits: {', '.join(counts)}{''.join(told)}"
