"""Whole runs with adapters: resumed byte for byte, the same however they are published, and a checkpoint has the base once."""

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl import assembly
from asyncrl.config import TrainRun, load_run
from asyncrl.observe.metrics import read_metrics
from asyncrl.preflight import check_train

LORA = ("model.lora_rank=2", "actor.use_kl_loss=true", "actor.optim.lr=0.01", "rollout.deterministic=true")
LAST = "checkpoints/global_step_3"
TOLD = ("actor/kl_loss", "actor/entropy", "actor/grad_norm", "rollout_corr/kl", "response_length/mean")


async def train(config: Path, *overrides: str, resume: bool = False) -> Path:
    run = load_run(TrainRun, config, [*LORA, *overrides])
    # The checks run a loop of their own, so they need a thread here; the command line has no loop yet when it calls them.
    return await assembly.run_training(run, await asyncio.to_thread(check_train, run), resume=resume)


@pytest.mark.long
async def test_a_resumed_run_that_publishes_adapters_is_one_that_publishes_whole_weights_and_never_stopped(config: Path) -> None:
    whole = await train(config, "trainer.total_training_steps=3", "trainer.experiment_name=whole")
    halves = ("model.lora_publish=adapter", "trainer.experiment_name=halves")
    await train(config, "trainer.total_training_steps=2", *halves)
    resumed = await train(config, "trainer.total_training_steps=3", *halves, resume=True)
    one, other = (
        {path.relative_to(folder): path.read_bytes() for path in (folder / LAST).rglob("*.safetensors")}
        for folder in (whole, resumed)
    )
    assert one == other
    rows, again = (read_metrics(folder / "metrics.jsonl")[-1] for folder in (whole, resumed))
    assert [rows[name] for name in TOLD] == [again[name] for name in TOLD]
    assert rows["actor/kl_loss"] > 0
    kept = load_file(resumed / LAST / "model" / "model.safetensors")
    assert not any("lora" in name for name in kept), "what is evaluated is a plain model"
    state = load_file(resumed / LAST / "actor" / "whole.safetensors")
    assert all(".lora_" in name for name in state), "the base is at model.path, and merged in model/"
    assert any(name.startswith("weight/") for name in state)
    assert (resumed / "hf" / "adapter" / "adapter_config.json").is_file()
