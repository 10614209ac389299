"""Everything about a run that can be checked before torch is imported, and the words for `--dry-run`.

cli -> [preflight] -> assembly. Raises UserError with one line that names file, row, key or field.
"""

import asyncio
import importlib.util
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.agents.registry import check_agent_name
from asyncrl.config import OpenAIConfig, RolloutConfig, SFTRun, TrainRun, load_run, to_toml, topology_of
from asyncrl.config.addresses import read_key
from asyncrl.config.algorithms import ESTIMATORS
from asyncrl.dataset import RLHFDataset, read_table
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.model_files import check_adapters, check_context, check_model_files, check_weights
from asyncrl.observe.run_folder import RunFolder, check_place
from asyncrl.rewards.scoring import check_function
from asyncrl.tools import load_tools
from asyncrl.world import RealWorld

log = logging.getLogger(__name__)

_WITHOUT_SIBLINGS = {"gae", "reinforce_plus_plus", "remax"}
"""Estimators whose baseline is not made of the other sessions of the prompt: a group of one learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Rows of a run, read and checked."""

    train_rows: RLHFDataset
    val_rows: RLHFDataset | None


def check_train(run: TrainRun) -> RunInputs:
    """Files, rows, model directory, tools, reward function, algorithms, batch arithmetic and place of a training run."""
    check_place(run.trainer.default_local_dir, run.trainer.experiment_name)
    _check_parts(run)
    check_adapters(run.model)
    _check_critic(run)
    _check_choices(run)
    inputs = RunInputs(
        train_rows=RLHFDataset(run.data.train_files, run.data, max_rows=run.data.max_rows),
        val_rows=_val_rows(run),
    )
    _check_warmup(run, total_steps(run, len(inputs.train_rows)))
    if run.rollout.n == 1 and run.algorithm.adv_estimator in ESTIMATORS.keys() - _WITHOUT_SIBLINGS:
        log.warning("rollout.n = 1: a group of one has advantage 0, so nothing is learned; use at least 2 sessions a prompt")
    return inputs


def check_sft(run: SFTRun) -> None:
    """Files, model directory, tools and place of a warm start."""
    check_place(run.trainer.default_local_dir, run.trainer.experiment_name)
    check_model_files(run.model)
    check_adapters(run.model)
    load_tools(run.agent.tools)
    for files in run.sft.stages or [run.data.train_files]:
        read_table(files, key="sft.stages" if run.sft.stages else "data.train_files")


