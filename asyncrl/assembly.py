"""Opens the real edges of a run and hands them to the controller, or to an evaluation.

cli -> preflight -> [assembly] -> wiring -> trainer
"""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.agents.chat_template import ChatTemplate, load_chat_template
from asyncrl.chosen import check_choices
from asyncrl.cluster import ForkServer
from asyncrl.config import TrainRun
from asyncrl.dataset import RLHFDataset
from asyncrl.engines import make_engine, make_eval_engine, weights_of
from asyncrl.errors import CheckpointError
from asyncrl.event_loop import rare_collections
from asyncrl.journal.entries import KeptSteps
from asyncrl.observe.run_folder import RunFolder, create_run_folder, run_folders
from asyncrl.observe.sight import open_sight
from asyncrl.ports import Decode, RolloutEngine, World
from asyncrl.preflight import RunInputs, total_steps
from asyncrl.rewards.scoring import open_scorer
from asyncrl.stages.advantage import KLCoefficient, kl_coefficient
from asyncrl.stages.stage import Stage
from asyncrl.stopping import Stop, on_signals
from asyncrl.tools import Tool, load_tools
from asyncrl.trainer import Trainer
from asyncrl.training.checkpoint import Checkpoint, delete_damaged, find_checkpoints, kept_steps, save_checkpoint
from asyncrl.training.learners import Learners, open_learners
from asyncrl.training.ranks import RankedLearners
from asyncrl.training.start import Start, check_model, facts_of, model_digest, read_start, refuse_changes, write_start
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.wiring import Edges, Rollout, open_controller, open_measure, stages_of
from asyncrl.wording import first_of
from asyncrl.world import RealWorld

log = logging.getLogger(__name__)

AnyLearners = Learners | RankedLearners
"""The models of a run: in this process, or in ranks of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What is read before a run is anything: the engine is not started, and no folder is made for a model that cannot be used."""

    engine: AbstractAsyncContextManager[RolloutEngine]
    template: ChatTemplate
    tools: dict[str, Tool]


async def read_model(run: TrainRun, world: World) -> LoadedModel:
    """The tools, the chat template, and the engine, which is still to be opened. Raises UserError."""
    torch.set_num_threads(run.trainer.num_threads)
    tools = load_tools(run.agent.tools)
    template = await world.offload(load_chat_template, run.model, [tool.schema for tool in tools.values()])
    engine = await world.offload(make_engine, run, world, template.decode)
    return LoadedModel(engine=engine, template=template, tools=tools)


@asynccontextmanager
async def open_rollout(run: TrainRun, world: World) -> AsyncIterator[Rollout]:
    """The engine started, the scorer, the chat template and the tools, for a run without a folder."""
    loaded = await read_model(run, world)
    async with loaded.engine as engine, _scored(run, world, loaded, engine) as rollout:
        yield rollout


@asynccontextmanager
async def _scored(
    run: TrainRun, world: World, loaded: LoadedModel, engine: RolloutEngine, folder: RunFolder | None = None
) -> AsyncIterator[Rollout]:
    """With the scorer opened; folder: where it keeps its log."""
    scoring = open_scorer(
        run.reward,
        world=world,
        log=folder.reward_log if folder else None,
        max_response_length=run.data.max_response_length,
        components=run.algorithm.gdpo_reward_keys,
    )
    async with scoring as scorer:
        yield Rollout(engine=engine, scorer=scorer, template=loaded.template, tools=loaded.tools)


# --- training -------------------------------------------------------------------------------------------------------------------


async def run_training(
    run: TrainRun,
    inputs: RunInputs,
    *,
    resume: bool = False,
    world: RealWorld | None = None,
    fork_server: ForkServer | None = None,
) -> Path:
    """A whole training run; returns its folder. SIGINT and SIGTERM end it at the end of a version with a checkpoint.

    resume: go on with the newest run of this name that has begun. Raises CheckpointError when there is none, when no weights are
    left that its journal fits, or when the configuration changes what a run may not change; RankError when its ranks cannot go on.
    world: one that somebody looks into; fork_server: where ranks are forked, when somebody has one.
    """
    stop = Stop()
    async with AsyncExitStack() as stack:
        stack.enter_context(on_signals(stop))
        world = await stack.enter_async_context(world or RealWorld(run_seed=run.trainer.seed))
        found = await world.offload(_find_folder, run) if resume else None
        is_local = run.cluster.kind == "local"
        ranks = await stack.enter_async_context(_open_ranks(run, world, fork_server)) if is_local else None
        loaded = await _read_model_beside(ranks, run, world)
        await world.offload(_drop_overlong, inputs.train_rows, loaded.template, run)
        if inputs.val_rows is not None:
            await world.offload(_drop_overlong, inputs.val_rows, loaded.template, run)
        await world.offload(check_choices, run)  # before there is a folder
        if ranks is not None:
            await world.offload(ranks.open, total_steps(run, len(inputs.train_rows)), pool="model")
        engine = await stack.enter_async_context(loaded.engine)
        folder = found if found is not None else await world.offload(_new_folder, run, inputs.train_rows)
        rollout = await stack.enter_async_context(_scored(run, world, loaded, engine, folder))
        stack.enter_context(rare_collections())
        opened = open_trainer(run, inputs, folder, rollout, world, stop, resume=resume, ranks=ranks)
        trainer, learners = await stack.enter_async_context(opened)
        await trainer.fit()
        await world.offload(functools.partial(learners.export, folder.export, model=run.model), pool="model")
    return folder.path


