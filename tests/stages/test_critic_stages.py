"""values, update_critic and the warm-up: what they read, write and tell."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncrl.config import TrainRun
from asyncrl.keys import TRAIN
from asyncrl.ports import Shards, StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import ragged
from asyncrl.stages.stage import Stage, StageOutput
from asyncrl.stages.update_critic import after_warmup, update_critic_stage
from asyncrl.stages.values import values_stage
from asyncrl.wiring import stages_of

BATCH = KVBatchMeta(partition_id=TRAIN, keys=("a_0_0", "a_1_0"), tags=({},) * 2)
MASK = ragged([torch.tensor([True, False, True]), torch.tensor([True])])


def columns(values: Sequence[float], returns: Sequence[float]) -> TensorDict:
    """Two rows, of 3 and 1 response tokens; the second token is an observation."""
    made = {
        "response_mask": MASK,
        "values": ragged([torch.tensor(values[:3]), torch.tensor(values[3:])]),
        "returns": ragged([torch.tensor(returns[:3]), torch.tensor(returns[3:])]),
    }
    return TensorDict(made, batch_size=[2])


def context(step: int = 1) -> StepContext:
    return StepContext(step=step, version=step - 1, seed=0)


def test_values_are_written_and_told() -> None:
    given = columns([1.0, 0.0, 2.0, 6.0], [0.0] * 4)
    output = values_stage(lambda columns, shards: columns["values"]).compute(given, BATCH, context())
    assert output.columns == {"values": given["values"]}
    assert output.metrics == {"critic/values/mean": 3.0, "critic/values/max": 6.0, "critic/values/min": 1.0}


def test_a_batch_without_policy_tokens_has_values_and_no_numbers() -> None:
    nothing = TensorDict({"response_mask": ragged([torch.tensor([False])]), "values": ragged([torch.zeros(1)])}, batch_size=[1])
    output = values_stage(lambda columns, shards: columns["values"]).compute(nothing, BATCH, context())
    assert (set(output.columns), output.metrics) == ({"values"}, {})


def critic_metrics(values: Sequence[float], returns: Sequence[float]) -> dict[str, float]:
    seen: list[Sequence[str | None]] = []

    def update(columns: TensorDict, group_ids: Sequence[str | None], shards: Shards) -> dict[str, float]:
        seen.append(group_ids)
        return {"critic/vf_loss": 0.5}

    output = update_critic_stage(update).compute(columns(values, returns), BATCH, context())
    assert seen == [("a", "a")]
    assert output.columns == {}
    return output.metrics


def test_the_share_of_the_returns_that_the_values_explain() -> None:
    perfect = critic_metrics([1.0, 9.0, 2.0, 6.0], [1.0, 0.0, 2.0, 6.0])
    assert perfect == {"critic/vf_loss": 0.5, "critic/vf_explained_var": 1.0}
    assert critic_metrics([3.0, 0.0, 3.0, 3.0], [1.0, 0.0, 2.0, 6.0])["critic/vf_explained_var"] == 0.0
    half = critic_metrics([0.5, 0.0, 1.0, 3.0], [1.0, 0.0, 2.0, 6.0])
    assert half["critic/vf_explained_var"] == pytest.approx(0.75)
    assert critic_metrics([1.0, 0.0, 2.0, 6.0], [3.0, 0.0, 3.0, 3.0]) == {"critic/vf_loss": 0.5}


def test_rejected_tokens_are_read_where_a_stage_writes_them() -> None:
    assert "loss_weights" not in update_critic_stage(lambda columns, uids, shards: {}).reads
    assert "loss_weights" in update_critic_stage(lambda columns, uids, shards: {}, has_loss_weights=True).reads


# --- warm-up ----------------------------------------------------------------------------------------------------------------------


def _counting(steps: list[int]) -> Stage:
    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        steps.append(context.step)
        return StageOutput(metrics={"actor/lr": 1.0})

    return Stage(name="update_actor", reads=frozenset({"advantages"}), writes=frozenset(), compute=compute)


@pytest.mark.parametrize(("num_steps", "trained"), [(0, [1, 2, 3]), (1, [2, 3]), (2, [3]), (5, [])])
def test_the_actor_rests_in_the_first_steps(num_steps: int, trained: list[int]) -> None:
    done: list[int] = []
    stage = after_warmup(_counting(done), num_steps)
    told = [stage.compute(TensorDict(batch_size=[2]), BATCH, context(step)).metrics for step in (1, 2, 3)]
    assert done == trained
    assert [bool(metrics) for metrics in told] == [step in trained for step in (1, 2, 3)]
    assert (stage.name, stage.reads) == ("update_actor", frozenset({"advantages"}))


# --- the way ----------------------------------------------------------------------------------------------------------------------


class Stub:
    """Neither actor nor critic is called."""

    def __getattr__(self, name: str) -> object:
        return lambda *arguments, **named: {}


def _way(*, critic: bool, **algorithm: object) -> list[str]:
    run = TrainRun.model_validate(
        {
            "data": {"train_files": ["x"]},
            "model": {"path": "x"},
            "algorithm": {"adv_estimator": "gae" if critic else "grpo", **algorithm},
        }
    )
    stub: Any = Stub()
    return [stage.name for stage in stages_of(run, stub, reference=stub.log_probs, critic=stub if critic else None)]


def test_values_come_before_the_advantage_and_the_critic_learns_before_the_actor() -> None:
    names = _way(
        critic=True, old_log_probs="recompute", rollout_correction={"rollout_rs": ["token_k2"], "rollout_rs_threshold": [1.0]}
    )
    order = ["old_log_prob", "ref_log_prob", "values", "correction", "advantage", "update_critic", "update_actor", "batch_metrics"]
    assert names == order
    assert not {"values", "update_critic"} & set(_way(critic=False))
