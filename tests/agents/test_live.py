"""Live: what a session is at, and what it was at when it failed."""

import pytest

from asyncrl.agents.live import Live
from asyncrl.ports import IncidentKind


def state_of(live: Live, kind: IncidentKind) -> str:
    return live.incident(kind, "session", "why").state


def test_what_failed_is_told_though_the_session_has_gone_on_to_its_end() -> None:
    live = Live("a", 0, lambda: 0.0)
    with pytest.raises(ConnectionError), live.at("turn"), live.at("tool search"):
        raise ConnectionError
    with live.at("settle"):
        assert state_of(live, IncidentKind.FAILURE) == state_of(live, IncidentKind.RETRY) == "tool search"
        assert state_of(live, IncidentKind.DEADLINE) == "settle", "a deadline is of what it is at now"


def test_a_session_that_waits_for_nobody_is_with_the_controller() -> None:
    live = Live("a", 0, lambda: 0.0)
    with live.at("generate"):
        pass
    assert state_of(live, IncidentKind.FAILURE) == "controller"
    assert live.describe() == "session 0, attempt 0: controller for 0.0 s"
