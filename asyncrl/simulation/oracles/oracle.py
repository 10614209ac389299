"""What an oracle is: it hears what happens in a life, and raises Violation for what must not be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.ports import GenerateRequest, Generation
from asyncrl.simulation.edges.engine import SimEngine
from asyncrl.simulation.edges.policy import Lineage
from asyncrl.simulation.errors import Violation
from asyncrl.simulation.oracles.book import Line
from asyncrl.simulation.oracles.ground import Ground, Task
from asyncrl.simulation.oracles.shadow import Changes

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True)
class Update:
    """The actor begins to learn: from these rows, with weights that have seen `lineage`; `num_synced`, `num_acked`: entries that
    the journal had kept by then."""

    columns: "TensorDict"
    group_ids: Sequence[str | None]
    lineage: Lineage
    num_synced: int
    num_acked: int


class Oracle:
    """Hears nothing. Each method is called in the order of events, when the turn in which they happened is over."""

    name = ""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    def fed(self, lines: Sequence[Line]) -> None:
        """These prompts were admitted."""

    def begin(self) -> None:
        """The life begins; the shadow has what the journal kept, and what opening the controller wrote."""

    def begun(self, task: Task, name: str) -> None:
        """A task was made."""

    def ended(self, task: Task, name: str) -> None:
        """A task has ended."""

    def entry(self, changes: Changes) -> None:
        """The store wrote an entry; the shadow has it."""

    def asked(self, request: GenerateRequest) -> None:
        """A session asked an engine."""

    def taken(self, request: GenerateRequest, engine: SimEngine) -> str:
        """An engine has it. Told at once, in the middle of a turn: returns what is wrong, for `strange` to tell when it is over."""
        return ""

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        """An engine answered."""

    def given(self, request: GenerateRequest, generation: Generation) -> str:
        """`generated`, but told at once, as for `taken`."""
        return ""

    def failed(self, request: GenerateRequest, error: BaseException) -> str:
        """It ended without an answer. As for `taken`."""
        return ""

    def strange(self, text: str) -> None:
        """What was wrong in the middle of the turn."""

    def measured(self, step: int, version: int) -> None:
        """The numbers of an evaluation were written down."""

    def saving(self, step: int) -> None:
        """A checkpoint of `step` is asked for."""

    def updated(self, update: Update) -> None:
        """The actor began to learn."""

    def turn(self) -> None:
        """A turn is over in which something was told, or a version, a checkpoint or admission changed."""

    def due(self) -> float:
        """The next moment that it waits for: `turn` is asked after it, whatever happens."""
        return math.inf

    def end(self) -> None:
        """The controller has ended by itself, and everything is closed."""

    def require(self, holds: bool, text: str) -> None:
        """Raises Violation. For places where the text costs nothing to make."""
        if not holds:
            self.fail(text)

    def fail(self, text: str) -> None:
        raise Violation(self.name, text)
