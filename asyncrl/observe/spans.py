"""Spans: what the time of a traced session went to. An untraced one gets `NO_SPAN`, which does nothing.

lineage -> [spans] -> run_session, SessionContext; seconds are those of `world.now()`.

Invariants:
1. A span ends when its block does, with `ok`, the outcome that was noted, `cancelled`, or the name of the error.
2. When a session ends, every span inside it ends with it, as `abandoned`; a guest that goes on afterwards adds nothing.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from asyncrl.ports import Json, Span, SpanKind

OK, CANCELLED, ABANDONED = "ok", "cancelled", "abandoned"


class _NoSpan:
    """Of what nobody traces."""

    __slots__ = ()

    is_traced = False

    def span(self, kind: SpanKind, name: str) -> Span:
        return self

    def note(self, *, outcome: str = "", **facts: Json) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return


NO_SPAN: Span = _NoSpan()


def untraced(uid: str, session_id: int) -> Span:
    """The `SessionSpan` of a run without a trace."""
    return NO_SPAN


class RecordedSpan:
    """A span and, flat and in the order they began, all that began inside it. `end_s` is None until it has ended."""

    __slots__ = ("_now", "_root", "end_s", "facts", "inner", "kind", "name", "outcome", "start_s")

    is_traced = True

    def __init__(self, kind: SpanKind, name: str, now: Callable[[], float], root: "RecordedSpan | None" = None) -> None:
        self.kind = kind
        self.name = name
        self.start_s = now()
        self.end_s: float | None = None
        self.outcome = ""
        self.facts: dict[str, Json] = {}
        self.inner: list[RecordedSpan] = []
        self._now = now
        self._root = self if root is None else root

    def span(self, kind: SpanKind, name: str) -> Span:
        root = self._root
        if root.end_s is not None:
            return NO_SPAN
        made = RecordedSpan(kind, name, self._now, root)
        root.inner.append(made)
        return made

    def note(self, *, outcome: str = "", **facts: Json) -> None:
        if self.end_s is None:
            self.outcome = outcome or self.outcome
            self.facts.update(facts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(_outcome_of(error) or self.outcome or OK)

    def _end(self, outcome: str) -> None:
        if self.end_s is not None:
            return
        self.end_s = self._now()
        self.outcome = outcome
        for span in self.inner:
            span._end(ABANDONED)


def _outcome_of(error: BaseException | None) -> str:
    if error is None:
        return ""
    return CANCELLED if isinstance(error, asyncio.CancelledError) else type(error).__name__
