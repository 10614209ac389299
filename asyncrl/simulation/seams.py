"""Seams: where faults and observers meet the edges. Each edge asks its seam at the moments in which something may go wrong, and
tells it what it was busy with. This base disturbs nothing: the world as it should be.

edges -> [Seams] <- faults, timeline, oracles
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from asyncrl.ports import GenerateRequest, Generation

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncrl.simulation.edges.engine import SimEngine


class SavePart(StrEnum):
    """How far a checkpoint is. Only one that is done is there."""

    BEGUN = "before its first byte"
    HALF = "half written"
    WRITTEN = "written, and not DONE"
    DONE = "DONE, and nothing pruned or purged"


class EngineDeath(StrEnum):
    """How an engine dies."""

    AT_ONCE = "at once"
    AND_AT_START = "at once, and the next start fails"
    WITH_WEIGHTS = "in the middle of taking the next weights"


class Observer(Protocol):
    """Somebody who wants to know what the edges do."""

    def busy(self, who: str, what: str, start_s: float, end_s: float) -> None:
        """Something works from `start_s` to `end_s`, which may be still to come."""
        ...

    def answered(self, request_id: str, generation: Generation, num_tokens: int, slot: tuple[float, float]) -> None:
        """An engine has an answer, of `num_tokens` of the model; its request had a slot from when to when."""
        ...


class Witness(Observer, Protocol):
    """An observer who asks for the things themselves."""

    def asked(self, request: GenerateRequest) -> None:
        """A session asks an engine."""
        ...

    def taken(self, request: GenerateRequest, engine: "SimEngine") -> None:
        """An engine has the request now."""
        ...

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        """An engine gives this answer."""
        ...

    def failed(self, request: GenerateRequest, error: BaseException) -> None:
        """A request to the engines of training ends without an answer."""
        ...

    def save_begins(self, step: int) -> None:
        """A checkpoint is asked for."""
        ...

    def updated(self, columns: "TensorDict", group_ids: Sequence[str | None]) -> None:
        """The actor begins to learn from these rows."""
        ...


class Seams:
    """One a life of the controller; a fault plan overrides what it disturbs."""

    def __init__(self, observers: Sequence[Observer] = (), witness: Witness | None = None) -> None:
        self._observers = (*observers,) if witness is None else (*observers, witness)
        self._witness = witness

    # --- what may go wrong

    def slowed(self, edge: str, seconds: float) -> float:
        """What `seconds` of an edge's work (`tool`, `generate`, `reward`, `commit`) become: a straggler takes longer."""
        return seconds

    async def tool(self, name: str) -> None:
        """Before an async tool works: may raise, or never return."""

    def sync_tool(self, name: str) -> float:
        """Before a sync tool works, in its thread: the seconds that it hangs; may raise."""
        return 0.0

    async def reward(self) -> None:
        """Before a reward is computed: may raise, or never return."""

    def engine_dies(self) -> EngineDeath | None:
        """At the begin of a generate call: does its engine die, and how?"""
        return None

    def hangs(self, request_id: str) -> float | None:
        """At the begin of a generate call: None, or it is never answered, and its engine makes no step for so many seconds."""
        return None

    def journal_fails(self) -> bool:
        """At the end of a commit: did the disk refuse it?"""
        return False

    async def site(self, name: str) -> None:
        """A place in the controller where it may be held up (`World.site`)."""

    def saving(self, part: SavePart) -> None:
        """A checkpoint has come so far."""

    # --- what happens

    def busy(self, who: str, what: str, start_s: float, end_s: float) -> None:
        """As an observer is told."""
        for observer in self._observers:
            observer.busy(who, what, start_s, end_s)

    def answered(self, request_id: str, generation: Generation, num_tokens: int, slot: tuple[float, float]) -> None:
        """As an observer is told."""
        for observer in self._observers:
            observer.answered(request_id, generation, num_tokens, slot)

    def save_begins(self, step: int) -> None:
        """As a witness is told."""
        if self._witness is not None:
            self._witness.save_begins(step)

    def asked(self, request: GenerateRequest) -> None:
        """As a witness is told."""
        if self._witness is not None:
            self._witness.asked(request)

    def taken(self, request: GenerateRequest, engine: "SimEngine") -> None:
        """As a witness is told."""
        if self._witness is not None:
            self._witness.taken(request, engine)

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        """As a witness is told."""
        if self._witness is not None:
            self._witness.generated(request, generation)

    def failed(self, request: GenerateRequest, error: BaseException) -> None:
        """As a witness is told."""
        if self._witness is not None:
            self._witness.failed(request, error)

    def updated(self, columns: "TensorDict", group_ids: Sequence[str | None]) -> None:
        """As a witness is told."""
        if self._witness is not None:
            self._witness.updated(columns, group_ids)
