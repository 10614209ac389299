"""Token weights against the definitions, and the invariance to any split of the mini-batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.aggregation import AggregationMode, token_weights

MODES: tuple[AggregationMode, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
LOSS = torch.tensor([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0], [99.0, 99.0, 99.0]])


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 3.0), ("seq-mean-token-sum", 4.5), ("seq-mean-token-mean", 3.75)])
def test_the_modes_by_hand(mode: AggregationMode, expected: float) -> None:
    assert float((LOSS * token_weights(MASK, mode)).sum()) == pytest.approx(expected)


def test_another_mode_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'mean' is not one of token-mean"):
        token_weights(MASK, "mean")  # type: ignore[arg-type]


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=9), st.data(), st.sampled_from(MODES))
def test_any_split_into_parts_adds_up_to_the_whole(rows: list[list[bool]], data: st.DataObject, mode: AggregationMode) -> None:
    mask = torch.tensor(rows)
    loss = torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape).cos()
    part_of_row = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    totals = {"num_tokens": float(mask.sum()), "num_rows": float(mask.any(1).sum())}
    whole = (loss * token_weights(mask, mode)).sum()
    parts = [
        (loss[part_of_row == part] * token_weights(mask[part_of_row == part], mode, **totals)).sum()
        for part in range(3)
        if (part_of_row == part).any()
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-6)


def test_a_mask_of_nothing_weighs_nothing() -> None:
    for mode in MODES:
        assert token_weights(torch.zeros(2, 3, dtype=torch.bool), mode).tolist() == [[0.0] * 3] * 2
