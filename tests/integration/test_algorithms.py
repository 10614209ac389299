"""Every estimator, every loss and every correction in a run of the real trainer: reachable from the configuration, and finite."""

import math
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from asyncrl.config.algorithms import ESTIMATORS, LOSSES
from asyncrl.errors import ConfigError, TooManyFailuresError
from asyncrl.observe.metrics import read_metrics
from asyncrl.training.checkpoint import open_checkpoint
from tests.integration.test_training_run import train

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) % 3 / 2, "even": len(solution_str) % 2, "first": float(solution_str[:1].isdigit())}

def always(data_source, solution_str, ground_truth, extra_info):
    return 0.97
"""
OWN = """
import torch
from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.advantages.registry import Estimator
from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss
from asyncrl.algorithms.losses.registry import LossSpec

def raw(inputs: AdvantageInputs, *, scale: float = 1.0) -> Advantages:
    found = inputs.rewards_BR.sum(1, keepdim=True) * inputs.mask_BR * scale
    return Advantages(advantages_BR=found, returns_BR=found)

def plain(inputs: LossInputs, *, clip_ratio_high: float = 0.2, own: float = 1.0) -> PolicyLoss:
    seen = torch.full_like(inputs.log_prob_n.detach(), clip_ratio_high)
    return PolicyLoss(loss_n=-inputs.advantages_n * inputs.log_prob_n * own, facts={"seen_clip": seen})

def strict(inputs: LossInputs, *, bound: float) -> PolicyLoss:
    return plain(inputs)

