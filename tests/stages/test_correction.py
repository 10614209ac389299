"""The correction's stage: what it writes, what it leaves alone, and that a session is one sequence."""

import math

import pytest
import torch
from tensordict import TensorDict

from asyncrl.algorithms.correction import CorrectionOptions
from asyncrl.ports import StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import ragged, rows_of
from asyncrl.stages.correction import correction_stage

CONTEXT = StepContext(step=1, version=0, seed=0)


def batch_of(*keys: str) -> KVBatchMeta:
    return KVBatchMeta(partition_id="train", keys=keys, tags=({},) * len(keys))


def columns_of(masks: list[list[bool]], gaps: list[list[float]]) -> TensorDict:
    """gaps: old - rollout log-prob of each token."""
    rollout = [torch.full((len(row),), -2.0) for row in gaps]
    old = [base + torch.tensor(row) for base, row in zip(rollout, gaps, strict=True)]
    columns = {"response_mask": [torch.tensor(mask) for mask in masks], "rollout_log_probs": rollout, "old_log_probs": old}
    return TensorDict({name: ragged(rows) for name, rows in columns.items()}, batch_size=[len(masks)])


def test_weights_and_rejection_stand_beside_the_mask() -> None:
    columns = columns_of([[True, False, True], [True]], [[math.log(3.0), 9.0, math.log(0.5)], [0.0]])
    stage = correction_stage(CorrectionOptions(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=0.3))
    assert stage.writes == {"rollout_is_weights", "loss_weights"}
    output = stage.compute(columns, batch_of("a_0_0", "a_1_0"), CONTEXT)
    weights, kept = (rows_of(output.columns[name]) for name in ("rollout_is_weights", "loss_weights"))
    torch.testing.assert_close(torch.cat(weights), torch.tensor([2.0, 0.0, 0.5, 1.0]))  # cut to 2; 0 outside the mask
    assert torch.cat(kept).tolist() == [0.0, 0.0, 1.0, 1.0]  # log(3)^2 / 2 = 0.6
    assert output.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)


def test_without_either_it_only_measures() -> None:
    stage = correction_stage(CorrectionOptions())
    output = stage.compute(columns_of([[True, True]], [[0.1, 0.3]]), batch_of("a_0_0"), CONTEXT)
    assert (stage.writes, dict(output.columns)) == (frozenset(), {})
    assert output.metrics["rollout_corr/kl"] == pytest.approx(-0.2)


@pytest.mark.parametrize(
    "options", [CorrectionOptions(rollout_is="sequence"), CorrectionOptions(rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2")]
)
def test_a_session_is_one_sequence(options: CorrectionOptions) -> None:
    """One row of four tokens, or two rows of two of the same session, with another session's row between them."""
    stage = correction_stage(options)
    whole = stage.compute(columns_of([[True] * 4, [True]], [[0.1, 0.2, 0.3, 0.2], [0.0]]), batch_of("a_0_0", "a_1_0"), CONTEXT)
    parts = stage.compute(
        columns_of([[True] * 2, [True], [True] * 2], [[0.1, 0.2], [0.0], [0.3, 0.2]]), batch_of("a_0_0", "a_1_0", "a_0_1"), CONTEXT
    )
    (name,) = stage.writes
    first, other, second = rows_of(parts.columns[name])
    torch.testing.assert_close([torch.cat([first, second]), other], rows_of(whole.columns[name]))
    assert parts.metrics == pytest.approx(whole.metrics)
