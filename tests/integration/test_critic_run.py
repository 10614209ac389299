"""Whole runs with a critic: it learns, it is resumed byte for byte, and a run cannot gain or lose it."""

import asyncio
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl import assembly
from asyncrl.config import TrainRun, load_run
from asyncrl.errors import CheckpointError, ConfigError, ModelError
from asyncrl.observe.metrics import read_metrics
from asyncrl.preflight import check_train, describe_batch

GAE = ("algorithm.adv_estimator=gae", "critic.optim.lr=0.01", "rollout.deterministic=true")

KIND = """
def score(data_source, solution_str, ground_truth, extra_info):
    return 0.8
"""


async def train(config: Path, *overrides: str, resume: bool = False) -> Path:
    run = load_run(TrainRun, config, [*GAE, *overrides])
    # The checks run a loop of their own, so they need a thread here; the command line has no loop yet when it calls them.
    return await assembly.run_training(run, await asyncio.to_thread(check_train, run), resume=resume)


def _files(folder: Path, *names: str) -> list[bytes]:
    return [(folder / name).read_bytes() for name in names]


@pytest.mark.long
async def test_the_critic_learns_what_the_policy_earns(config: Path) -> None:
    """The same for every answer, so there is nothing else to learn."""
    (config.parent / "kind_reward.py").write_text(KIND)
    folder = await train(config, "reward.function=kind_reward:score", "trainer.total_training_steps=10", "rollout.n=1")
    steps = read_metrics(folder / "metrics.jsonl")
    assert steps[0]["critic/values/max"] == 0.0, "a new critic expects nothing"
    assert steps[0]["critic/vf_loss"] == pytest.approx(0.5 * 0.8**2)
    assert steps[-1]["critic/vf_loss"] < 0.1 * steps[0]["critic/vf_loss"]
    assert steps[-1]["critic/values/mean"] == pytest.approx(0.8, abs=0.3)
    told = {"critic/vf_clipfrac", "critic/vpred_mean", "timing_s/values", "timing_s/update_critic"}
    for row in steps:
        assert told <= row.keys()
        assert row["critic/grad_norm"] > 0
        assert (row["critic/lr"], row["critic/skipped_updates"]) == (0.01, 0)


@pytest.mark.long
async def test_a_resumed_run_has_the_actor_and_the_critic_of_one_that_never_stopped(config: Path) -> None:
    whole = await train(config, "trainer.total_training_steps=3", "trainer.experiment_name=whole")
    await train(config, "trainer.total_training_steps=2", "trainer.experiment_name=halves")
    halves = await train(config, "trainer.total_training_steps=3", "trainer.experiment_name=halves", resume=True)
    model = ["model/config.json", "model/model.safetensors"]
    critic = [f"critic/{name}" for name in [*model, "whole.safetensors"]]
    files = [*model, "actor/whole.safetensors", *critic]
    last = "checkpoints/global_step_3"
    assert _files(whole / last, *files) == _files(halves / last, *files)
    begun, end = (load_file(halves / f"checkpoints/global_step_{step}/critic/model/model.safetensors") for step in (2, 3))
    assert any(not begun[name].equal(end[name]) for name in end), "nothing was learned, so the comparison proves nothing"
    manifest = json.loads((halves / last / "manifest.json").read_text())
    assert {*critic} <= manifest["files"].keys()
    assert manifest["counters"]["critic"]["updates"] == 3


async def test_a_critic_beside_everything_else(config: Path) -> None:
    """Rejection, KL in the reward, several passes of several mini-batches of several micro-batches."""
    correction = 'algorithm.rollout_correction={ rollout_rs = "token_k2", rollout_rs_threshold = [1e-14] }'
    passes = ("actor.ppo_mini_batch_size=1", "actor.ppo_epochs=2", "critic.ppo_max_token_len_per_gpu=80")
    discount = ("algorithm.use_kl_in_reward=true", "algorithm.gamma=0.9", "algorithm.lam=0.8")
    folder = await train(config, "trainer.total_training_steps=2", correction, *passes, *discount)
    steps = read_metrics(folder / "metrics.jsonl")
    assert 0 < steps[0]["rollout_corr/rollout_rs_masked_fraction"] < 1, "nothing was rejected, so the run shows less than it says"
    assert all(row["critic/vf_loss"] > 0 and row["critic/skipped_updates"] == 0 for row in steps)
    manifest = json.loads((folder / "checkpoints/global_step_2/manifest.json").read_text())
    assert [counters["updates"] for counters in manifest["counters"].values()] == [8, 8]


async def test_in_the_warm_up_the_critic_learns_alone(config: Path) -> None:
    overrides = ["trainer.total_training_steps=3", "trainer.critic_warmup=2", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=3"]
    folder = await train(config, *overrides)
    actor, critic = (
        [(folder / f"checkpoints/global_step_{step}/{name}/model.safetensors").read_bytes() for step in (1, 2, 3)]
        for name in ("model", "critic/model")
    )
    assert actor[0] == actor[1] != actor[2]
    assert len(set(critic)) == 3
    steps = read_metrics(folder / "metrics.jsonl")
    assert ["actor/lr" in row for row in steps] == [False, False, True]
    assert all("critic/vf_loss" in row for row in steps)
    manifest = json.loads((folder / "checkpoints/global_step_3/manifest.json").read_text())
    assert [manifest["counters"][role]["updates"] for role in ("actor", "critic")] == [1, 3]


def test_a_run_is_told_of_its_critic_before_it_begins(config: Path) -> None:
    run = load_run(TrainRun, config, [*GAE, "trainer.total_training_steps=3", "trainer.critic_warmup=2", "rollout.n=1"])
    rows = check_train(run).train_rows
    told = describe_batch(run, num_rows=len(rows)).splitlines()
    assert f"# critic              starts from {run.model.path}; alone in the first 2 training steps" in told
    with pytest.raises(ConfigError, match=r"trainer\.critic_warmup = 3 leaves the actor none of the 3 training steps"):
        check_train(load_run(TrainRun, config, [*GAE, "trainer.total_training_steps=3", "trainer.critic_warmup=3"]))
    with pytest.raises(ModelError, match=r"critic\.model_path = 'absent': no such folder"):
        check_train(load_run(TrainRun, config, [*GAE, "critic.model_path=absent"]))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("gae", "reinforce_plus_plus", r"began with a critic \(algorithm\.adv_estimator\) = True, now it is False"),
        ("reinforce_plus_plus", "gae", r"began with a critic \(algorithm\.adv_estimator\) = False, now it is True"),
    ],
)
async def test_a_run_cannot_gain_or_lose_its_critic(config: Path, first: str, second: str, message: str) -> None:
    async def part(estimator: str, *, resume: bool) -> None:
        run = load_run(TrainRun, config, ["trainer.total_training_steps=1", f"algorithm.adv_estimator={estimator}"])
        await assembly.run_training(run, await asyncio.to_thread(check_train, run), resume=resume)

    await part(first, resume=False)
    with pytest.raises(CheckpointError, match=message):
        await part(second, resume=True)