fixed = LossSpec(function=plain, aggregation="token-mean")
squared = Estimator(function=raw, needs=frozenset({"old_log_probs", "sum_pi_squared"}))
"""
ESTIMATOR_KEYS = {
    "gdpo": ["algorithm.gdpo_reward_keys=['even','first']", "algorithm.adv_options.gdpo_reward_weights=[1.0,0.5]"],
    "gpg": ["algorithm.adv_options.gpg_f_norm=2.0"],
    "reinforce_plus_plus": ["algorithm.gamma=0.9"],
}
LOSS_KEYS = {"dro": ["actor.loss_options.dro_beta=0.5"], "clip_cov": ["actor.loss_options.clip_cov_ratio=0.2"]}
PAIRS = list(zip(ESTIMATORS, [*LOSSES, "vanilla"], strict=True))


@pytest.fixture(autouse=True)
def modules(config: Path) -> None:
    (config.parent / "part_reward.py").write_text(REWARD)
    (config.parent / "own_algorithms.py").write_text(OWN)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (config.parent / "documented_algorithms.py").write_text(example)


@pytest.mark.long
@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
async def test_every_estimator_and_every_loss_trains(config: Path, estimator: str, loss: str) -> None:
    overrides = [f"algorithm.adv_estimator={estimator}", f"actor.loss_mode={loss}"]
    overrides += [*ESTIMATOR_KEYS.get(estimator, []), *LOSS_KEYS.get(loss, [])]
    folder = await train(
        config, "reward.function=part_reward:score", "trainer.total_training_steps=2", "actor.ppo_mini_batch_size=1", *overrides
    )
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["training/global_step"] for row in rows] == [1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["actor/skipped_updates"] == 0 for row in rows)
    assert {"rollout_corr/kl", "rollout_corr/k3_kl", "actor/entropy", "critic/advantages/max"} <= set(rows[0])
    assert abs(rows[0]["rollout_corr/kl"]) < 1e-4  # engine and trainer have the same weights


CORRECTIONS = {
    "token": ["rollout_is=token", "rollout_is_threshold=1.5"],
    "band": ["rollout_is=sequence", "rollout_is_threshold='0.5_2'", "rollout_is_batch_normalize=true"],
    "rejection": ["rollout_rs=['token_k2','seq_mean_k1']", "rollout_rs_threshold=['0.5','0.5_2']"],
    "both": ["rollout_is=token", "rollout_rs=seq_max_k3", "rollout_rs_threshold=0.5"],
}


@pytest.mark.parametrize("kind", CORRECTIONS)
async def test_every_correction_trains(config: Path, kind: str) -> None:
    overrides = [f"algorithm.rollout_correction.{override}" for override in CORRECTIONS[kind]]
    folder = await train(config, "trainer.total_training_steps=2", "actor.ppo_epochs=2", *overrides)
    rows = read_metrics(folder / "metrics.jsonl")
    assert ("rollout_corr/rollout_is_mean" in rows[0]) == (kind != "rejection")
    assert ("rollout_corr/rollout_rs_masked_fraction" in rows[0]) == (kind in ("rejection", "both"))
    if kind == "token":
        assert rows[0]["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-4)


async def test_the_metrics_that_the_pages_name_are_those_of_a_run(config: Path) -> None:
    keys = ["rollout_is=token", "rollout_rs=token_k2", "rollout_rs_threshold=5"]
    overrides = [f"algorithm.rollout_correction.{key}" for key in keys]
    overrides += ["reward.manager=dapo", "reward.overlong_buffer_len=6", "algorithm.use_kl_in_reward=true"]
    folder = await train(config, "trainer.total_training_steps=1", *overrides)
    (row,) = read_metrics(folder / "metrics.jsonl")
    pages = "".join(PAGE.with_name(name).read_text(encoding="utf-8") for name in ("algorithms.md", "rewards.md"))
    (under,) = re.findall(r"Metrics under `rollout_corr/`: ([^;]*);", pages)
    named = set(re.findall(r"`((?:actor|training|reward)/[a-z_/*]+)`", pages)) | {
        f"rollout_corr/{name}" for name in re.findall(r"`(\w+)`", under)
    }
    named -= {"reward/judge_attempts", "reward/judge_tokens"}  # of a judge, in its own tests
    assert len(named) > 12
    assert [name for name in sorted(named) if not any(fnmatch(each, name) for each in row)] == []


@pytest.mark.parametrize("kind", ["auto", "recompute", "bypass"])
async def test_the_mismatch_to_the_engine_is_told_whatever_the_old_log_probs_are(config: Path, kind: str) -> None:
    folder = await train(config, "trainer.total_training_steps=1", f"algorithm.old_log_probs={kind}")
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert abs(row["rollout_corr/kl"]) < 1e-4
    assert 0 <= row["rollout_corr/k3_kl"] < 1e-4


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
async def test_with_the_engines_log_probs_the_correction_reaches_the_loss(config: Path, loss_type: str) -> None:
    """From the second update on the policy is another than the engine's: tokens are rejected, weights are not 1."""
    overrides = [
        "algorithm.old_log_probs=bypass",
        f"algorithm.rollout_correction.loss_type={loss_type}",
        "algorithm.rollout_correction.rollout_rs=token_k2",
        "algorithm.rollout_correction.rollout_rs_threshold=0.0001",
        *(["algorithm.rollout_correction.rollout_is=token"] if loss_type == "reinforce" else []),
    ]
    folder = await train(config, "trainer.total_training_steps=2", "actor.ppo_epochs=4", *overrides)
    rows = read_metrics(folder / "metrics.jsonl")
    assert any(row["rollout_corr/rollout_rs_masked_fraction"] > 0 for row in rows)
    assert ("rollout_corr/rollout_is_mean" in rows[0]) == (loss_type == "reinforce")


@pytest.mark.long
async def test_the_kl_in_the_reward_moves_its_coefficient_and_a_resumed_run_goes_on_with_it(config: Path) -> None:
    keys = [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=k3",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "algorithm.kl_ctrl.target_kl=0.001",
        "algorithm.kl_ctrl.horizon=20",
        "rollout.deterministic=true",
    ]
    whole = await train(config, "trainer.total_training_steps=4", "trainer.experiment_name=whole", *keys)
    half = await train(config, "trainer.total_training_steps=2", *keys)
    assert open_checkpoint(half / "checkpoints/global_step_2").controllers["kl_coef"] != 0.5
    resumed = await train(config, "trainer.total_training_steps=4", *keys, resume=True)
    coefs = [row["actor/reward_kl_penalty_coeff"] for row in read_metrics(resumed / "metrics.jsonl")]
    assert coefs == [row["actor/reward_kl_penalty_coeff"] for row in read_metrics(whole / "metrics.jsonl")]
    assert len(set(coefs)) == 4
    assert (whole / "hf/model.safetensors").read_bytes() == (resumed / "hf/model.safetensors").read_bytes()


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "own_algorithms:raw"])
async def test_a_group_of_one_is_warned_of_where_it_teaches_nothing(
    config: Path, caplog: pytest.LogCaptureFixture, estimator: str
) -> None:
    keys = ["rollout.n=1", "trainer.total_training_steps=1", "reward.function=part_reward:score", "data.train_batch_size=4"]
    own = {"gdpo": ["algorithm.gdpo_reward_keys=first"]}
    folder = await train(config, f"algorithm.adv_estimator={estimator}", *keys, *own.get(estimator, []))
    (row,) = read_metrics(folder / "metrics.jsonl")
    is_silent = row["critic/advantages/max"] == row["critic/advantages/min"] == 0
    assert any("a group of one has advantage 0" in record.message for record in caplog.records) == is_silent


