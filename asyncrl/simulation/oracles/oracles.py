"""Oracles of one run: fed by what the store, the engines and the actor do, asked after every turn of the loop.

begin_run, and of each life: tap (the store's journal is opened), begin_life (the rooms are open), after_turn ..., end_life; end_run

What happens in a turn is noted and looked at when the turn is over: a Violation raised inside the controller would be its to
catch. A turn in which nothing of interest happened costs a few comparisons.
"""

import math
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

from asyncrl.journal.port import Journal
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.simulation.errors import Violation
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.handles import SimTask
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.simulation.machine import Machine
from asyncrl.simulation.oracles.agreement import Agreement, Forgotten
from asyncrl.simulation.oracles.book import Book
from asyncrl.simulation.oracles.capacity import Emptied, Places
from asyncrl.simulation.oracles.conservation import Conservation
from asyncrl.simulation.oracles.consumed import Fresh
from asyncrl.simulation.oracles.deadlines import Deadlines, Progress
from asyncrl.simulation.oracles.fencing import Fencing, Once
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.lineage import SameRows, TrainedOnce, WholeGroups
from asyncrl.simulation.oracles.living import Living
from asyncrl.simulation.oracles.oracle import Oracle, Update
from asyncrl.simulation.oracles.shadow import Shadow
from asyncrl.simulation.oracles.status import Status
from asyncrl.simulation.oracles.stream import Tap, Written
from asyncrl.simulation.oracles.tokens import TokenInTokenOut
from asyncrl.simulation.world import SimWorld
from asyncrl.trainer import Trainer
from asyncrl.wiring import Edges

if TYPE_CHECKING:
    from tensordict import TensorDict

# Conservation before lineage: it keeps the book. Living first: it keeps the tasks.
ORACLES: tuple[type[Oracle], ...] = (
    Living,
    Fencing,
    Status,
    Once,
    WholeGroups,
    Conservation,
    TrainedOnce,
    SameRows,
    Fresh,
    TokenInTokenOut,
    Places,
    Deadlines,
    Progress,
    Agreement,
    Forgotten,
    Emptied,
)
"""In the order in which they are asked."""

Note = tuple[str, tuple[Any, ...]]
"""What happened, and with what."""


