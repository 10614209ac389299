"""Live: what a session is at, from moment to moment, for reports of whatever stands.

Place: runner, session, SessionContext -> [live] -> GroupRunner.describe, incidents. It decides nothing.
"""

from collections.abc import Callable
from types import TracebackType

from asyncrl.ports import Incident, IncidentKind

CONTROLLER = "controller"
"""State of a session that waits for nobody."""


class Live:
    """One attempt of a session. now: seconds on the loop's clock. turn: the running one, None before the first."""

    __slots__ = ("_failed_at", "_now", "_since", "attempt", "doing", "has_ended", "session_id", "turn", "uid")

    def __init__(self, uid: str, session_id: int, now: Callable[[], float], *, attempt: int = 0) -> None:
        self.uid = uid
        self.session_id = session_id
        self.attempt = attempt
        self.turn: int | None = None
        self.doing: list[Doing] = []
        self.has_ended = False
        """Its loop and its reward have come to their end, whatever that is: no deadline can pass over them any more."""
        self._failed_at = ""
        self._now = now
        self._since = now()

    def at(self, what: str) -> "Doing":
        """A context manager: the session is at `what` as long as its block. Several at once are tools of one turn."""
        return Doing(self, what)

    def enter(self, doing: "Doing") -> None:
        doing.since = self._now()
        self.doing.append(doing)

    def leave(self, doing: "Doing", *, has_failed: bool) -> None:
        self.doing.remove(doing)
        self._since = self._now()
        if has_failed and not self._failed_at:  # the innermost is left first
            self._failed_at = doing.what

    @property
    def state(self) -> str:
        """What it has been at for the longest time."""
        return self.doing[0].what if self.doing else CONTROLLER

    def describe(self) -> str:
        """Number, attempt, turn, state and its seconds, on one line."""
        since = self.doing[0].since if self.doing else self._since
        turn = "" if self.turn is None else f", turn {self.turn}"
        return f"session {self.session_id}, attempt {self.attempt}{turn}: {self.state} for {self._now() - since:.1f} s"

    def incident(self, kind: IncidentKind, what: str, text: str, *, limit: str = "") -> Incident:
        """One of this session, now; where it has failed, `state` is what it was at when it did."""
        return Incident(
            kind=kind,
            what=what,
            text=text,
            uid=self.uid,
            session_id=self.session_id,
            attempt=self.attempt,
            turn=self.turn,
            state=self.state if kind is IncidentKind.DEADLINE else self._failed_at or self.state,
            limit=limit,
        )


class Doing:
    """Made by `Live.at`."""

    __slots__ = ("_live", "since", "what")

    def __init__(self, live: Live, what: str) -> None:
        self._live = live
        self.what = what
        self.since = 0.0

    def __enter__(self) -> None:
        self._live.enter(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.leave(self, has_failed=error is not None)
