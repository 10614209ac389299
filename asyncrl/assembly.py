"""Opens the real edges of a run and hands them to the controller, or to an evaluation.

cli -> preflight -> [assembly] -> wiring -> trainer
"""

import functools
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.agents.chat_template import ChatTemplate, load_chat_template
from asyncrl.chosen import check_choices
from asyncrl.config import TrainRun
from asyncrl.dataset import RLHFDataset
from asyncrl.errors import CheckpointError
from asyncrl.observe.run_folder import RunFolder, create_run_folder, run_folders
from asyncrl.observe.sight import open_sight
from asyncrl.ports import Decode, RolloutEngine, World
from asyncrl.preflight import RunInputs, total_steps
from asyncrl.rewards.scoring import open_scorer
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.stages.advantage import KLCoefficient, kl_coefficient
from asyncrl.stages.stage import Stage
from asyncrl.stopping import Stop, on_signals
from asyncrl.tools import Tool, load_tools
from asyncrl.trainer import Border, Trainer
from asyncrl.training.actor import Actor, Reference
from asyncrl.training.checkpoint import Checkpoint, forget_newer, kept_steps, newest_valid, save_checkpoint
from asyncrl.training.critic import Critic
from asyncrl.training.export import export_model
from asyncrl.training.model import load_model
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.wiring import Edges, Rollout, open_controller, open_measure, stages_of
from asyncrl.world import RealWorld

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What is read before a run is anything: the engine is not started, and no folder is made for a model that cannot be used."""

    engine: TorchEngine
    template: ChatTemplate
    tools: dict[str, Tool]


async def read_model(run: TrainRun, world: World) -> LoadedModel:
    """The tools, the chat template, and an engine with its own copy of the model. Raises UserError."""
    torch.set_num_threads(run.trainer.num_threads)
    tools = load_tools(run.agent.tools)
    template = await world.offload(load_chat_template, run.model, [tool.schema for tool in tools.values()])
    engine = await world.offload(_make_engine, run, template.decode)
    return LoadedModel(engine=engine, template=template, tools=tools)


def _make_engine(run: TrainRun, decode: Decode) -> TorchEngine:
    """With its own copy of the model; not started."""
    return TorchEngine(
        load_model(run.model),
        max_num_seqs=run.rollout.max_num_seqs,
        context_len=run.max_model_len,
        deterministic=run.rollout.deterministic,
        decode=decode,
    )


@asynccontextmanager
async def open_rollout(
    run: TrainRun, world: World, *, loaded: LoadedModel | None = None, folder: RunFolder | None = None
) -> AsyncIterator[Rollout]:
    """The engine started, the scorer, the chat template and the tools. loaded: from `read_model`; None: it is called."""
    parts = loaded or await read_model(run, world)
    scoring = open_scorer(
        run.reward,
        world=world,
        log=folder.reward_log if folder else None,
        max_response_length=run.data.max_response_length,
        components=run.algorithm.gdpo_reward_keys,
    )
    async with scoring as scorer, parts.engine:
        yield Rollout(engine=parts.engine, scorer=scorer, template=parts.template, tools=parts.tools)


# --- training -------------------------------------------------------------------------------------------------------------------


async def run_training(run: TrainRun, inputs: RunInputs, *, resume: bool = False) -> Path:
    """A whole training run; returns its folder. SIGINT and SIGTERM end it at the next border with a checkpoint.

    resume: go on from the newest valid checkpoint of the newest run of this name that has one. Raises CheckpointError when there
    is none, or when the configuration changes what a run may not change.
    """
    stop = Stop()
    async with AsyncExitStack() as stack:
        stack.enter_context(on_signals(stop))
        world = await stack.enter_async_context(RealWorld(run_seed=run.trainer.seed))
        found = await world.offload(_find_checkpoint, run) if resume else None
        loaded = await read_model(run, world)
        await world.offload(_drop_overlong, inputs.train_rows, loaded.template, run)
        if inputs.val_rows is not None:
            await world.offload(_drop_overlong, inputs.val_rows, loaded.template, run)
        await world.offload(check_choices, run)  # before there is a folder
        folder, checkpoint = found or (await world.offload(_new_folder, run), None)
        rollout = await stack.enter_async_context(open_rollout(run, world, loaded=loaded, folder=folder))
        gc.freeze()  # rows live as long as the run: a full collection need not walk them on the loop again and again
        if checkpoint is not None:
            await world.offload(_refuse_changes, run, checkpoint, inputs.train_rows)
            log.info("resuming %s after step %d", folder.path, checkpoint.step)
        trainer = await stack.enter_async_context(open_trainer(run, inputs, folder, checkpoint, rollout, world, stop))
        await trainer.fit()
        await world.offload(_export, run, trainer.actor, folder, pool="model")
    return folder.path


@asynccontextmanager
async def open_trainer(
    run: TrainRun,
    inputs: RunInputs,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    rollout: Rollout,
    world: World,
    stop: Stop,
) -> AsyncIterator[Trainer]:
    """The rooms of training, at the border of the checkpoint or at the beginning; leaving ends the groups in flight."""
    async with AsyncExitStack() as stack:
        rows = inputs.train_rows
        steps = total_steps(run, len(rows))
        border = Border() if checkpoint is None else Border(step=checkpoint.step, cursor=int(checkpoint.trainer["cursor"]))
        # First of all, as it holds the lock of the run: the checkpoints of one that is still going are not ours to forget.
        queue = await stack.enter_async_context(_open_queue(run, folder, border, world))
        actor, critic = await world.offload(_open_learners, run, steps, checkpoint, pool="model")
        fixed = await world.offload(_fixed_by_a_run, run, rows)
        kl = _kl_coefficient(run, checkpoint)
        edges = Edges(
            world=world,
            rollout=rollout,
            queue=queue,
            policy=actor,
            stages=await world.offload(_stages, run, actor, critic, kl, pool="model"),
            rows=rows,
            val_rows=inputs.val_rows,
            save=functools.partial(_save, run, world, actor, critic, folder, fixed, kl),
            open_eval_engine=functools.partial(open_eval_engine, run, world, rollout.template.decode),
            open_sight=functools.partial(
                open_sight,
                folder,
                run.trainer,
                world=world,
                total_steps=steps,
                step=border.step,
                incarnation=queue.incarnation,
            ),
        )
        begin = None if checkpoint is None else border
        yield await stack.enter_async_context(open_controller(run, edges, stop=stop, total_steps=steps, border=begin))


@asynccontextmanager
async def _open_queue(run: TrainRun, folder: RunFolder, border: Border, world: World) -> AsyncIterator[TransferQueue]:
    """The store with its journal. Raises JournalInUseError while another process runs in the folder, and CheckpointError when the
    journal begins only after the border, or ends before it."""
    store = run.store
    path = folder.journal if store.journal else None
    async with open_queue(path, world=world, sync=store.sync, commit_timeout_s=store.commit_timeout_s) as queue:
        if path is not None and border.step:
            _check_journal(queue, path, border.step)
        yield queue


def _check_journal(queue: TransferQueue, path: Path, step: int) -> None:
    """Raises CheckpointError unless the checkpoint of `step` lies within the journal. One that holds nothing yet begins with it."""
    if queue.purged_step > step:
        raise CheckpointError(
            f"--resume: {path} begins after step {queue.purged_step}, the newest whole checkpoint is of step {step}; "
            "put the newer checkpoint back, or start a new run without --resume"
        )
    if queue.is_new:
        log.warning("%s holds nothing yet: its counts of groups begin after step %d", path, step)
    elif queue.last_step < step:
        raise CheckpointError(
            f"--resume: {path} ends with step {queue.last_step}, the newest whole checkpoint is of step {step}: the steps between "
            "were trained without this journal; put theirs in its place, or remove it to go on with one whose counts begin anew"
        )


def _stages(run: TrainRun, actor: Actor, critic: Critic | None, kl: KLCoefficient | None) -> tuple[Stage, ...]:
    """Loads the reference when a KL term is on."""
    reference = Reference(run).log_probs if run.needs_reference else None
    return stages_of(run, actor, reference=reference, critic=critic, kl=kl)


def _kl_coefficient(run: TrainRun, checkpoint: Checkpoint | None) -> KLCoefficient | None:
    """As the checkpoint has left it."""
    saved = None if checkpoint is None else checkpoint.trainer.get("kl_coef")
    return kl_coefficient(run.algorithm, None if saved is None else float(saved))


def _open_learners(run: TrainRun, steps: int, checkpoint: Checkpoint | None) -> tuple[Actor, Critic | None]:
    """The actor, and the critic where the advantage wants values. steps: of the run; in the critic's warm-up the actor rests."""
    torch.manual_seed(run.trainer.seed)
    trained = max(steps - run.trainer.critic_warmup, 1)
    actor = Actor(run, total_updates=trained * run.updates_per_batch)
    critic = Critic(run, total_updates=steps * run.updates_per_batch) if run.has_critic else None
    if checkpoint is not None:
        actor.load(checkpoint.load())
        if critic is not None:
            critic.load(checkpoint.load_critic())
        forget_newer(checkpoint)
    return actor, critic


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
    run: TrainRun,
    world: World,
    actor: Actor,
    critic: Critic | None,
    folder: RunFolder,
    fixed: dict[str, int | str],
    kl: KLCoefficient | None,
    border: Border,
) -> list[int]:
    limit_s = run.trainer.stage_timeout_s
    state = await world.offload(actor.state, pool="model", timeout_s=limit_s)
    critic_state = None if critic is None else await world.offload(critic.state, pool="model", timeout_s=limit_s)
    save = functools.partial(
        save_checkpoint,
        folder.checkpoints,
        state,
        step=border.step,
        version=border.step,
        model=run.model,
        trainer={"cursor": border.cursor, **fixed, **({} if kl is None else {"kl_coef": kl.controller.coef})},
        keep=run.trainer.max_ckpt_to_keep,
        critic=critic_state,
    )
    # The one thread that reads the weights: a save that was cut short has ended before another one of the same step begins.
    await world.offload(save, pool="model", timeout_s=limit_s)
    return await world.offload(kept_steps, folder.checkpoints)


