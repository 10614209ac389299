"""The stages between sampling and update, on columns that a person can check."""

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from asyncrl.config import AlgorithmConfig
from asyncrl.ports import StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import ragged, rows_of
from asyncrl.stages.advantage import advantage_stage
from asyncrl.stages.batch_metrics import batch_metrics_stage
from asyncrl.stages.old_log_prob import old_log_prob_stages

CONTEXT = StepContext(step=1, version=0, seed=0)


def meta(*keys: str, **tag: int) -> KVBatchMeta:
    tags = tuple({"prompt_len": 2, "response_len": 3, "policy_len": 2, **tag} for _ in keys)
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags)


def test_advantages_are_group_relative_and_zero_on_observations() -> None:
    masks = [torch.tensor([True, False, True]), torch.tensor([True]), torch.tensor([True, True])]
    scores = [torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0]), torch.tensor([0.0, 0.5])]
    columns = TensorDict({"response_mask": ragged(masks), "rm_scores": ragged(scores)}, batch_size=[3])
    batch = meta("a_0_0", "a_1_0", "b_0_0")
    output = advantage_stage(AlgorithmConfig(norm_adv_by_std_in_grpo=False)).compute(columns, batch, CONTEXT)
    assert [row.tolist() for row in rows_of(output.columns["advantages"])] == [[0.5, 0.0, 0.5], [-0.5], [0.0, 0.0]]
    for name in ("token_level_scores", "token_level_rewards"):
        assert [row.tolist() for row in rows_of(output.columns[name])] == [row.tolist() for row in scores]
    assert output.metrics["critic/advantages/max"] == 0.5
    assert output.columns["advantages"].dtype == torch.float32


def test_eliding_old_log_probs_is_no_stage_and_bypassing_costs_no_forward_pass() -> None:
    def forward(columns: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("no forward pass is needed")

    assert old_log_prob_stages("elide", forward) == ()
    (bypass,) = old_log_prob_stages("bypass", forward)
    columns = TensorDict({"rollout_log_probs": ragged([torch.tensor([-1.0])])}, batch_size=[1])
    output = bypass.compute(columns, meta("a_0_0"), CONTEXT)
    assert output.columns["old_log_probs"].values().tolist() == [-1.0]


def test_padding_rows_are_outside_every_number() -> None:
    columns = TensorDict({"reward_score": torch.tensor([1.0, 0.0, 9.0]), "num_turns": torch.tensor([1, 3, 9])}, batch_size=[3])
    columns.set(
        "extra_fields",
        NonTensorStack({"reward_extra_info": {"close": 1}}, {"reward_extra_info": {}}, {"reward_extra_info": {"close": 9}}),
    )
    real = meta("a_0_0", "a_1_0")
    padded = KVBatchMeta(
        partition_id="train",
        keys=(*real.keys, "a_2_0"),
        tags=(*real.tags, {**real.tags[0], "is_padding": True, "response_len": 99}),
    )
    metrics = batch_metrics_stage().compute(columns, padded, CONTEXT).metrics
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["num_turns/max"] == 3
    assert metrics["response_length/max"] == 3
    assert metrics["reward/close"] == pytest.approx(1)