@asynccontextmanager
async def _open_ranks(run: TrainRun, world: World, server: ForkServer | None) -> AsyncIterator[RankedLearners]:
    """Not started yet; leaving ends the processes, also one that hangs or has not come up."""
    ranks = RankedLearners(run, server=server)
    try:
        yield ranks
    finally:
        await world.offload(ranks.close)


async def _read_model_beside(ranks: RankedLearners | None, run: TrainRun, world: World) -> LoadedModel:
    """`read_model`, while the ranks start: importing takes each of them seconds."""
    if ranks is None:
        return await read_model(run, world)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(world.offload(ranks.start, pool="model"))
            return await read_model(run, world)
    except BaseExceptionGroup as errors:
        first = first_of(errors)
        raise first from first.__cause__


@asynccontextmanager
async def open_trainer(
    run: TrainRun,
    inputs: RunInputs,
    folder: RunFolder,
    rollout: Rollout,
    world: World,
    stop: Stop,
    *,
    resume: bool = False,
    ranks: RankedLearners | None = None,
) -> AsyncIterator[tuple[Trainer, AnyLearners]]:
    """The rooms of training, and the models, with the newest weights of the folder or at the beginning; leaving ends the groups in
    flight. ranks: of a run whose models are in rank processes, open."""
    async with AsyncExitStack() as stack:
        rows = inputs.train_rows
        steps = total_steps(run, len(rows))
        weights = Weights(run=run, rows=rows, folder=folder) if resume else None
        # First of all, as it holds the lock of the run: the checkpoints of one that is still going are not ours to delete.
        queue = await stack.enter_async_context(_open_queue(run, folder, weights, world))
        checkpoint = None if weights is None else weights.checkpoint
        learners = await world.offload(_open_learners, run, steps, checkpoint, ranks, pool="model")
        kl = _kl_coefficient(run, checkpoint)
        edges = Edges(
            world=world,
            rollout=rollout,
            queue=queue,
            policy=learners.actor,
            stages=_stages(run, learners, kl),
            rows=rows,
            val_rows=inputs.val_rows,
            rollout_topology=run.rollout.topology,
            save=functools.partial(_save, run, world, learners, folder, kl),
            open_eval_engine=functools.partial(open_eval_engine, run, world, rollout.template.decode),
            open_sight=functools.partial(
                open_sight,
                folder,
                run.trainer,
                world=world,
                total_steps=steps,
                step=queue.weights_step,
                incarnation=queue.incarnation,
            ),
        )
        step = queue.weights_step if resume else None
        kept = await world.offload(kept_steps, folder.checkpoints, run.trainer.max_ckpt_to_keep) if resume else ()
        controller = open_controller(run, edges, stop=stop, total_steps=steps, step=step, kept=kept)
        yield await stack.enter_async_context(controller), learners


def _open_queue(
    run: TrainRun, folder: RunFolder, weights: "Weights | None", world: World
) -> AbstractAsyncContextManager[TransferQueue]:
    """The store with its journal, for the chosen weights. Raises JournalInUseError while another process runs in the folder."""
    return open_queue(
        folder.journal if run.store.journal else None,
        world=world,
        sync=run.store.sync,
        commit_timeout_s=run.store.commit_timeout_s,
        weights_step=weights or 0,
    )


def _stages(run: TrainRun, learners: AnyLearners, kl: KLCoefficient | None) -> tuple[Stage, ...]:
    reference = None if learners.reference is None else learners.reference.log_probs
    return stages_of(run, learners.actor, reference=reference, critic=learners.critic, kl=kl)


def _kl_coefficient(run: TrainRun, checkpoint: Checkpoint | None) -> KLCoefficient | None:
    """As the checkpoint has left it."""
    return kl_coefficient(run.algorithm, None if checkpoint is None else checkpoint.controllers.get("kl_coef"))


def _open_learners(run: TrainRun, steps: int, checkpoint: Checkpoint | None, ranks: RankedLearners | None) -> AnyLearners:
    """At the beginning of the run, or as the checkpoint has left them. steps: of the run."""
    assert (ranks is None) == (run.cluster.kind == "process")
    learners = ranks or open_learners(run, total_steps=steps)
    if checkpoint is not None:
        learners.read(checkpoint.path, checkpoint.counters)
    return learners


