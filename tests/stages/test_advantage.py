"""The stages between sampling and update, on columns that a person can check."""

from dataclasses import replace

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from asyncrl.config import AlgorithmConfig
from asyncrl.config.learning import KLControlConfig
from asyncrl.errors import FieldError
from asyncrl.ports import Shards, StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import ragged, rows_of
from asyncrl.stages.advantage import advantage_stage, kl_coefficient
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


def columns_of(masks: list[list[bool]], scores: list[list[float]], **others: list[list[float]]) -> TensorDict:
    rows = {"response_mask": [torch.tensor(mask) for mask in masks], "rm_scores": [torch.tensor(row) for row in scores]}
    rows |= {name: [torch.tensor(row) for row in column] for name, column in others.items()}
    return TensorDict({name: ragged(column) for name, column in rows.items()}, batch_size=[len(masks)])


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_passk"]
)
def test_a_session_weighs_once_however_it_is_split(estimator: str) -> None:
    """The score stands on each row of a session, and counts once."""
    stage = advantage_stage(AlgorithmConfig(adv_estimator=estimator))
    whole = stage.compute(
        columns_of([[True, False, True, True], [True, True]], [[0.0, 0.0, 0.0, 1.0], [0.0, 0.25]]), meta("a_0_0", "a_1_0"), CONTEXT
    )
    parts = stage.compute(
        columns_of([[True, False], [True, True], [True, True]], [[1.0, 0.0], [0.0, 0.25], [0.0, 1.0]]),
        meta("a_0_0", "a_1_0", "a_0_1"),
        CONTEXT,
    )
    for name in ("advantages", "returns"):
        first, other, second = rows_of(parts.columns[name])
        torch.testing.assert_close([torch.cat([first, second]), other], rows_of(whole.columns[name]))
    assert [row.tolist() for row in rows_of(parts.columns["token_level_rewards"])] == [[0.0, 0.0], [0.0, 0.25], [0.0, 1.0]]


def test_the_kl_is_taken_off_each_token_and_its_coefficient_follows_it() -> None:
    config = AlgorithmConfig(
        use_kl_in_reward=True,
        kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=10),
        norm_adv_by_std_in_grpo=False,
    )
    kl = kl_coefficient(config)
    stage = advantage_stage(config, kl=kl)
    assert {"old_log_probs", "ref_log_prob"} <= stage.reads
    columns = columns_of(
        [[True, False, True], [True]],
        [[0.0, 0.0, 1.0], [0.0]],
        old_log_probs=[[-1.0, 0.0, -1.0], [-2.0]],
        ref_log_prob=[[-1.2, 5.0, -1.4], [-2.5]],
    )
    output = stage.compute(columns, meta("a_0_0", "a_1_0"), CONTEXT)
    rewards = torch.cat(rows_of(output.columns["token_level_rewards"]))
    torch.testing.assert_close(rewards, torch.tensor([-0.1, 0.0, 0.8, -0.25]))
    assert output.metrics["actor/reward_kl_penalty"] == pytest.approx((0.3 + 0.5) / 2)  # the mean of the rows' means
    assert output.metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert kl is not None
    assert kl.controller.coef == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))  # the error is cut to 20 %
    assert [row.tolist() for row in rows_of(output.columns["token_level_scores"])] == [[0.0, 0.0, 1.0], [0.0]]
    advantage = (0.7 - (-0.25)) / 2
    assert rows_of(output.columns["advantages"])[0].tolist() == pytest.approx([advantage, 0.0, advantage])


def test_a_component_that_the_reward_did_not_return_is_named_with_its_row() -> None:
    stage = advantage_stage(AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["form", "sense"]))
    columns = columns_of([[True], [True]], [[1.0], [0.0]])
    whole = {"reward_extra_info": {"form": 1.0, "sense": 0.5}}
    columns.set("extra_fields", NonTensorStack(whole, {"reward_extra_info": {"form": 0.0, "sense": 0.25}}))
    output = stage.compute(columns, meta("a_0_0", "a_1_0"), CONTEXT)
    assert torch.cat(rows_of(output.columns["advantages"])).tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)
    columns.set("extra_fields", NonTensorStack(whole, {"reward_extra_info": {"form": 1.0}}))
    with pytest.raises(FieldError, match=r"a_1_0: the reward has no number 'sense' .* it has \['form'\]"):
        stage.compute(columns, meta("a_0_0", "a_1_0"), CONTEXT)


