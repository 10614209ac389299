"""Packing under a token budget, as properties of any lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.training.microbatch import pack_micro_batches

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


@given(LENGTHS, st.integers(1, 200))
def test_every_row_is_in_exactly_one_micro_batch(lengths: list[int], max_tokens: int) -> None:
    packed = pack_micro_batches(lengths, max_tokens)
    assert sorted(row for batch in packed for row in batch) == list(range(len(lengths)))
    assert all(packed)


@given(LENGTHS, st.integers(1, 200))
def test_padded_size_keeps_the_budget_unless_a_row_is_alone(lengths: list[int], max_tokens: int) -> None:
    for batch in pack_micro_batches(lengths, max_tokens):
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= max_tokens


@given(LENGTHS, st.integers(1, 200))
def test_no_micro_batch_could_have_taken_the_next_row(lengths: list[int], max_tokens: int) -> None:
    packed = pack_micro_batches(lengths, max_tokens)
    for batch in packed[:-1]:
        assert (len(batch) + 1) * max(lengths[row] for row in batch) > max_tokens


def test_the_example_of_the_docstring() -> None:
    assert pack_micro_batches([3, 9, 4, 8], 18) == [[1, 3], [2, 0]]


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        pack_micro_batches([1], 0)
