"""One life of the controller: the product's own rooms on simulated edges, from the newest checkpoint and all that the journal kept,
to the end or a crash.

machine -> [live] -> wiring.open_controller -> trainer.fit -> machine
"""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from asyncrl.config import TrainRun
from asyncrl.observe.incidents import Incidents
from asyncrl.observe.lineage import Lineage
from asyncrl.observe.sight import Sight
from asyncrl.simulation.edges.engines import SimEngines
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
from asyncrl.simulation.seams import SavePart, Seams
from asyncrl.simulation.watcher import WatchedSight, Watcher
from asyncrl.simulation.world import SimWorld
from asyncrl.stages.advantage import kl_coefficient
from asyncrl.stopping import Stop
from asyncrl.trainer import Trainer
from asyncrl.transfer_queue import TransferQueue
from asyncrl.waiting import no_stray_cancel
from asyncrl.wiring import Edges, Rollout, open_controller, stages_of

if TYPE_CHECKING:
    from asyncrl.journal.port import Journal


async def live(
    machine: Machine, world: SimWorld, plan: FaultPlan, watcher: Watcher, stop: Stop, oracles: Oracles | None = None
) -> None:
    """Run the controller until it ends. Whatever ends it is raised."""
    async with open_life(machine, world, plan, watcher, stop, oracles) as trainer:
        await trainer.fit()
    # Who was asked to stop at the last step may owe its evaluation: that is for the next life.
    machine.is_finished = trainer.step >= trainer.total_steps and not stop.is_requested


@asynccontextmanager
async def open_life(
    machine: Machine, world: SimWorld, plan: FaultPlan, watcher: Watcher, stop: Stop, oracles: Oracles | None = None
) -> AsyncIterator[Trainer]:
    """The controller with the weights of the newest whole checkpoint, and with what the journal has kept."""
    scenario = machine.scenario
    run = scenario.train_run()
    machine.delete_damaged()
    step = None if machine.is_new else machine.newest.step
    machine.is_new = False
    policy = SimPolicy(scenario, world, plan, lineage=machine.newest.lineage)
    async with AsyncExitStack() as stack:
        stack.enter_context(no_stray_cancel("the controller"))
        engines = await stack.enter_async_context(SimEngines(scenario, world, plan))
        tools = sim_tools(scenario, world, plan)
        template = SimTemplate([tool.name for tool in scenario.sim.tools])
        scorer = sim_scorer(scenario, world, plan)
        reference = policy.log_probs if run.needs_reference else None
        edges = Edges(
            world=world,
            rollout=Rollout(engine=engines, scorer=scorer, template=template, tools=dict(tools)),
            queue=await stack.enter_async_context(_open_queue(machine, plan, run, oracles)),
            policy=policy,
            stages=stages_of(run, policy, reference=reference, kl=kl_coefficient(run.algorithm)),
            rows=SimRows(scenario),
            val_rows=SimRows(scenario, count=scenario.sim.prompts.val_count) if scenario.sim.prompts.val_count else None,
            save=functools.partial(_save, machine, policy, world, plan),
            open_sight=functools.partial(_open_sight, run, world, watcher),
            open_eval_engine=functools.partial(SimEngines, scenario, world, plan, name="eval engine"),
            watch_sessions=watcher.watch_sessions,
        )
        steps = scenario.trainer.total_training_steps
        kept = [] if step is None else [checkpoint.step for checkpoint in machine.checkpoints][-run.trainer.max_ckpt_to_keep :]
        controller = open_controller(run, edges, stop=stop, total_steps=steps, step=step, kept=kept)
        trainer = await stack.enter_async_context(controller)
        watcher.begin(trainer, edges)
        if oracles is not None:
            oracles.begin_life(trainer, edges, world.loop, world, watcher, plan.hits)
        yield trainer


@asynccontextmanager
async def _open_queue(machine: Machine, plan: FaultPlan, run: TrainRun, oracles: Oracles | None) -> AsyncIterator[TransferQueue]:
    journal: Journal | None = None
    if run.store.journal:
        journal = SimJournal(machine.journal, machine.scenario.sim.journal, plan, is_full_sync=run.store.sync == "full")
    if oracles is not None:
        journal = oracles.tap(journal)
    step, limit_s = machine.newest.step, run.store.commit_timeout_s
    _check_journal(machine, step)
    found = None if journal is None else journal.load(step)
    haunted = HauntedQueue(journal, found, commit_timeout_s=limit_s, weights_step=step, plan=plan) if plan.haunts else None
    async with haunted or TransferQueue(journal, found, commit_timeout_s=limit_s, weights_step=step) as queue:
        if haunted is not None:
            haunted.raise_the_dead()
        try:
            yield queue
        finally:
            if journal is not None:
                journal.close()


def _check_journal(machine: Machine, step: int) -> None:
    """A run refuses to go on from a checkpoint whose journal ends before it or begins after it. None of ours may ever be so."""
    steps = machine.journal.steps()
    if machine.scenario.store.journal and not steps.purged <= step <= steps.last:
        held = f"purged up to step {steps.purged}, and ends with step {steps.last}"
        raise Violation("recovery", f"the newest whole checkpoint is of step {step}, but the journal is {held}")


async def _save(machine: Machine, policy: SimPolicy, world: SimWorld, seams: Seams, step: int) -> list[int]:
    """As a real one: the weights as they are, written in the thread that owns them, whole only at the end."""
    seams.save_begins(step)
    seams.saving(SavePart.BEGUN)
    checkpoint = await world.offload(lambda: SimCheckpoint(step=step, lineage=policy.lineage), pool="model")
    seams.saving(SavePart.HALF)
    began = world.now()
    await world.offload(world.spend, machine.scenario.sim.training.save_s, pool="model")
    seams.busy("trainer", "save", began, world.now())
    seams.saving(SavePart.WRITTEN)
    await asyncio.sleep(0)
    kept = machine.save(checkpoint)
    seams.saving(SavePart.DONE)
    await asyncio.sleep(0)
    return kept


@asynccontextmanager
async def _open_sight(
    run: TrainRun, world: SimWorld, watcher: Watcher, lineage: Lineage, incidents: Incidents
) -> AsyncIterator[Sight]:
    yield WatchedSight(watcher, lineage, incidents, world, patience=run.trainer.no_signal_patience)
