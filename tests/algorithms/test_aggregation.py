"""Token weights against the definitions, for rows and for sessions of several rows, and the invariance to any split."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.aggregation import AggregationMode, count_sequences, token_weights

MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
LOSS = torch.tensor([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
EXPECTED: dict[AggregationMode, float] = {
    "token-mean": 3.0,
    "token-sum": 9.0,
    "seq-mean-token-sum": 4.5,
    "seq-mean-token-mean": 3.75,
    "seq-mean-token-sum-norm": 0.45,
}


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_by_hand(mode: AggregationMode) -> None:
    assert float((LOSS * token_weights(MASK, mode, scale=10)).sum()) == pytest.approx(EXPECTED[mode])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 3.0), ("token-sum", 9.0), ("seq-mean-token-sum", 9.0), ("seq-mean-token-mean", 3.0)],
)
def test_a_session_of_two_rows_is_one_sequence(mode: AggregationMode, expected: float) -> None:
    """The third row is another session, without a policy token."""
    sequences = torch.tensor([40, 40, 7])
    assert count_sequences(MASK, sequences) == 1
    assert float((LOSS * token_weights(MASK, mode, sequences_B=sequences)).sum()) == pytest.approx(expected)


def test_totals_over_all_ranks_take_the_place_of_the_counts() -> None:
    weights = {mode: token_weights(MASK, mode, num_tokens=30, num_rows=10, scale=5) for mode in MODES}
    assert {mode: float(found[0, 0]) for mode, found in weights.items()} == pytest.approx(
        {
            "token-mean": 1 / 30,
            "token-sum": 1.0,
            "seq-mean-token-sum": 0.1,
            "seq-mean-token-mean": 0.05,
            "seq-mean-token-sum-norm": 0.02,
        }
    )


def test_another_mode_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'mean' is not one of token-mean"):
        token_weights(MASK, "mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [None, 0, -1.0])
def test_the_norm_needs_a_scale(scale: float | None) -> None:
    with pytest.raises(ValueError, match="needs a positive scale"):
        token_weights(MASK, "seq-mean-token-sum-norm", scale=scale)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=9), st.data(), st.sampled_from(MODES))
def test_any_split_into_parts_adds_up_to_the_whole(rows: list[list[bool]], data: st.DataObject, mode: AggregationMode) -> None:
    """Parts hold whole sequences, as ranks do; 1e-12 relative."""
    mask = torch.tensor(rows)
    loss = 1.5 + torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape).cos()
    numbers = st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows))
    sequences = torch.tensor(data.draw(numbers))
    part_of_row = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=6, max_size=6)))[sequences]
    totals = {"num_tokens": float(mask.sum()), "num_rows": float(count_sequences(mask, sequences))}

    def aggregated(chosen: torch.Tensor, num_tokens: float | None = None, num_rows: float | None = None) -> float:
        weights = token_weights(
            mask[chosen],
            mode,
            num_tokens=num_tokens,
            num_rows=num_rows,
            sequences_B=sequences[chosen],
            scale=7.0,
            dtype=torch.float64,
        )
        return float((loss[chosen] * weights).sum())

    parts = [aggregated(part_of_row == part, **totals) for part in range(3)]
    assert sum(parts) == pytest.approx(aggregated(torch.ones(len(rows), dtype=torch.bool)), rel=1e-12, abs=0)


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5), st.sampled_from(MODES))
def test_cutting_a_sequence_into_rows_changes_no_weight(rows: list[list[bool]], mode: AggregationMode) -> None:
    mask = torch.tensor(rows)
    whole = token_weights(mask, mode, scale=7.0, dtype=torch.float64)
    sequences = torch.arange(len(rows)).repeat_interleave(3)
    cut = token_weights(mask.reshape(-1, 2), mode, sequences_B=sequences, scale=7.0, dtype=torch.float64)
    assert torch.equal(cut.reshape(whole.shape), whole)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_of_nothing_weighs_nothing(mode: AggregationMode) -> None:
    assert token_weights(torch.zeros(2, 3, dtype=torch.bool), mode, scale=1.0).tolist() == [[0.0] * 3] * 2
    assert token_weights(torch.zeros(0, 3, dtype=torch.bool), mode, scale=1.0).shape == (0, 3)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_the_aggregate(mode: AggregationMode) -> None:
    loss = LOSS.double().requires_grad_()
    weights = token_weights(MASK, mode, scale=3.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda loss: (loss * weights).sum(), loss)
    assert token_weights(MASK, mode, scale=3.0).dtype == torch.float32


def test_float64_weights_are_not_rounded_to_float32() -> None:
    assert float(token_weights(MASK, "token-mean", dtype=torch.float64)[0, 0]) == 1 / 3