async def test_groups_without_signal_are_replaced(config: Path) -> None:
    folder = await train(
        config, "algorithm.filter_groups=true", "reward.function=part_reward:score", "trainer.total_training_steps=2"
    )
    rows = read_metrics(folder / "metrics.jsonl")
    assert rows[-1]["admission/dropped/no_signal"] > 0
    assert all(row["critic/advantages/max"] > 0 > row["critic/advantages/min"] for row in rows)


async def test_a_task_without_any_signal_ends_the_run_with_the_reason(config: Path) -> None:
    with pytest.raises(TooManyFailuresError, match=r"5 groups in a row had the same reward .*max_filtered_groups_in_a_row = 5"):
        await train(
            config, "algorithm.filter_groups=true", "reward.function=part_reward:always", "replay.max_filtered_groups_in_a_row=5"
        )


async def test_functions_of_the_user_are_taken_with_their_options(config: Path) -> None:
    folder = await train(
        config,
        "trainer.total_training_steps=1",
        "algorithm.adv_estimator=own_algorithms:raw",
        "algorithm.adv_options.scale=2.0",
        "actor.loss_mode=own_algorithms:plain",
        "actor.clip_ratio_high=0.3",
        "actor.loss_options.own=0.5",
    )
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert row["actor/seen_clip"] == pytest.approx(0.3)
    assert row["critic/advantages/max"] in (1.0, 2.0)


async def test_the_documented_functions_train(config: Path) -> None:
    name = "documented_algorithms"
    folder = await train(
        config, "trainer.total_training_steps=1", f"algorithm.adv_estimator={name}:raw", f"actor.loss_mode={name}:plain"
    )
    assert len(read_metrics(folder / "metrics.jsonl")) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.loss_mode=own_algorithms:plain", "actor.loss_options.on=1.0"],
            r"actor\.loss_options\.on is no option of 'own",
        ),
        (["actor.loss_mode=own_algorithms:plain", "actor.clip_ratio_c=2.0"], r"actor\.clip_ratio_c has no effect because 'own_alg"),
        (["actor.loss_mode=own_algorithms:fixed", "actor.loss_agg_mode=token-sum"], r"actor\.loss_agg_mode has no effect because"),
        (["actor.loss_mode=own_algorithms:strict"], r"'own_algorithms:strict' needs actor\.loss_options\.bound; it has no default"),
        (
            ["algorithm.adv_estimator=own_algorithms:squared"],
            r"'own_algorithms:squared' needs old_log_probs, sum_pi_squared, which nothing in this run makes",
        ),
        (["actor.loss_mode=own_algorithms:nothing"], r"own_algorithms has no function 'nothing'"),
        (["actor.loss_mode=no_module:plain"], r"no module named 'no_module'"),
        (["algorithm.adv_estimator=own_algorithms:raw", "algorithm.lam=0.5"], r"algorithm\.lam has no effect because"),
        (["actor.loss_mode=dro"], r"dro_beta"),
        (["actor.loss_mode=dro", "actor.loss_options.dro_beta=-1"], r"dro_beta"),
    ],
)
async def test_what_a_function_does_not_take_is_refused_before_the_first_step(
    config: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await train(config, *overrides)
    assert not (config.parent / "runs" / "small").exists(), "no folder is made for a run that cannot begin"
