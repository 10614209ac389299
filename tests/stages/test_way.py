"""The way that the wiring lays for a run: which stages there are, in order, and that what one writes reaches those that use it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncrl.config import TrainRun, parse_run
from asyncrl.ports import Shards, Topology, WeightSnapshot
from asyncrl.stages.advantage import kl_coefficient
from asyncrl.stages.stage import Stage
from asyncrl.wiring import stages_of

Ids = Sequence[str | None]


class Idle:
    """A policy whose stages are only looked at."""

    num_ranks, topology = 1, Topology()

    def snapshot(self, version: int) -> WeightSnapshot:
        raise AssertionError

    def log_probs(self, columns: TensorDict, shards: Shards = ()) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError

    def log_probs_and_squares(self, columns: TensorDict, shards: Shards = ()) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise AssertionError

    def update(self, columns: TensorDict, group_ids: Ids, session_ids: Ids, *, seed: int, shards: Shards = ()) -> dict[str, float]:
        raise AssertionError


class IdleCritic:
    """Such a critic."""

    def values(self, columns: TensorDict, shards: Shards = ()) -> torch.Tensor:
        raise AssertionError

    def update(self, columns: TensorDict, group_ids: Ids, shards: Shards = ()) -> dict[str, float]:
        raise AssertionError


def way(algorithm: dict[str, Any], **actor: Any) -> dict[str, Stage]:
    tree = {"data": {"train_files": "rows.jsonl"}, "model": {"path": "m"}, "algorithm": algorithm, "actor": actor}
    run = parse_run(TrainRun, tree)
    stages = stages_of(
        run,
        Idle(),
        reference=Idle().log_probs if run.needs_reference else None,
        critic=IdleCritic() if run.has_critic else None,
        kl=kl_coefficient(run.algorithm),
    )
    return {stage.name: stage for stage in stages}


BOTH = {"rollout_is": "token", "rollout_rs": ["token_k2"], "rollout_rs_threshold": [1.0]}


@pytest.mark.parametrize(
    ("algorithm", "actor", "names"),
    [
        ({}, {}, "advantage update_actor batch_metrics"),
        ({}, {"ppo_epochs": 2}, "old_log_prob correction advantage update_actor batch_metrics"),
        ({"old_log_probs": "bypass"}, {}, "old_log_prob advantage update_actor batch_metrics"),
        ({}, {"use_kl_loss": True}, "ref_log_prob advantage update_actor batch_metrics"),
        ({"use_kl_in_reward": True}, {}, "old_log_prob ref_log_prob correction advantage update_actor batch_metrics"),
        ({"adv_estimator": "gae"}, {}, "values advantage update_critic update_actor batch_metrics"),
    ],
)
def test_the_stages_of_a_run_in_their_order(algorithm: dict[str, Any], actor: dict[str, Any], names: str) -> None:
    assert list(way(algorithm, **actor)) == names.split()


def test_what_the_correction_writes_reaches_both_updates() -> None:
    stages = way({"rollout_correction": BOTH, "adv_estimator": "gae"})
    assert stages["correction"].writes == {"rollout_is_weights", "loss_weights"}
    assert {"old_log_probs", "rollout_is_weights", "loss_weights"} <= stages["update_actor"].reads
    assert "loss_weights" in stages["update_critic"].reads


def test_importance_weights_reach_the_token_baselines_and_no_other_estimator() -> None:
    for estimator, reads in (("optimal_token_baseline", True), ("tir_optimal_token_baseline", True), ("grpo", False)):
        stages = way({"rollout_correction": BOTH, "adv_estimator": estimator})
        assert ("rollout_is_weights" in stages["advantage"].reads) == reads
        assert ("sum_pi_squared" in stages["old_log_prob"].writes) == reads


def test_a_kl_term_reads_the_reference_where_it_is_taken() -> None:
    in_reward, in_loss = way({"use_kl_in_reward": True}), way({}, use_kl_loss=True)
    assert {"old_log_probs", "ref_log_prob"} <= in_reward["advantage"].reads
    assert "ref_log_prob" in in_loss["update_actor"].reads
    assert "ref_log_prob" not in in_loss["advantage"].reads
