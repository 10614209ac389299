"""What went wrong and was dealt with: a deadline, a retry, a loss. Reports for whoever watches the run; nothing acts on them."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class IncidentKind(StrEnum):
    """What happened."""

    DEADLINE = "deadline"
    """Something took longer than its limit."""
    RETRY = "retry"
    """It failed and is tried again."""
    FAILURE = "failure"
    """It failed for good."""
    DROP = "drop"
    """A group left without being trained."""
    QUARANTINE = "quarantine"
    """A dataset row is left out from now on."""
    LAG = "lag"
    """The event loop stood still."""
    STALL = "stall"
    """Nothing can go on, and nothing is in sight that would change it."""
    DAMAGE = "damage"
    """A file cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One of them. `None` and "": does not apply."""

    kind: IncidentKind
    what: str
    """generate, tool, reward, session, group, sample, engine, publish, stage, evaluation, journal, checkpoint, loop or row."""
    text: str
    """One line for the user: what, how long, why."""
    uid: str = ""
    session_id: int | None = None
    attempt: int | None = None
    turn: int | None = None
    state: str = ""
    """What a session was doing."""
    step: int | None = None
    limit: str = ""
    """Configuration key of the limit that was reached."""


Report = Callable[[Incident], None]
"""Takes an incident at once; never waits, never raises. On the loop's thread only."""


def ignore_incident(incident: Incident) -> None:
    """Where nobody watches."""