class Oracles:
    """An Observer too: seams tell it what engines and the actor do. Every method but the observer's may raise Violation."""

    def __init__(self) -> None:
        self._book = Book()
        self._machine: Machine | None = None
        self._tap: Tap | None = None
        self._notes: list[Note] = []
        self._ground: Ground | None = None
        self._hearing: dict[str, list[Callable[..., Any]]] = {}
        self._seen: tuple[object, ...] = ()
        self._due = 0.0

    def begin_run(self, machine: Machine, log: EventLog) -> None:
        """Once, before the first life."""
        self._machine = machine

    # --- a life

    def tap(self, journal: Journal | None) -> Journal:
        """The journal that the store of this life is to be given in place of `journal` (None: it has none)."""
        assert self._machine is not None
        self._notes = []
        self._ground = None
        self._tap = Tap(journal, lambda written: self._notes.append(("entry", (written,))))
        return self._tap

    def begin_life(self, trainer: Trainer, edges: Edges, loop: VirtualLoop, world: SimWorld) -> None:
        """The controller is open; nothing has been admitted."""
        assert self._machine is not None
        assert self._tap is not None
        shadow = self._at_border(trainer)
        ground = self._ground = Ground(
            machine=self._machine,
            run=trainer.run,
            trainer=trainer,
            edges=edges,
            loop=loop,
            world=world,
            shadow=shadow,
            book=self._book,
        )
        loop.begun, loop.ended = [], []
        self._seen, self._due = (), 0.0
        oracles = [kind(ground) for kind in ORACLES]
        names = ("fed", "begun", "ended", "entry", "generated", "updated", "busy_until", "turn", "due", "end")
        self._hearing = {name: [getattr(oracle, name) for oracle in oracles if _hears(oracle, name)] for name in names}

    def _at_border(self, trainer: Trainer) -> Shadow:
        """What the store and the book hold when the life begins: what the journal gave back, and what going on from there wrote."""
        assert self._tap is not None
        shadow = Shadow(self._tap.found)
        for _, (written,) in self._notes:
            shadow.apply(written.entry, written.number)
        self._notes = []
        policy = trainer.actor
        self._book.restart(trainer.border, (uid for step in getattr(policy, "lineage", ()) for uid in step))
        if shadow.num_open != shadow.num_recorded or shadow.groups:
            counted = f"the ledger has {shadow.num_open} open groups, {shadow.num_recorded} in records"
            left = f"the store has keys of {sorted(shadow.groups)[:4]}"
            raise Violation("I1", f"at the border of step {trainer.border.step} nothing is under way, but {counted}, and {left}")
        return shadow

    def after_turn(self) -> None:
        """After every turn of the loop, also before `begin_life` and while the rooms are closed. Raises Violation."""
        ground = self._ground
        if ground is None:
            return
        loop, cursor = ground.loop, ground.feed._cursor
        # A save makes a new list of checkpoints, a notification of admission's a new event.
        seen = (ground.engines.version, ground.changed._next, ground.machine.checkpoints, cursor)
        if not (self._notes or loop.begun or loop.ended) and loop._now < self._due and all(map(is_, seen, self._seen)):
            return
        self._seen = seen
        self._tell_tasks("begun", loop.begun)
        if cursor != self._book.cursor:
            lines = self._book.feed(cursor, ground.world.uid)
            for hear in self._hearing["fed"]:
                hear(lines)
        if self._notes:
            self._tell_notes(ground)
        self._tell_tasks("ended", loop.ended)
        for hear in self._hearing["turn"]:
            hear()
        self._due = min((due() for due in self._hearing["due"]), default=math.inf)

    def _tell_tasks(self, what: str, tasks: list[SimTask[Any]] | None) -> None:
        if not tasks:
            return
        told = list(tasks)
        tasks.clear()
        for task in told:
            name = task.get_name()
            for hear in self._hearing[what]:
                hear(task, name)

    def _tell_notes(self, ground: Ground) -> None:
        notes, self._notes = self._notes, []
        for what, arguments in notes:
            if what == "entry":
                written: Written = arguments[0]
                arguments = (ground.shadow.apply(written.entry, written.number),)
            for hear in self._hearing[what]:
                hear(*arguments)

    def end_life(self, error: BaseException | None, *, crashed: bool) -> None:
        """The life is over, and the loop not closed yet: everything of it has ended, or it has crashed. Raises Violation."""
        ground, self._ground = self._ground, None
        if ground is None:
            return
        ground.loop.begun = ground.loop.ended = None
        self._tell_notes(ground)
        if not crashed:
            for hear in self._hearing["end"]:
                hear()

    def end_run(self) -> None:
        """The run has reached its last step. Raises Violation."""

    # --- what seams tell

    def busy(self, who: str, what: str, start_s: float, end_s: float) -> None:
        for hear in self._hearing.get("busy_until", ()):
            hear(end_s)

    def answered(self, request_id: str, generation: Generation, num_tokens: int, slot: tuple[float, float]) -> None:
        """`generated` has more."""

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        """An engine's answer, as it leaves the engine."""
        self._notes.append(("generated", (request, generation)))

    def updated(self, columns: "TensorDict", group_ids: Sequence[str | None]) -> None:
        """The actor begins to learn from these rows."""
        if self._ground is not None:
            disk, lineage = self._ground.machine.journal, self._ground.lineage
            update = Update(columns, list(group_ids), lineage, disk.num_synced, disk.num_acked)
            self._notes.append(("updated", (update,)))


def _hears(oracle: Oracle, name: str) -> bool:
    """It has a method of its own for that."""
    return getattr(type(oracle), name, None) is not getattr(Oracle, name, None)
