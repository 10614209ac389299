"""Oracles of one run: fed by what the store, the engines and the actor do, asked after every turn of the loop.

begin_run, and of each life: tap (the store's journal is opened), begin_life (the rooms are open), after_turn ..., end_life; end_run
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.journal.port import Journal
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.simulation.machine import Machine
from asyncrl.simulation.world import SimWorld
from asyncrl.trainer import Trainer
from asyncrl.wiring import Edges

if TYPE_CHECKING:
    from tensordict import TensorDict


class Oracles:
    """An Observer too: seams tell it what engines and the actor do. Every method but the observer's may raise Violation."""

    def begin_run(self, machine: Machine, log: EventLog) -> None:
        """Once, before the first life."""

    def tap(self, journal: Journal | None) -> Journal | None:
        """The journal that the store of this life is to be given in place of `journal` (None: it has none)."""
        return journal

    def begin_life(self, trainer: Trainer, edges: Edges, loop: VirtualLoop, world: SimWorld) -> None:
        """The controller is open; nothing has been admitted."""

    def after_turn(self) -> None:
        """After every turn of the loop, also before `begin_life` and while the rooms are closed. Raises Violation."""

    def end_life(self, error: BaseException | None, *, crashed: bool) -> None:
        """The life is over, and the loop not closed yet: everything of it has ended, or it has crashed. Raises Violation."""

    def end_run(self) -> None:
        """The run has reached its last step. Raises Violation."""

    # --- what seams tell

    def busy(self, who: str, what: str, start_s: float, end_s: float) -> None:
        """Nothing depends on it."""

    def token(self, request_id: str, ids: list[int]) -> None:
        """`generated` has more."""

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        """An engine's answer, as it leaves the engine."""

    def updated(self, columns: "TensorDict", group_ids: Sequence[str | None]) -> None:
        """The actor begins to learn from these rows."""
