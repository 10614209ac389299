"""Rows to micro-batches: only rows with a policy token cost a forward pass, and that leaves no copy of the weights behind."""

from collections.abc import Callable
from pathlib import Path

from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from asyncrl.config import TrainRun
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.padding import padded, with_padding
from asyncrl.protocol.ragged import from_values, values_of
from asyncrl.training.actor import Actor, Reference
from asyncrl.training.critic import Critic
from asyncrl.training.microbatch import Budget
from asyncrl.training.scoring import Rows


def test_rows_without_a_policy_token_are_in_no_micro_batch(make_columns: Callable[..., TensorDict]) -> None:
    """A response of nothing, and padding rows; the micro-batches of the others are as if these were not there."""
    columns = make_columns([(3, 9), (2, 0), (4, 8), (3, 7)])
    batch = KVBatchMeta(partition_id="train", keys=("a_0_0", "a_1_0", "b_0_0", "b_1_0"), tags=({},) * 4)
    whole = padded(batch, 3)
    wide = with_padding(whole, columns)
    assert len(whole) == 7
    expected = Rows.of(columns).micro_batches([range(4)], Budget(max_tokens=24))
    assert sorted(row for rows in expected[0] for row in rows) == [0, 2, 3]
    assert Rows.of(wide).micro_batches([range(7)], Budget(max_tokens=24)) == expected


def test_rows_with_positions_of_their_own_are_not_counted_as_packed(make_columns: Callable[..., TensorDict]) -> None:
    """The model lays them out as padded rows: 3 x 12 positions."""
    columns, budget = make_columns([(4, 8), (3, 7), (3, 6)]), Budget(max_tokens=31, is_packed=True)
    assert Rows.of(columns).micro_batches([range(3)], budget) == [[[0, 1, 2]]]
    columns["position_ids"] = from_values(values_of(columns["position_ids"]) + 1, columns["position_ids"].offsets())
    assert Rows.of(columns).micro_batches([range(3)], budget) == [[[0, 1], [2]]]


def test_no_gathered_weights_stay_behind(
    make_model: Callable[..., Path], make_run: Callable[..., TrainRun], make_columns: Callable[..., TensorDict]
) -> None:
    """A reference would hold them for ever: no backward pass frees them. The parameters of a gathered unit are plain tensors."""
    columns, run = make_columns([(3, 9)]), make_run(make_model(), algorithm={"adv_estimator": "gae"})
    actor, critic, reference = Actor(run), Critic(run), Reference(run)
    for score in (actor.log_probs, actor.log_probs_and_squares, critic.values, reference.log_probs):
        score(columns)
    modules = (actor.learner.module, critic.learner.module, reference._policy)
    assert all(isinstance(parameter, DTensor) for module in modules for parameter in module.parameters())
