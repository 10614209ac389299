"""Seams: where faults and observers meet the edges. Each edge asks its seam at the moments in which something may go wrong, and
tells it what it was busy with. This base does nothing: the world as it should be.

edges -> [Seams] <- faults, timeline
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.ports import GenerateRequest, Generation

if TYPE_CHECKING:
    from tensordict import TensorDict


class Seams:
    """One a life of the controller; a fault plan overrides what it disturbs."""

    def slowed(self, edge: str, seconds: float) -> float:
        """What `seconds` of an edge's work (`tool`, `generate`, `reward`, `commit`) become: a straggler takes longer."""
        return seconds

    async def tool(self, name: str) -> None:
        """Before an async tool works: may raise, or never return."""

    async def reward(self) -> None:
        """Before a reward is computed: may raise, or never return."""

    def engine_dies(self) -> bool:
        """At the begin of a generate call: does its engine die now?"""
        return False

    def journal_fails(self) -> bool:
        """At the end of a commit: did the disk refuse it?"""
        return False

    async def site(self, name: str) -> None:
        """A place in the controller where it may be held up (`World.site`)."""

    def busy(self, who: str, what: str, start_s: float, end_s: float) -> None:
        """Something worked from `start_s` to `end_s`: for the timeline and the sums of a report."""

    def token(self, request_id: str, ids: list[int]) -> None:
        """An engine gave these ids as the answer of a request."""

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        """An engine gives this answer."""

    def updated(self, columns: "TensorDict", group_ids: Sequence[str | None]) -> None:
        """The actor begins to learn from these rows."""
