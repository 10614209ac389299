"""Oracles of one run: fed by what the store, the engines and the actor do, asked after every turn of the loop.

begin_run, and of each life: tap (the store's journal is opened), begin_life (the rooms are open), after_turn ..., end_life; end_run

What happens in a turn is noted and looked at when the turn is over: a Violation raised inside the controller would be its to
catch. A turn in which nothing of interest happened costs a few comparisons.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

from asyncrl.journal.entries import Saved
from asyncrl.journal.port import Journal
from asyncrl.keys import TRAIN
from asyncrl.observe.incidents import Line as Incident
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.simulation.faults.kinds import FaultKind
from asyncrl.simulation.handles import SimTask
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.simulation.machine import Machine
from asyncrl.simulation.oracles.agreement import Agreement, Forgotten
from asyncrl.simulation.oracles.capacity import Bounded, Emptied, Places
from asyncrl.simulation.oracles.conservation import Conservation, keep_book
from asyncrl.simulation.oracles.consumed import Fresh
from asyncrl.simulation.oracles.deadlines import Deadlines, Progress
from asyncrl.simulation.oracles.engines import Engines
from asyncrl.simulation.oracles.evaluated import Evaluated, check_measured
from asyncrl.simulation.oracles.fencing import Fencing, Once
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.lineage import SameRows, TrainedOnce, WholeGroups
from asyncrl.simulation.oracles.living import Living
from asyncrl.simulation.oracles.memory import Memory
from asyncrl.simulation.oracles.oracle import Oracle, Update
from asyncrl.simulation.oracles.recovery import Recovery, Retries
from asyncrl.simulation.oracles.shadow import Changes, Shadow
from asyncrl.simulation.oracles.status import Status
from asyncrl.simulation.oracles.stream import Tap, Written
from asyncrl.simulation.oracles.tokens import TokenInTokenOut
from asyncrl.simulation.oracles.updates import InFlight
from asyncrl.simulation.watcher import Watcher
from asyncrl.simulation.world import SimWorld
from asyncrl.trainer import Trainer
from asyncrl.wiring import Edges

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncrl.simulation.edges.engine import SimEngine
    from asyncrl.simulation.oracles.book import Line

# Living first: it keeps the tasks.
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
    Retries,
    Recovery,
    TokenInTokenOut,
    InFlight,
    Engines,
    Evaluated,
    Places,
    Bounded,
    Deadlines,
    Progress,
    Agreement,
    Forgotten,
    Emptied,
)
"""In the order in which they are asked."""

HEARD = (
    *("begin", "fed", "begun", "ended", "entry", "asked", "generated", "taken", "given", "failed", "strange"),
    *("updated", "measured", "saving", "busy_until", "turn", "due", "end"),
)
"""What an oracle may hear."""
Note = tuple[str, tuple[Any, ...]]
"""What happened, and with what."""


class Oracles:
    """An Observer too: seams tell it what engines and the actor do. Every method but the observer's may raise Violation."""

    def __init__(self) -> None:
        self._memory = Memory()
        self._machine: Machine | None = None
        self._tap: Tap | None = None
        self._found = Saved()
        self._notes: list[Note] = []
        self._ground: Ground | None = None
        self._hearing: dict[str, list[Callable[..., Any]]] = {}
        self._seen: tuple[object, ...] = ()
        self._due = 0.0

    def begin_run(self, machine: Machine) -> None:
        """Before the first life, and again where a run begins anew."""
        self._machine = machine
        self._memory = Memory()

    # --- a life

    def tap(self, journal: Journal | None) -> Journal:
        """The journal that the store of this life is to be given in place of `journal` (None: it has none)."""
        assert self._machine is not None
        self._notes = []
        self._ground = None
        self._found = self._machine.journal.saved.copy()  # all of it: what a journal gives back is the product's to decide
        self._tap = Tap(journal, lambda written: self._notes.append(("entry", (written,))))
        return self._tap

    def begin_life(
        self, trainer: Trainer, edges: Edges, loop: VirtualLoop, world: SimWorld, watcher: Watcher, hits: Counter[FaultKind]
    ) -> None:
        """The controller is open; nothing has been admitted by this life."""
        assert self._machine is not None
        ground = self._ground = Ground(
            machine=self._machine,
            run=trainer.run,
            trainer=trainer,
            edges=edges,
            loop=loop,
            world=world,
            shadow=Shadow(self._found, weights_step=self._machine.newest.step),
            memory=self._memory,
            watcher=watcher,
            hits=hits,
        )
        watcher.measured = lambda step, version: self._notes.append(("measured", (step, version)))
        self._memory.book.restart(self._machine.newest.step, (uid for step in ground.lineage for uid in step))
        loop.begun, loop.ended = [], []
        self._seen, self._due = (), 0.0
        oracles = [kind(ground) for kind in ORACLES]
        self._hearing = {name: [getattr(oracle, name) for oracle in oracles if _hears(oracle, name)] for name in HEARD}
        for hear in self._hearing["begin"]:
            hear()

    def after_turn(self) -> None:
        """After every turn of the loop, also before `begin_life` and while the rooms are closed. Raises Violation."""
        ground = self._ground
        if ground is None:
            return
        loop = ground.loop
        # A save makes a new list of checkpoints, a notification of admission's a new event.
        seen = (ground.engines.newest, ground.engines.published, ground.changed._next, ground.machine.checkpoints)
        if not (self._notes or loop.begun or loop.ended) and loop._now < self._due and all(map(is_, seen, self._seen)):
            return
        self._seen = seen
        self._tell_tasks("begun", loop.begun)
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
                changes = ground.shadow.apply(written.entry, written.number)
                self._tell_admitted(changes)
                keep_book(self._memory.book, changes)
                arguments = (changes,)
            for hear in self._hearing[what]:
                hear(*arguments)

    def _tell_admitted(self, changes: Changes) -> None:
        lines: list[Line] = []
        for put in changes.put:
            if put.row.is_prompt and put.tag_before is None and put.row.entry.partition_id == TRAIN:
                number = int(put.row.entry.tag.get("number", -1))
                lines.append(self._memory.book.admit(changes.number, put.row.entry.uid, number))
        if lines:
            for hear in self._hearing["fed"]:
                hear(lines)

    def end_life(self, error: BaseException | None, *, crashed: bool) -> None:
        """The life is over, and the loop not closed yet: everything of it has ended, or it has crashed. Raises Violation."""
        ground, self._ground = self._ground, None
        if ground is None:
            return
        ground.is_cut_short = crashed
        ground.loop.begun = ground.loop.ended = None
        self._tell_notes(ground)
        if not crashed:
            for hear in self._hearing["end"]:
                hear()

    def survived(self, num_entries: int) -> None:
        """Of the entries of the life that is over, so many are kept."""
        self._memory.survive(num_entries)

    def end_run(self, told: Sequence[Incident]) -> None:
        """The run has reached its last step; told: all its incidents. Raises Violation."""
        assert self._machine is not None
        if self._machine.is_finished:
            check_measured(self._machine.scenario.train_run(), self._memory, told)

    # --- what seams tell

    def busy(self, who: str, what: str, start_s: float, end_s: float) -> None:
        for hear in self._hearing.get("busy_until", ()):
            hear(end_s)

    def answered(self, request_id: str, generation: Generation, num_tokens: int, slot: tuple[float, float]) -> None:
        """`generated` has more."""

    def asked(self, request: GenerateRequest) -> None:
        """A session asks an engine."""
        self._notes.append(("asked", (request,)))

    def save_begins(self, step: int) -> None:
        """A checkpoint is asked for."""
        self._notes.append(("saving", (step,)))

    def taken(self, request: GenerateRequest, engine: "SimEngine") -> None:
        """An engine has a request."""
        self._ask_now("taken", request, engine)

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        """An engine's answer, as it leaves the pool."""
        self._ask_now("given", request, generation)
        self._notes.append(("generated", (request, generation)))

    def failed(self, request: GenerateRequest, error: BaseException) -> None:
        """A request ends without an answer."""
        self._ask_now("failed", request, error)

    def _ask_now(self, what: str, *of_what: object) -> None:
        """As things stand in the middle of a turn. Nothing is raised into what is looked at."""
        for ask in self._hearing.get(what, ()):
            if text := ask(*of_what):
                self._notes.append(("strange", (text,)))

    def updated(self, columns: "TensorDict", group_ids: Sequence[str | None]) -> None:
        """The actor begins to learn from these rows."""
        if self._ground is not None:
            disk, lineage = self._ground.machine.journal, self._ground.lineage
            update = Update(columns, list(group_ids), lineage, disk.num_synced, disk.num_acked)
            self._notes.append(("updated", (update,)))


def _hears(oracle: Oracle, name: str) -> bool:
    """It has a method of its own for that."""
    return getattr(type(oracle), name, None) is not getattr(Oracle, name, None)
