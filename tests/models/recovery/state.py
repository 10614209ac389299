"""What a state of a run is: what is on disk, what only the process has, and what only the oracles know.

    State ─┬─ journal, kept, checkpoints    durable
           ├─ process                       lost at a crash; None: no process runs
           └─ trained                       a ghost: no rule may read it

Steps, versions and admission numbers are absolute here; `relative.py` makes them small. NamedTuples, because states are made and
hashed by the million.
"""

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from tests.models.recovery.rules import RIGHT, Rules

NONE = -1
"""No step, no version, no number. The only one below 0."""

RECOVERING, IDLE, RECORDED, UPDATED, RETIRED, PUBLISHED = range(6)
"""Where the process is. RECOVERING: it has its incarnation, and no weights yet. PUBLISHED: only where a record is late."""

CLEAN, DEAD_ROWS, TORN = range(3)
"""Flaws of a session: rows of a dead attempt are among its own; it counts as settled and its rows are not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of a run, and which faults and options there are.

    batch: groups a step; group: sessions; turns: of each session; every: steps between checkpoints; updates: steps a version.
    in_flight: a call may go on under new weights. power: the machine may lose its power. sigterm: the process may be asked to stop.
    evaluate: an evaluation every so many versions, 0 for none; between: nothing is published meanwhile.
    """

    max_staleness: int = 0
    batch: int = 1
    group: int = 1
    turns: int = 1
    every: int = 1
    updates: int = 1
    in_flight: bool = False
    power: bool = False
    sigterm: bool = False
    evaluate: int = 0
    between: bool = False
    rules: Rules = RIGHT

    @property
    def places(self) -> int:
        return (self.max_staleness + 1) * self.batch * self.updates

    @property
    def interval(self) -> int:
        """Steps between two checkpoints: they end a version."""
        return lcm(self.every, self.updates)

    def version(self, step: int) -> int:
        """The version that the weights of a step belong to."""
        return step // self.updates

    def __str__(self) -> str:
        sizes = ("batch", "group", "turns", "every", "updates", "evaluate")
        switches = ("in_flight", "power", "sigterm", "between")
        words = [f"max_staleness={self.max_staleness}"]
        words += [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) != getattr(DEFAULT, name)]
        return " ".join([*words, *(name for name in switches if getattr(self, name))])


class Session(NamedTuple):
    """turns: done. oldest, newest: versions of its tokens. A call in flight at turn 0: oldest is its version, newest is NONE."""

    turns: int = 0
    oldest: int = NONE
    newest: int = NONE
    flaw: int = CLEAN

    @property
    def is_untouched(self) -> bool:
        return self.oldest == NONE


class Group(NamedTuple):
    """sessions: sorted, since nothing depends on which is which. A terminal group keeps one, with the extremes of all."""

    uid: int
    sessions: tuple[Session, ...]

    def is_terminal(self, turns: int) -> bool:
        return self.sessions[0].turns == turns


class Record(NamedTuple):
    """is_retired is used only by the variant that has such a mark."""

    step: int
    uids: tuple[int, ...]
    is_retired: bool = False


class Journal(NamedTuple):
    """cursor: the number of the next admission. groups: alive, in admission order. records: of the steps after `purged`.

    num_open: admitted - dropped - purged, as the counters say. evaluated: the newest version with a result. is_ended: the feed.
    behind: how many processes there were since the one whose incarnation this says.
    """

    cursor: int = 0
    groups: tuple[Group, ...] = ()
    records: tuple[Record, ...] = ()
    purged: int = 0
    num_open: int = 0
    evaluated: int = 0
    is_ended: bool = False
    behind: int = 0

    @property
    def last(self) -> int:
        """The last recorded step."""
        return self.records[-1].step if self.records else self.purged

    def uids_of(self, step: int) -> tuple[int, ...] | None:
        return next((record.uids for record in self.records if record.step == step), None)


class Checkpoint(NamedTuple):
    """cursor, num_open, groups: only where a variant keeps them here."""

    step: int
    is_whole: bool = True
    cursor: int = NONE
    num_open: int = NONE
    groups: tuple[Group, ...] | None = None


class Process(NamedTuple):
    """weights: the step that made them. published: version. goal: no token is generated until this step is done; NONE: open.

    saving: a checkpoint that is being written; is_synced: the journal was synced for it. evaluating: version, or NONE.
    is_stopping: it was asked to. is_late: the newest record is in memory only, which is so only in variants.
    """

    phase: int = RECOVERING
    weights: int = 0
    published: int = 0
    goal: int = NONE
    saving: Checkpoint | None = None
    is_synced: bool = False
    evaluating: int = NONE
    is_stopping: bool = False
    is_late: bool = False


class State(NamedTuple):
    """kept: what a power loss will leave of the journal, once the adversary has picked it; a sync makes it None, all of it.

    trained: (step, uids) of every update that any process ever did, after the purged steps.
    """

    journal: Journal = Journal()
    kept: Journal | None = None
    checkpoints: tuple[Checkpoint, ...] = (Checkpoint(0),)
    process: Process | None = Process(phase=IDLE)
    trained: tuple[tuple[int, tuple[int, ...]], ...] = ()


DEFAULT = Case()
