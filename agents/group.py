"""Group: what the sessions of one prompt share while the runner has it.

Place: runner -> [group] -> TransferQueue (the prompt's last tag).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.agents.live import Live
from asyncrl.agents.rows import Rows
from asyncrl.agents.session import SessionFailure
from asyncrl.fields import Tag
from asyncrl.keys import GroupLease, SessionLease
from asyncrl.ports import FailureClass, GroupStatus, Prompt

CANCELLED_FROM_INSIDE = SessionFailure(
    kind=FailureClass.INFRA, error="CancelledError", message="the session was cancelled from inside"
)
NO_ROWS = Rows(keys=[], fields={}, tags=[])
"""Of a session that failed."""


@dataclass(slots=True, kw_only=True)
class Group:
    """One group under way. failures: by session. told_failure: the reason in its prompt's tag before a restart."""

    prompt: Prompt
    lease: GroupLease
    size: int
    resumed: Sequence[SessionLease] = ()
    """Sessions that go on after a restart."""
    prompt_ids: tuple[int, ...] = ()
    baseline: "asyncio.Task[float | SessionFailure] | None" = None
    baseline_failure: SessionFailure | None = None
    num_settled: int = 0
    is_settled: bool = False
    is_late: bool = False
    """agent.group_timeout_s has passed."""
    told_failure: str = ""
    failures: dict[int, SessionFailure] = field(default_factory=dict)
    live: dict[int, Live] = field(default_factory=dict)
    """Sessions that have begun and not settled; the greedy one has the number after the last."""

    @property
    def failure(self) -> SessionFailure | str | None:
        """The first one, in the order of the sessions; one of before a restart comes first."""
        return self.told_failure or (self.failures[min(self.failures)] if self.failures else None)

    def describe(self) -> str:
        """What each live session is at."""
        return "; ".join(live.describe() for _, live in sorted(self.live.items())) or "no session is under way"


async def baseline_of(group: Group) -> "float | SessionFailure | None":
    """The score of the group's greedy session, once it is there; bounded by its deadlines. None: there is none."""
    if group.baseline is None:
        return None
    await asyncio.wait([group.baseline])  # not the task itself: whoever is cancelled here must not cancel it for the others
    found = CANCELLED_FROM_INSIDE if group.baseline.cancelled() else group.baseline.result()
    if isinstance(found, SessionFailure):
        group.baseline_failure = found
    return found


def last_tag(failure: SessionFailure | str | None) -> Tag:
    """Of a prompt whose group has ended."""
    return {"status": GroupStatus.FINISHED} if failure is None else {"status": GroupStatus.FAILURE, **failure_tag(failure)}


def failure_tag(failure: SessionFailure | str) -> Tag:
    """Of a prompt one of whose sessions has failed: a restart finds the reason there."""
    return {"failure": str(failure)}
