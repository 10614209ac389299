"""Weights and numbers of a mini-batch: what counts, what a sequence is, and what is told of it."""

from typing import Any

import pytest
import torch

from asyncrl.training.mini_batch import Tally, mini_batch_weights

MASKS = [torch.tensor(row, dtype=torch.bool) for row in ([1, 0, 1], [1], [1, 1, 1, 1], [0, 0])]


def weights(mode: Any = "token-mean", chosen: tuple[int, ...] = (0, 1, 2, 3), **options: Any) -> list[list[float]]:
    return [row.tolist() for row in mini_batch_weights(MASKS, chosen, mode, **options)]


def test_a_row_outside_the_mini_batch_has_no_weight_and_counts_nowhere() -> None:
    assert weights(chosen=(1, 0)) == [pytest.approx([1 / 3, 0, 1 / 3]), pytest.approx([1 / 3]), [], []]


def test_a_rejected_token_has_no_weight_and_counts_in_no_denominator() -> None:
    kept = [torch.tensor(row) for row in ([1.0, 1.0, 0.0], [0.0], [1.0, 0.0, 1.0, 1.0], [1.0, 1.0])]
    assert weights(loss_weights=kept) == [
        pytest.approx([0.25, 0, 0]),
        [0.0],
        pytest.approx([0.25, 0, 0.25, 0.25]),
        [0.0, 0.0],
    ]
    by_row = weights("seq-mean-token-mean", loss_weights=kept)
    assert by_row[0] == pytest.approx([0.5, 0, 0])  # two rows are left
    assert by_row[2] == pytest.approx([1 / 6, 0, 1 / 6, 1 / 6])


def test_a_weight_that_is_neither_0_nor_1_scales_the_loss_and_not_the_count() -> None:
    halves = [torch.full((len(mask),), 0.5) for mask in MASKS]
    assert weights(loss_weights=halves)[1] == pytest.approx([0.5 / 7])


def test_a_session_of_several_rows_is_one_sequence() -> None:
    found = weights("seq-mean-token-sum", sequences_B=torch.tensor([4, 4, 9, 9]))
    assert [max(row) for row in found] == pytest.approx([0.5, 0.5, 0.5, 0.0])
    together = weights("seq-mean-token-mean", sequences_B=torch.tensor([4, 4, 9, 9]))
    assert together[0] == pytest.approx([1 / 6, 0, 1 / 6])
    assert together[1] == pytest.approx([1 / 6])


def test_rows_whose_loss_is_not_finite_are_named() -> None:
    tally = Tally()
    uids = ["a", "b", "c", None]
    assert tally.suspects(uids, [0, 2, 3]) == "every loss is finite, the backward pass overflowed in groups a, c"
    tally.note_broken(torch.tensor([0.0, 1.0, float("nan")]), MASKS, [0, 1])
    assert tally.suspects(uids, [0, 1]) == "loss not finite in b (row 1)"