def test_eliding_old_log_probs_is_no_stage_and_bypassing_costs_no_forward_pass() -> None:
    def forward(columns: TensorDict, shards: Shards) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("no forward pass is needed")

    assert old_log_prob_stages("elide", forward) == ()
    (bypass,) = old_log_prob_stages("bypass", forward)
    columns = TensorDict({"rollout_log_probs": ragged([torch.tensor([-1.0])])}, batch_size=[1])
    output = bypass.compute(columns, meta("a_0_0"), CONTEXT)
    assert output.columns["old_log_probs"].values().tolist() == [-1.0]


def test_what_the_reward_said_counts_once_a_session() -> None:
    """Of its last trajectory; lengths are of each."""
    columns = TensorDict({"reward_score": torch.tensor([0.0, 1.0, 0.5]), "num_turns": torch.tensor([1, 1, 1])}, batch_size=[3])
    extra = NonTensorStack(*({"reward_extra_info": {"close": close}} for close in (9, 1, 0)))
    columns.set("extra_fields", extra)
    columns.set("token_versions", ragged([torch.zeros(4, dtype=torch.int32)] * 3))
    metrics = batch_metrics_stage().compute(columns, meta("a_0_0", "a_0_1", "a_1_0", response_len=4), CONTEXT).metrics
    assert (metrics["critic/score/mean"], metrics["critic/score/min"]) == (0.75, 0.5)
    assert metrics["reward/close"] == 0.5
    assert metrics["response_length/mean"] == 4


def test_padding_rows_are_outside_every_number() -> None:
    columns = TensorDict({"reward_score": torch.tensor([1.0, 0.0, 9.0]), "num_turns": torch.tensor([1, 3, 9])}, batch_size=[3])
    columns.set(
        "extra_fields",
        NonTensorStack({"reward_extra_info": {"close": 1}}, {"reward_extra_info": {}}, {"reward_extra_info": {"close": 9}}),
    )
    columns.set("token_versions", ragged([torch.tensor(row, dtype=torch.int32) for row in ([1, -1, 2], [0], [7, 7])]))
    real = meta("a_0_0", "a_1_0")
    padding = {**real.tags[0], "is_padding": True, "response_len": 99}
    padded = KVBatchMeta(partition_id="train", keys=(*real.keys, "a_2_0"), tags=(*real.tags, padding))
    metrics = batch_metrics_stage().compute(columns, padded, replace(CONTEXT, version=2)).metrics
    assert metrics["critic/score/mean"] == 0.5
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2.0)
    assert [metrics[f"staleness/share_{behind}"] for behind in (0, 1, 2)] == pytest.approx([1 / 3] * 3)
    assert metrics["num_turns/max"] == 3
    assert metrics["response_length/max"] == 3
    assert metrics["reward/close"] == pytest.approx(1)


def test_staleness_is_of_policy_tokens() -> None:
    """Behind the weights that train; a batch without any policy token has none."""
    columns = TensorDict({"reward_score": torch.tensor([1.0]), "num_turns": torch.tensor([1])}, batch_size=[1])
    columns.set("extra_fields", NonTensorStack({}))

    def metrics_of(*versions: int) -> dict[str, float]:
        columns.set("token_versions", ragged([torch.tensor(versions, dtype=torch.int32)]))
        found = batch_metrics_stage().compute(columns, meta("a_0_0"), replace(CONTEXT, version=3)).metrics
        return {name: value for name, value in found.items() if name.startswith("staleness/")}

    spread = {"staleness/mean": 1.25, "staleness/max": 2.0}
    assert metrics_of(-1, 1, 1, -1, -1, 2, 3) == {
        **spread,
        "staleness/share_0": 0.25,
        "staleness/share_1": 0.25,
        "staleness/share_2": 0.5,
    }
    assert metrics_of(-1, -1) == {}
