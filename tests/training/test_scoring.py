"""Rows to micro-batches: only rows with a policy token cost a forward pass."""

from collections.abc import Callable

from tensordict import TensorDict

from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.padding import padded, with_padding
from asyncrl.protocol.ragged import from_values, values_of
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
