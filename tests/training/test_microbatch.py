"""Packing under a token budget, as properties of any lengths; and what ranks agree on without asking."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.training.microbatch import Budget, agreed_micro_batches, pack_micro_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=40)
BUDGETS = st.builds(Budget, max_tokens=st.integers(52, 200), is_packed=st.booleans(), multiple=st.integers(1, 4))
RANKS = st.integers(1, 4)


def positions(lengths: list[int], budget: Budget) -> int:
    """Of one micro-batch, by what is laid out."""
    if budget.is_packed:
        return -(-sum(lengths) // budget.multiple) * budget.multiple
    return len(lengths) * (-(-max(lengths) // budget.multiple) * budget.multiple)


@given(LENGTHS, BUDGETS)
def test_every_row_is_in_exactly_one_micro_batch_and_none_is_above_the_budget(lengths: list[int], budget: Budget) -> None:
    packed = pack_micro_batches(lengths, budget)
    assert sorted(row for batch in packed for row in batch) == list(range(len(lengths)))
    assert all(positions([lengths[row] for row in batch], budget) <= budget.max_tokens for batch in packed)
    of_longest = [max(lengths[row] for row in batch) for batch in packed]
    assert of_longest == sorted(of_longest, reverse=True)


@given(LENGTHS, BUDGETS)
def test_no_micro_batch_could_have_taken_the_next_row(lengths: list[int], budget: Budget) -> None:
    packed = pack_micro_batches(lengths, budget)
    for batch, after in itertools.pairwise(packed):
        assert positions([lengths[row] for row in [*batch, after[0]]], budget) > budget.max_tokens


@given(LENGTHS, BUDGETS, RANKS, st.randoms(use_true_random=False), st.booleans())
def test_ranks_agree_on_a_number_and_leave_no_row_out(
    lengths: list[int], budget: Budget, num_ranks: int, random: st.DataObject, pairs: bool
) -> None:
    """pairs: two rows are kept together, where they fit."""
    together = [row // 2 for row in range(len(lengths))] if pairs else ()
    lengths = [min(length, (budget.max_tokens - 4) // 2) for length in lengths] if pairs else lengths
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    owner = [random.randrange(num_ranks) for _ in lengths]  # type: ignore[attr-defined]
    for row in range(len(lengths)):
        ranks[owner[row // 2 if pairs else row]].append(row)
    agreed = agreed_micro_batches(lengths, ranks, budget, together=together)
    assert len({len(own) for own in agreed}) == 1
    for rows, own in zip(ranks, agreed, strict=True):
        assert sorted(row for batch in own for row in batch) == rows
        assert all(positions([lengths[row] for row in batch], budget) <= budget.max_tokens for batch in own if batch)
        for batch in own if pairs else ():
            assert all((row ^ 1) in batch or (row ^ 1) >= len(lengths) for row in batch)
    assert not lengths or any(own[-1] for own in agreed)  # no more passes than one rank needs


def test_the_example_of_the_docstring() -> None:
    assert pack_micro_batches([3, 9, 4, 8], Budget(max_tokens=18)) == [[1, 3], [2, 0]]


def test_a_row_above_the_budget_is_told_with_its_number_whatever_rank_has_it() -> None:
    budget = Budget(max_tokens=8)
    for ranks in ([[0], [1]], [[1], [0]], [[0, 1], []]):
        with pytest.raises(ConfigError, match=r"row 1 has 9 tokens, .* holds 8 \(actor.ppo_max_token_len_per_gpu\); raise it to 9"):
            agreed_micro_batches([3, 9], ranks, budget)


@pytest.mark.parametrize(
    ("is_packed", "needed"), [(False, r"rows 0, 2 are kept together and take 2 x 5 = 10 tokens"), (True, r"take 5 \+ 4 = 9 tokens")]
)
def test_rows_kept_together_above_the_budget_are_told_with_the_arithmetic(is_packed: bool, needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        pack_micro_batches([5, 3, 4], Budget(max_tokens=8, is_packed=is_packed), together=[7, 1, 7])


def test_without_a_hard_budget_a_longer_row_goes_alone() -> None:
    assert pack_micro_batches([9, 3, 3], Budget(max_tokens=6, is_hard=False)) == [[0], [1, 2]]


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        Budget(max_tokens=0)