def _fixed_by_a_run(run: TrainRun, rows: RLHFDataset) -> dict[str, int | str]:
    """What a resumed run may not change: the meaning of a step, and the order of the feed."""
    return {
        "data.train_batch_size": run.data.train_batch_size,
        "rollout.n": run.rollout.n,
        "updates_per_batch": run.updates_per_batch,
        "trainer.seed": run.trainer.seed,
        "rows of data.train_files": len(rows),
        "digest of data.train_files": rows.digest,
    }


def _new_folder(run: TrainRun) -> RunFolder:
    folder = create_run_folder(run.trainer.default_local_dir, run.trainer.experiment_name)
    folder.write_config(run)
    return folder


def _find_checkpoint(run: TrainRun) -> tuple[RunFolder, Checkpoint]:
    folders = run_folders(run.trainer.default_local_dir, run.trainer.experiment_name)
    for folder in folders:
        checkpoint = newest_valid(folder.checkpoints, log.warning)
        if checkpoint is not None:
            return folder, checkpoint
        log.warning("--resume: %s has no whole checkpoint", folder.path)
    names = ", ".join(str(folder.path) for folder in folders)
    raise CheckpointError(f"--resume: no whole checkpoint in {names}; start a new run without --resume")


def _refuse_changes(run: TrainRun, checkpoint: Checkpoint, rows: RLHFDataset) -> None:
    for key, value in _fixed_by_a_run(run, rows).items():
        if checkpoint.trainer.get(key) != value:
            raise CheckpointError(
                f"--resume: {checkpoint.path} was made with {key} = {checkpoint.trainer.get(key)}, now it is {value}; "
                "a run cannot change it"
            )
    if run.has_critic != (checkpoint.critic_counters is not None):
        has, now = ("has no critic", "wants one") if run.has_critic else ("has a critic", "wants none")
        raise CheckpointError(
            f"--resume: {checkpoint.path} {has}, and algorithm.adv_estimator = {run.algorithm.adv_estimator!r} {now}; "
            "a run cannot change it"
        )


def _export(run: TrainRun, actor: Actor, folder: RunFolder) -> None:
    """The final weights as a Hugging Face directory, `<run folder>/hf`."""
    state = actor.state()
    export_model(folder.export, state.model, state.model_config_json, run.model)


# --- evaluation -------------------------------------------------------------------------------------------------------------------


async def run_evaluation(run: TrainRun, rows: RLHFDataset) -> dict[str, float]:
    """The modes of `run.eval` on the rows; `eval/<mode>/*` numbers. Empty when both are switched off."""
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(RealWorld(run_seed=run.trainer.seed))
        rollout = await stack.enter_async_context(open_rollout(run, world))
        await world.offload(_drop_overlong, rows, rollout.template, run)
        measure = await open_measure(run, rows, rollout, world, stack)
        return {} if measure is None else await measure(rollout.engine, rollout.engine.version)


@asynccontextmanager
async def open_eval_engine(run: TrainRun, world: World, decode: Decode) -> AsyncIterator[RolloutEngine]:
    """A second engine of the same model, at version 0, for an evaluation beside training."""
    async with await world.offload(_make_engine, run, decode) as engine:
        yield engine
