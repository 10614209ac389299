"""Mini-batches: whole groups, and padding rows that make none of their own."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocol.mini_batches import mini_batches

GROUPS = st.lists(st.sampled_from(["a", "b", "c", "d", None]), max_size=20)


def test_they_are_whole_groups_in_order_of_appearance() -> None:
    assert mini_batches(["a", "b", "a", "c"], 2) == [[0, 2, 1], [3]]


def test_a_padding_row_goes_with_its_neighbour() -> None:
    assert mini_batches([None, "a", None, "b", "a", None], 1) == [[0, 1, 2, 4, 5], [3]]
    assert mini_batches([None, None], 1) == []


@given(GROUPS, st.integers(1, 5))
def test_padding_rows_change_no_mini_batch_and_each_is_in_one(groups: list[str | None], groups_each: int) -> None:
    real = [row for row, uid in enumerate(groups) if uid is not None]
    without = mini_batches([groups[row] for row in real], groups_each)
    together = mini_batches(groups, groups_each)
    assert [[row for row in rows if groups[row] is not None] for rows in together] == [
        [real[row] for row in rows] for rows in without
    ]
    if real:
        assert sorted(row for rows in together for row in rows) == list(range(len(groups)))
