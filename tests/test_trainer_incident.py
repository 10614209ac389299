"""The record of what ends a run names its cause, not only what the trainer was doing meanwhile."""

import pytest

from asyncrl.errors import AsyncRLError, GroupFailedError, JournalWriteError, RewardError, StalledError
from asyncrl.trainer import _incident_of


@pytest.mark.parametrize(
    ("error", "doing", "kind", "what"),
    [
        (GroupFailedError("a group"), "update_actor", "failure", "group"),
        (JournalWriteError("the disk"), "update_actor", "failure", "journal"),
        (StalledError("nothing moves"), "sample", "stall", "sample"),
        (RewardError("a stage"), "update_actor", "failure", "stage"),
    ],
)
def test_the_cause_of_an_end(error: AsyncRLError, doing: str, kind: str, what: str) -> None:
    incident = _incident_of(error, doing, 3)
    assert (incident.kind, incident.what, incident.state, incident.step) == (kind, what, doing, 3)
