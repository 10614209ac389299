"""One life of the controller: the product's own rooms on simulated edges, from the newest checkpoint to the end or a crash.

machine -> [live] -> wiring.open_controller -> trainer.fit -> machine
"""

import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from asyncrl.config import TrainRun
from asyncrl.observe.incidents import Incidents
from asyncrl.observe.lineage import Lineage
from asyncrl.observe.sight import Sight
from asyncrl.simulation.edges.engine import SimEngines
from asyncrl.simulation.edges.journal import SimJournal
from asyncrl.simulation.edges.policy import SimPolicy
from asyncrl.simulation.edges.reward import sim_scorer
from asyncrl.simulation.edges.rows import SimRows
from asyncrl.simulation.edges.template import SimTemplate
from asyncrl.simulation.edges.tools import sim_tools
from asyncrl.simulation.errors import Violation
from asyncrl.simulation.faults import FaultPlan
from asyncrl.simulation.faults.ghosts import HauntedQueue
from asyncrl.simulation.machine import Machine, SimCheckpoint
from asyncrl.simulation.oracles import Oracles
from asyncrl.simulation.seams import Seams
from asyncrl.simulation.watcher import WatchedSight, Watcher
from asyncrl.simulation.world import SimWorld
from asyncrl.stages.advantage import kl_coefficient
from asyncrl.stopping import Stop
from asyncrl.trainer import Border, Trainer
from asyncrl.transfer_queue import TransferQueue
from asyncrl.wiring import Edges, Rollout, open_controller, stages_of

if TYPE_CHECKING:
    from asyncrl.journal.port import Journal


async def live(
    machine: Machine,
    world: SimWorld,
    seams: FaultPlan,
    watcher: Watcher,
    stop: Stop,
    oracles: Oracles | None = None,
    *,
    evaluates: bool = False,
) -> None:
    """Run the controller until it ends. Whatever ends it is raised."""
    async with open_life(machine, world, seams, watcher, stop, oracles, evaluates=evaluates) as trainer:
        await trainer.fit()
    machine.is_finished = trainer.border.step >= trainer.total_steps


@asynccontextmanager
async def open_life(
    machine: Machine,
    world: SimWorld,
    seams: FaultPlan,
    watcher: Watcher,
    stop: Stop,
    oracles: Oracles | None = None,
    *,
    evaluates: bool = False,
) -> AsyncIterator[Trainer]:
    """The controller at the border of the newest checkpoint; without one, at the beginning with an empty journal."""
    scenario = machine.scenario
    run = scenario.train_run()
    checkpoint = machine.newest
    policy = SimPolicy(scenario, world, seams, lineage=checkpoint.lineage if checkpoint else ())
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(SimEngines(scenario, world, seams))
        tools = sim_tools(scenario, world, seams)
        template = SimTemplate([tool.name for tool in scenario.sim.tools])
        scorer = sim_scorer(scenario, world, seams)
        edges = Edges(
            world=world,
            rollout=Rollout(engine=engines, scorer=scorer, template=template, tools=dict(tools)),
            queue=await stack.enter_async_context(_open_queue(machine, seams, run, oracles)),
            policy=policy,
            stages=stages_of(
                run, policy, reference=policy.log_probs if run.needs_reference else None, kl=kl_coefficient(run.algorithm)
            ),
            rows=SimRows(scenario),
            val_rows=SimRows(scenario) if evaluates else None,
            save=functools.partial(_save, machine, policy, world, seams),
            open_sight=functools.partial(_open_sight, run, world, watcher),
            watch_sessions=watcher.watch_sessions,
        )
        begin = checkpoint.border if checkpoint else None
        steps = scenario.trainer.total_training_steps
        staleness = run.max_staleness
        controller = open_controller(run, edges, stop=stop, total_steps=steps, border=begin, max_staleness=staleness)
        trainer = await stack.enter_async_context(controller)
        watcher.begin(trainer, edges)
        if oracles is not None:
            oracles.begin_life(trainer, edges, world.loop, world)
        yield trainer


@asynccontextmanager
async def _open_queue(machine: Machine, plan: FaultPlan, run: TrainRun, oracles: Oracles | None) -> AsyncIterator[TransferQueue]:
    journal: Journal | None = None
    if run.store.journal:
        journal = SimJournal(machine.journal, machine.scenario.sim.journal, plan, is_full_sync=run.store.sync == "full")
    if oracles is not None:
        journal = oracles.tap(journal)
    found = None if journal is None else journal.load()
    limit_s = run.store.commit_timeout_s
    haunted = HauntedQueue(journal, found, commit_timeout_s=limit_s, plan=plan) if plan.haunts else None
    async with haunted or TransferQueue(journal, found, commit_timeout_s=limit_s) as queue:
        if haunted is not None:
            haunted.raise_the_dead()
        if run.store.journal and machine.newest is not None:
            _check_journal(queue, machine.newest.border.step)
        try:
            yield queue
        finally:
            if journal is not None:
                journal.close()


def _check_journal(queue: TransferQueue, step: int) -> None:
    """A run refuses to go on from a checkpoint whose journal ends before it or begins after it. None of ours may ever be so."""
    if not queue.purged_step <= step <= queue.last_step:
        held = f"purged up to step {queue.purged_step}, and ends with step {queue.last_step}"
        raise Violation("resume", f"the newest whole checkpoint is of step {step}, but the journal is {held}")


async def _save(machine: Machine, policy: SimPolicy, world: SimWorld, seams: Seams, border: Border) -> list[int]:
    """As a real one: the weights as they are, written in the thread that owns them, whole only at the end."""
    seams.save_begins(border.step)
    checkpoint = await world.offload(lambda: SimCheckpoint(border=border, lineage=policy.lineage), pool="model")
    seams.saving()
    began = world.now()
    await world.offload(world.spend, machine.scenario.sim.training.save_s, pool="model")
    seams.busy("trainer", "save", began, world.now())
    return machine.save(checkpoint)


@asynccontextmanager
async def _open_sight(
    run: TrainRun, world: SimWorld, watcher: Watcher, lineage: Lineage, incidents: Incidents
) -> AsyncIterator[Sight]:
    yield WatchedSight(watcher, lineage, world, incidents, patience=run.trainer.no_signal_patience)
