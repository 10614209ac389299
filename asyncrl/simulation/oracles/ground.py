"""What the oracles of one life look at."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from asyncrl.agents.runner import GroupRunner
from asyncrl.config import TrainRun
from asyncrl.feed import Feed
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.replay.signal import Signal
from asyncrl.simulation.edges.engines import SimEngines
from asyncrl.simulation.edges.policy import Lineage, SimPolicy
from asyncrl.simulation.faults.kinds import FaultKind
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.simulation.machine import Machine
from asyncrl.simulation.oracles.book import Book
from asyncrl.simulation.oracles.memory import Memory
from asyncrl.simulation.oracles.shadow import Shadow
from asyncrl.simulation.watcher import Watcher
from asyncrl.simulation.world import SimWorld
from asyncrl.trainer import Trainer
from asyncrl.transfer_queue.state import State
from asyncrl.wiring import Edges

Task = asyncio.Task[Any]


@dataclass(slots=True, kw_only=True)
class Tasks:
    """Tasks under way: `groups` and `sessions` by uid, `guests` (loops and tools) by kind; kept by `living.py`. Sessions of
    evaluations have places of their own."""

    groups: dict[str, Task] = field(default_factory=dict)
    sessions: dict[str, dict[int, Task]] = field(default_factory=dict)
    session_guests: dict[Task, None] = field(default_factory=dict)
    eval_guests: dict[Task, None] = field(default_factory=dict)
    tool_guests: dict[Task, None] = field(default_factory=dict)

    @property
    def num(self) -> int:
        return len(self.groups) + len(self.sessions) + len(self.session_guests) + len(self.eval_guests) + len(self.tool_guests)


@dataclass(slots=True, kw_only=True)
class Ground:
    """One life: the product's rooms, what the store must hold, and the book of the run."""

    machine: Machine
    run: TrainRun
    trainer: Trainer
    edges: Edges
    loop: VirtualLoop
    world: SimWorld
    shadow: Shadow
    memory: Memory
    watcher: Watcher
    hits: Counter[FaultKind]
    """Faults that came true in this life."""
    tasks: Tasks = field(default_factory=Tasks)
    is_cut_short: bool = False
    """The process has ended in the middle of a turn."""
    state: State = field(init=False)
    """What the store holds."""
    admission: Admission = field(init=False)
    replay: ReplayBuffer = field(init=False)
    runner: GroupRunner = field(init=False)
    feed: Feed = field(init=False)
    changed: Signal = field(init=False)
    """Admission's."""
    engines: SimEngines = field(init=False)
    """Those of training."""
    policy: SimPolicy = field(init=False)

    def __post_init__(self) -> None:
        trainer = self.trainer
        assert isinstance(self.edges.rollout.engine, SimEngines)
        assert isinstance(self.edges.policy, SimPolicy)
        self.feed, self.changed = trainer.feed, trainer.admission.changed
        self.engines, self.policy = self.edges.rollout.engine, self.edges.policy
        self.state, self.admission, self.replay, self.runner = (
            trainer.queue._state,
            trainer.admission,
            trainer.replay,
            trainer.agents,
        )

    @property
    def book(self) -> Book:
        return self.memory.book

    @property
    def num_places(self) -> int:
        """Groups that may be under way."""
        return (self.run.max_staleness + 1) * self.run.data.train_batch_size * self.run.publish_freq

    def version_of(self, step: int) -> int:
        """That the weights of a step belong to."""
        return step // self.run.publish_freq

    def num_incidents(self, name: str) -> int:
        """Of this life; name: `<kind>_<what>`."""
        incidents = self.watcher.incidents
        return 0 if incidents is None else int(incidents.counts().get(f"incidents/{name}", 0))

    @property
    def lineage(self) -> Lineage:
        """Groups of each update that the weights have seen."""
        return self.policy.lineage

    @property
    def is_ending(self) -> bool:
        """The runner is being left, or one of its groups has failed: what is under way is not brought to its end any more."""
        return self.is_cut_short or self.runner._is_closing or self.runner.has_failed

    def is_left_behind(self, task: Task) -> bool:
        """A guest that holds on to its cancellation, whoever it was of."""
        if task in self.runner._parts.guests._late or task in self.runner._tools._guests._late:
            return True
        return self.edges.val_rows is not None and task.get_name().startswith("guest: ") and task.cancelling() > 0

    @property
    def has_journal_failed(self) -> bool:
        """Nothing more is kept."""
        queue = self.edges.queue
        return queue._deadline.failure is not None or (queue._journal is not None and queue._journal.failure is not None)
