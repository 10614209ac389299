"""The product's controller on edges of a few lines: every room is real, only engine, policy, checkpoints and files are told.

What it does is noted in one list, in order; the journal can be taken away at any moment, as a crash leaves it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import TrainRun, parse_run
from asyncrl.journal.entries import Entry, PutCounters, PutRecord
from asyncrl.journal.model import MemoryJournal
from asyncrl.observe.incidents import Incidents
from asyncrl.observe.lineage import Lineage
from asyncrl.observe.run_folder import RunFolder
from asyncrl.observe.sight import Sight
from asyncrl.ports import GenerateRequest, RewardRequest, RewardResult, Topology, WeightSnapshot
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.simulation.edges.template import END, WORDS, SimTemplate, call_ids
from asyncrl.stages.stage import Stage, StageOutput
from asyncrl.stopping import Stop
from asyncrl.tools import FunctionTool
from asyncrl.transfer_queue import TransferQueue
from asyncrl.wiring import Edges, Rollout, open_controller
from asyncrl.world import RealWorld

Event = tuple[Any, ...]
"""What, and of what: ("record", step, synced), ("learn", step, keys), ("publish", version), ("generate", request), ..."""


class NotingJournal(MemoryJournal):
    """Notes what is written of steps, and of admissions and evaluations, once it is there."""

    note: Callable[..., None] = staticmethod(lambda *event: None)

    def append(self, entry: Entry, *, synced: bool = False) -> Any:
        kept = super().append(entry, synced=synced)
        for event in _events_of(entry, synced):
            self.note(*event)
        return kept


def _events_of(entry: Entry, synced: bool) -> list[Event]:
    found: list[Event] = []
    for op in entry:
        if isinstance(op, PutRecord):
            found.append(("record", op.record.step, synced) if op.record.tries else ("retire", op.record.step))
        elif isinstance(op, PutCounters):
            found += [(name, value) for name, value in op.counters.items() if name in ("admitted", "evaluated", "purged_step")]
    return [*found, ("synced",)] if synced else found


class Prompts:
    """Rows whose prompts have three tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, position: int) -> dict[str, Any]:
        own = {"reward_model": {"ground_truth": None}, "extra_info": {}, "tools_kwargs": {}, "interaction_kwargs": {}}
        return {"raw_prompt": [{"role": "user", "content": f"3 {position}"}], "data_source": "told", "index": position, **own}


@dataclass(frozen=True, slots=True)
class Weights:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class Actor:
    """Learns nothing."""

    num_ranks = 1
    topology = Topology()

    def snapshot(self, version: int) -> Weights:
        return Weights()

    def log_probs(self, columns: Any, shards: Any = ()) -> Any:
        raise NotImplementedError

    def log_probs_and_squares(self, columns: Any, shards: Any = ()) -> Any:
        raise NotImplementedError

    def update(self, columns: Any, group_ids: Any, session_ids: Any, *, seed: int, shards: Any = ()) -> dict[str, float]:
        raise NotImplementedError


class Engine(ScriptedEngine):
    """Calls the tool in its first turn and says a word in its second."""

    def __init__(self, note: Callable[..., None]) -> None:
        super().__init__(self._answer_to, decode=SimTemplate(["ask"]).decode)
        self.note = note

    async def _answer_to(self, request: GenerateRequest) -> Sequence[int]:
        self.note("generate", request.request_id, request.seed)
        if request.request_id.startswith("val-"):
            await asyncio.sleep(0.01)  # training would overtake an evaluation, if it did not wait
        return call_ids(0, 0.5) if request.request_id.endswith("_0") else [WORDS + request.seed % 100, END]

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        await super().publish(version, snapshot)
        self.note("publish", version)


class Scorer:
    async def score(self, request: RewardRequest) -> RewardResult:
        return RewardResult(score=len(request.solution_str) % 3 / 2)


async def ask(query: str) -> str:
    """Ask.

    Args:
        query: What.
    """
    return "2"


@dataclass(slots=True)
class Quiet:
    """Nobody watches. The numbers of a step are noted."""

    note: Callable[..., None]

    @property
    def is_live(self) -> bool:
        return False

    def say(self, text: str) -> None: ...

    def step(self, step: int, numbers: Any) -> None: ...

    def groups(self, counts: Any) -> None: ...

    def log(self, step: int, metrics: Any) -> None:
        self.note("numbers", step)

    def append(self, record: Any) -> None: ...