def check_eval(checkpoint: Path, file: Path, config: Path | None, overrides: Sequence[str]) -> tuple[TrainRun, RLHFDataset]:
    """The run that evaluates `checkpoint` on `file`, by its own configuration unless another is given; and the rows."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such checkpoint or model directory")
    model = model_folder(checkpoint)
    source = config or _config_of(checkpoint)
    # JSON's strings are TOML's.
    given = [f"model.path={json.dumps(str(model))}", f"data.val_files={json.dumps(str(file))}", *overrides]
    run = load_run(TrainRun, source, given)
    _check_parts(run)
    return run, RLHFDataset(run.data.val_files, run.data, key="FILE", max_rows=run.eval.max_rows)


def model_folder(checkpoint: Path) -> Path:
    """The Hugging Face directory of a checkpoint (`model`), of a finished run (`hf`), or the directory itself.

    Raises CheckpointError for a folder that is none of them.
    """
    for folder in (checkpoint / "model", checkpoint / "hf", checkpoint):
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(
        f"{checkpoint}: neither a checkpoint, nor the folder of a finished run, nor a Hugging Face model directory; a checkpoint "
        "is <run folder>/checkpoints/global_step_N"
    )


def _config_of(checkpoint: Path) -> Path:
    for folder in (checkpoint, *checkpoint.resolve().parents[:3]):
        if RunFolder(path=folder).config.is_file():
            return RunFolder(path=folder).config
    raise ConfigError(f"{checkpoint}: no config.toml of a run at it or above it; give one with --config")


def _val_rows(run: TrainRun) -> RLHFDataset | None:
    if not run.data.val_files:
        return None
    return RLHFDataset(run.data.val_files, run.data, key="data.val_files", max_rows=run.eval.max_rows)


def _check_parts(run: TrainRun) -> None:
    """What training and evaluation both need: model directory, agent loop, tools, reward function."""
    check_model_files(run.model)
    check_context(run.model, run.max_model_len)
    check_agent_name(run.agent.name)
    load_tools(run.agent.tools)
    asyncio.run(_check_reward(run))
    _check_engine(run.rollout)


def _check_engine(rollout: RolloutConfig) -> None:
    """What can be known of an engine before it is started."""
    from asyncrl.rollout.vllm.installed import check_installed
    from asyncrl.rollout.vllm.settings import check_free_args

    if rollout.name == "vllm":
        check_free_args(rollout.vllm.engine_args)
        check_installed()
    if rollout.name == "openai":
        _check_client(rollout.openai)
        if rollout.transfer == "nccl":  # vLLM's own sending side
            check_installed('rollout.weight_transfer = "nccl"')


def _check_client(openai: OpenAIConfig) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("rollout.name = \"openai\" needs aiohttp, which is not installed: pip install 'asyncrl[openai]'")
    read_key(openai.api_key_env, where="rollout.openai.api_key_env", error=ConfigError)
    if openai.weights_dir and not Path(openai.weights_dir).is_dir():
        raise ConfigError(f"rollout.openai.weights_dir = {openai.weights_dir!r}: no such folder")


def _check_critic(run: TrainRun) -> None:
    """Its own model directory, when it has one."""
    if run.has_critic and run.critic.model_path:
        check_weights(run.critic.model_path, key="critic.model_path")
        check_context(run.critic_model, run.max_model_len, key="critic.model_path")


def _check_choices(run: TrainRun) -> None:
    """What only the algorithms themselves know: are the user's own to be had, and is each value one that they take?

    Torch is loaded where there is something to ask.
    """
    algorithm, actor = run.algorithm, run.actor
    is_own = ":" in algorithm.adv_estimator or ":" in actor.loss_mode
    if is_own or algorithm.adv_options or actor.loss_options or actor.clip_ratio_c or algorithm.rollout_correction.is_on:
        from asyncrl.chosen import check_choices

        check_choices(run)


def _check_warmup(run: TrainRun, steps: int) -> None:
    if run.has_critic and run.trainer.critic_warmup >= steps:
        raise ConfigError(
            f"trainer.critic_warmup = {run.trainer.critic_warmup} leaves the actor none of the {steps} training steps; lower it"
        )


async def _check_reward(run: TrainRun) -> None:
    length, components = run.data.max_response_length, run.algorithm.gdpo_reward_keys
    async with RealWorld() as world:
        await check_function(run.reward, world=world, max_response_length=length, components=components)


def total_steps(run: TrainRun, num_rows: int) -> int:
    """Training steps of the run, whole versions all of them. Raises ConfigError when the rows do not fill one version."""
    batch, epochs = run.data.train_batch_size, run.trainer.total_epochs
    if run.trainer.total_training_steps:
        return run.trainer.total_training_steps
    wanted = batch * run.publish_freq
    if num_rows * epochs < wanted:
        steps = f" x trainer.publish_freq = {run.publish_freq}" if run.publish_freq > 1 else ""
        raise ConfigError(
            f"data.train_batch_size = {batch}{steps} but the training files give {num_rows} rows x {epochs} epochs = "
            f"{num_rows * epochs}; lower the batch size or add rows"
        )
    return num_rows * epochs // wanted * run.publish_freq


_OLD_LOG_PROBS = {
    "elide": "left out: one update a batch, so the ratio of the loss is 1, and its clips never act",
    "recompute": "a forward pass before the first update",
    "bypass": "the engine's own",
}


def describe_batch(run: TrainRun, *, num_rows: int) -> str:
    """The resolved configuration, then prompts, trajectories, mini-batches and optimizer steps."""
    batch, n, mini = run.data.train_batch_size, run.rollout.n, run.mini_batch_groups
    steps = total_steps(run, num_rows)
    lines = [
        f"rows                {num_rows}",
        f"training steps      {steps}",
        f"a training step     {batch} prompts x {n} sessions = {batch * n} trajectories (more when a session forks)",
        f"a mini-batch        {mini} groups = {mini * n} trajectories; {batch // mini} a pass x {run.actor.ppo_epochs} passes",
        f"optimizer steps     {run.updates_per_batch} a training step, {steps * run.updates_per_batch} in all",
        f"tokens a trajectory {run.data.max_prompt_length} prompt + {run.data.max_response_length} response at most",
        f"weight versions     {_versions(run, steps)}",
        f"old_log_probs       {_OLD_LOG_PROBS[run.old_log_probs]}",
        *_engine_lines(run.rollout),
        *_critic_lines(run),
        *_rank_lines(run),
    ]
    return to_toml(run) + "\n# batch arithmetic\n" + "\n".join(f"# {line}" for line in lines)


def _versions(run: TrainRun, steps: int) -> str:
    each = "one a training step" if run.publish_freq == 1 else f"one every {run.publish_freq} training steps"
    behind = f"tokens are {run.max_staleness} behind at most" if run.max_staleness else "no token is behind"
    return f"{steps // run.publish_freq}, {each}; {behind}"


_TRANSFERS = {
    "shm": "shared memory",
    "nccl": "NCCL",
    "directory": "safetensors files",
}


def _engine_lines(rollout: RolloutConfig) -> list[str]:
    """Which engines there are, and where; how new weights reach them."""
    rows = f"{rollout.max_num_seqs} rows" + (" each" if rollout.count > 1 else "")
    engines = "1 engine" if rollout.count == 1 else f"{rollout.count} engines"
    if rollout.name == "torch":
        return [f"engine              torch: {engines} in this process, {rows}"]
    vllm, folder = rollout.vllm, rollout.openai.weights_dir if rollout.transfer == "directory" else ""
    size = "" if rollout.topology.tp == 1 else f" of {rollout.topology.tp} devices"
    places = f" ({'; '.join(vllm.devices)})" if vllm.devices else ""
    where = f"{size}{places} beside this process" if rollout.name == "vllm" else f" at {', '.join(rollout.openai.base_urls)}"
    return [
        f"engine              {rollout.name}: {engines}{where}, {rows}",
        f"new weights         by {_TRANSFERS[rollout.transfer]}" + (f" in {folder}" if folder else ""),
    ]


def _rank_lines(run: TrainRun) -> list[str]:
    """Layout of the ranks, and what of a mini-batch each of them takes."""
    if run.cluster.kind == "process":
        return []
    topology, budget = topology_of(run), run.actor.ppo_max_token_len_per_gpu
    trajectories = run.mini_batch_groups * run.rollout.n
    copies = f", in {topology.replicas} copies" if topology.replicas > 1 else ""
    longest = run.data.max_prompt_length + run.data.max_response_length
    processes = "1 process" if topology.world == 1 else f"{topology.world} processes"
    cut = "whole on each rank" if topology.shards == 1 else f"cut over {topology.shards} ranks"
    return [
        f"ranks               {processes}, trainer.num_threads = {run.trainer.num_threads} in each",
        f"data parallel size  ranks / (tensor x sequence) = {topology.world} / ({topology.tp} x {topology.sp}) = {topology.dp}",
        f"weights             {cut}{copies}" + (f", and by {topology.tp} (tensor)" if topology.tp > 1 else ""),
        f"a rank's part       {trajectories} / {topology.dp} = {trajectories / topology.dp:g} trajectories of a mini-batch",
        f"a micro-batch       {budget} x {topology.sp} = {budget * topology.sp} tokens at most; a trajectory has up to {longest}",
    ]


def _critic_lines(run: TrainRun) -> list[str]:
    if not run.has_critic:
        return []
    alone = f"; alone in the first {run.trainer.critic_warmup} training steps" if run.trainer.critic_warmup else ""
    return [f"critic              starts from {run.critic_model.path}{alone}"]
