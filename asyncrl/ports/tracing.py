"""Spans of time for the trace."""

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self

from asyncrl.ports.values import Json

if TYPE_CHECKING:
    from types import TracebackType


class SpanKind(StrEnum):
    """What a stretch of time was spent on."""

    WAIT = "wait"
    SESSION = "session"
    TURN = "turn"  # one generate call
    TOOL = "tool"
    REWARD = "reward"
    STAGE = "stage"


class Span(Protocol):
    """A stretch of time under way: a context manager that ends when its block does, however that does. What it is inside of is
    the span it was made from."""

    @property
    def is_traced(self) -> bool:
        """False where nothing is recorded, so that facts need not be gathered."""
        ...

    def span(self, kind: SpanKind, name: str) -> "Span":
        """Begin another one inside this one."""
        ...

    def note(self, *, outcome: str = "", **facts: Json) -> None:
        """Add facts. outcome: in place of `ok`; a block that raises has the error's."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None") -> None: ...


SessionSpan = Callable[[str, int], Span]
"""(uid, session_id) -> the span of a session that begins now."""