def _drop_overlong(rows: RLHFDataset, template: ChatTemplate, run: TrainRun) -> None:
    """Measure every prompt as the model will see it, tool schemas included; count what is dropped and name the rows."""
    limit = run.data.max_prompt_length
    dropped = rows.filter_overlong(
        lambda messages: len(template.prompt_ids(messages)), limit, drop=run.data.filter_overlong_prompts
    )
    if dropped:
        told = f"{rows.key}: {len(dropped)} prompts are longer than data.max_prompt_length = {limit} and were dropped"
        log.warning("%s: %s", told, ", ".join(dropped))


# --- checkpoints ------------------------------------------------------------------------------------------------------------------


async def _save(
    run: TrainRun, world: World, learners: AnyLearners, folder: RunFolder, kl: KLCoefficient | None, step: int
) -> list[int]:
    keep = run.trainer.max_ckpt_to_keep
    save = functools.partial(
        save_checkpoint,
        folder.checkpoints,
        functools.partial(learners.write, model=run.model),
        step=step,
        version=step // run.publish_freq,
        keep=keep,
        controllers={} if kl is None else {"kl_coef": kl.controller.coef},
    )
    # The one thread that reads the weights: a save that was cut short has ended before another one of the same step begins.
    await world.offload(save, pool="model", timeout_s=run.trainer.stage_timeout_s)
    return await world.offload(kept_steps, folder.checkpoints, keep)


def _new_folder(run: TrainRun, rows: RLHFDataset) -> RunFolder:
    folder = create_run_folder(run.trainer.default_local_dir, run.trainer.experiment_name)
    folder.write_config(run)
    write_start(folder.start, Start(facts=facts_of(run, rows, rows.digest), model=model_digest(run)))
    return folder


def _find_folder(run: TrainRun) -> RunFolder:
    """Of the newest run of that name that has begun."""
    if not run.store.journal:
        raise CheckpointError("--resume needs store.journal = true: without its journal a run cannot be gone on with")
    folders = run_folders(run.trainer.default_local_dir, run.trainer.experiment_name)
    for folder in folders:
        if folder.start.is_file():
            return folder
        log.warning("--resume: %s has no %s, so its run never began", folder.path, folder.start.name)
    names = ", ".join(str(folder.path) for folder in folders)
    raise CheckpointError(f"--resume: no run in {names} has begun; start a new run without --resume")


@dataclass(slots=True, kw_only=True)
class Weights:
    """Which weights a run goes on with; chosen once its journal is locked. `checkpoint`: None for the initial ones."""

    run: TrainRun
    rows: RLHFDataset
    folder: RunFolder
    checkpoint: Checkpoint | None = None

    def __call__(self, steps: KeptSteps) -> int:
        """Their step. Blocking: reads every checkpoint, and deletes the damaged ones. Raises CheckpointError; then nothing is."""
        path = self.folder.start
        start = read_start(path)
        refuse_changes(path, start, facts_of(self.run, self.rows, self.rows.digest))
        check_model(path, start, self.run)
        found = find_checkpoints(self.folder.checkpoints)
        whole = {checkpoint.step: checkpoint for checkpoint in found.whole}
        try:
            step = steps.newest_of([0, *whole])
        except CheckpointError as error:
            damaged = "".join(f"; damaged: {reason}" for reason in found.damaged.values())
            raise CheckpointError(f"--resume: {self.folder.path}: {error}{damaged}") from None
        delete_damaged(found, log.warning)
        self.checkpoint = whole.get(step)
        log.info("resuming %s after step %d", self.folder.path, step)
        return step


# --- evaluation -------------------------------------------------------------------------------------------------------------------


async def run_evaluation(run: TrainRun, rows: RLHFDataset) -> dict[str, float]:
    """The modes of `run.eval` on the rows; `eval/<mode>/*` numbers. Empty when both are switched off."""
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(RealWorld(run_seed=run.trainer.seed))
        rollout = await stack.enter_async_context(open_rollout(run, world))
        await world.offload(_drop_overlong, rows, rollout.template, run)
        if not run.rollout.reads_model:
            await rollout.engine.publish(0, await world.offload(weights_of, run.model))
        measure = await open_measure(run, rows, rollout, world, stack)
        return {} if measure is None else await measure(rollout.engine, rollout.engine.version)


@asynccontextmanager
async def open_eval_engine(run: TrainRun, world: World, decode: Decode) -> AsyncIterator[RolloutEngine]:
    """A second engine of the same model, at version 0, for an evaluation beside training."""
    async with await world.offload(make_eval_engine, run, world, decode) as engine:
        yield engine