@dataclass(slots=True, kw_only=True)
class Life:
    """One life of a run, from weights of `step` on what a crash has left in `journal`.

    at: is called with each event as it is noted; what it raises goes to whoever did it.
    """

    journal: MemoryJournal = field(default_factory=NotingJournal)
    step: int | None = None
    total_steps: int = 4
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    at: Callable[["Life", Event], None] = lambda life, event: None
    evaluates: bool = False
    is_stateful: bool = False
    """Of the tool."""
    rows: Any = field(default_factory=Prompts)
    stop: Stop = field(default_factory=Stop)
    events: list[Event] = field(default_factory=list)
    left: dict[Event, MemoryJournal] = field(default_factory=dict)
    """What `leave` has put away."""
    saved: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    """Checkpoints of the lives before."""

    def note(self, *event: Any) -> None:
        self.events.append(event)
        self.at(self, event)

    def leave(self, event: Event) -> None:
        """Put away what the next life would find if this one died now."""
        self.left.setdefault(event, self.journal.crash())

    def run_config(self) -> TrainRun:
        sections: dict[str, dict[str, Any]] = {
            "data": {"train_files": ["-"], "train_batch_size": 2, "max_prompt_length": 10, "max_response_length": 30},
            "model": {"path": "-"},
            "rollout": {"n": 2},
            "agent": {"name": "tool_agent", "tools": ["calculator"], "retry_backoff_s": 0.001},
            "trainer": {"save_freq": 0, "invariants": "all", "log_trajectories": 0, "tensorboard": False},
            "replay": {"sample_timeout_s": 20.0},
        }
        for name, section in self.settings.items():
            sections[name] = {**sections.get(name, {}), **section}
        if self.evaluates:
            sections["data"]["val_files"] = ["-"]
        if sections["agent"].get("max_attempts") == 1:
            del sections["agent"]["retry_backoff_s"]
        return parse_run(TrainRun, sections)

    def _learn(self, columns: Any, batch: Any, context: Any) -> StageOutput:
        self.note("learn", context.step, batch.keys, context.version)
        return StageOutput(columns={"advantages": columns["response_mask"].float()})

    async def _save(self, step: int) -> list[int]:
        self.note("save", step)
        self.saved.append(step)
        return sorted({self.step or 0, *self.saved})[-2:]

    @asynccontextmanager
    async def _eval_engine(self) -> AsyncIterator[ScriptedEngine]:
        """Slow: training would be done before it, if it did not wait."""

        async def answer(request: GenerateRequest) -> Sequence[int]:
            await asyncio.sleep(0.02)
            return [WORDS, END]

        yield ScriptedEngine(answer, decode=SimTemplate(["ask"]).decode)

    @asynccontextmanager
    async def _sight(self, lineage: Lineage, incidents: Incidents) -> AsyncIterator[Sight]:
        quiet = Quiet(self.note)
        folder, world = RunFolder(path=Path("-")), lineage_world(lineage)
        yield Sight(folder, quiet, quiet, quiet, dict, lineage, world, patience=99, step=self.step or 0, incidents=incidents)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Any]:
        """The trainer."""
        run, weights = self.run_config(), self.step or 0
        if isinstance(self.journal, NotingJournal):
            self.journal.note = self.note
        async with (
            RealWorld(run_seed=run.trainer.seed) as world,
            TransferQueue(self.journal, self.journal.load(weights), weights_step=weights) as queue,
        ):
            reads, writes = frozenset({"response_mask"}), frozenset({"advantages"})
            learn = Stage(name="advantage", reads=reads, writes=writes, compute=self._learn, learns=True)
            tool, template = FunctionTool(ask), SimTemplate(["ask"])
            tool.is_stateful = self.is_stateful
            edges = Edges(
                world=world,
                rollout=Rollout(engine=self.engine(), scorer=Scorer(), template=template, tools={"ask": tool}),
                queue=queue,
                policy=Actor(),
                stages=(learn,),
                rows=self.rows,
                val_rows=Prompts() if self.evaluates else None,
                save=self._save,
                open_sight=self._sight,
                open_eval_engine=self._eval_engine,
            )
            total, kept = self.total_steps, self.kept
            async with open_controller(run, edges, stop=self.stop, total_steps=total, step=self.step, kept=kept) as trainer:
                yield trainer

    def engine(self) -> ScriptedEngine:
        return Engine(self.note)

    async def live(self) -> "Life":
        """To its end, which must keep the law."""
        async with self.opened() as trainer:
            await trainer.fit()
            trainer.admission.check_conservation()
        return self

    # --- what it did

    def of(self, what: str) -> list[Event]:
        return [event for event in self.events if event[0] == what]

    def trained(self) -> dict[int, tuple[str, ...]]:
        return {step: keys for _, step, keys, _ in self.of("learn")}

    def first(self, what: str, *which: Any) -> int:
        """Position of the first event that begins so."""
        return next(number for number, event in enumerate(self.events) if event[: 1 + len(which)] == (what, *which))


def lineage_world(lineage: Lineage) -> Any:
    return lineage._world


@pytest.fixture
def new_life() -> type[Life]:
    """Life(journal=..., step=...): a life of a run. `await life.live()`."""
    return Life
