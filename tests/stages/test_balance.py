"""balance: whole groups a mini-batch, about equal work a rank, nothing lost, and nothing changed for one rank."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.partition import workload
from asyncrl.errors import FieldError
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.mini_batches import mini_batches
from asyncrl.protocol.padding import padded
from asyncrl.stages.balance import Dispatch, Shard, balance

GROUPS = st.lists(st.lists(st.integers(1, 4000), min_size=1, max_size=5), min_size=1, max_size=9)
"""seq_len of each row, by group: sessions that fork make groups of different sizes."""
RANKS, EACH = st.integers(1, 6), st.integers(1, 4)


def batch_of(groups: list[list[int]], rows_each: int = 1) -> KVBatchMeta:
    """rows_each: of a session."""
    rows = [
        (f"u{group}_{place // rows_each}_{place % rows_each}", length)
        for group, row in enumerate(groups)
        for place, length in enumerate(row)
    ]
    return KVBatchMeta(
        partition_id="train", keys=tuple(key for key, _ in rows), tags=tuple({"seq_len": length} for _, length in rows)
    )


def work_of(shard: Shard, step: int) -> int:
    return sum(workload(int(shard.batch.tags[row]["seq_len"])) for row in shard.mini_batches[step])


@given(GROUPS, RANKS, EACH, st.booleans())
def test_nothing_is_lost_and_groups_stay_together(groups: list[list[int]], ranks: int, each: int, equal: bool) -> None:
    batch = batch_of(groups)
    dispatch = balance(batch, ranks, groups_each=each, equal_counts=equal)
    dispatch.check()
    assert len(dispatch.shards) == ranks
    assert dispatch.whole.without_padding() == batch
    assert sorted(dispatch.batch.without_padding().keys) == sorted(batch.keys)
    assert dispatch.batch.keys == tuple(key for shard in dispatch.shards for key in shard.batch.keys)
    for shard in dispatch.shards:
        assert sorted(row for rows in shard.mini_batches for row in rows) == list(range(len(shard.batch)))


@given(GROUPS, RANKS, EACH, st.booleans())
def test_a_mini_batch_has_the_groups_it_has_on_one_rank(groups: list[list[int]], ranks: int, each: int, equal: bool) -> None:
    batch = batch_of(groups)
    alone = [{batch.keys[row] for row in rows} for rows in mini_batches(batch.groups, each)]
    spread = balance(batch, ranks, groups_each=each, equal_counts=equal).mini_batches
    assert [set(rows.without_padding().keys) for rows in spread] == alone


@given(GROUPS, RANKS, EACH, st.integers(1, 3))
def test_the_ranks_differ_by_one_session_of_work_at_most(groups: list[list[int]], ranks: int, each: int, rows_each: int) -> None:
    dispatch = balance(batch_of(groups, rows_each), ranks, groups_each=each)
    for step, rows in enumerate(dispatch.mini_batches):
        work, of_session = [work_of(shard, step) for shard in dispatch.shards], Counter[str | None]()
        for session, tag in zip(rows.sessions, rows.tags, strict=True):
            of_session[session] += workload(int(tag["seq_len"]))
        assert max(work) - min(work) <= max(of_session.values())


@given(GROUPS, RANKS, EACH, st.integers(2, 3))
def test_a_session_is_on_one_rank_with_its_rows_in_order(groups: list[list[int]], ranks: int, each: int, rows_each: int) -> None:
    batch = batch_of(groups, rows_each)
    dispatch = balance(batch, ranks, groups_each=each)
    dispatch.check()
    on_ranks = [set(shard.batch.sessions) for shard in dispatch.shards]
    assert sum(map(len, on_ranks)) == len(set(batch.sessions))
    for session in batch.sessions:
        keys = [key for key in batch.keys if key.startswith(f"{session}_")]
        assert [key for key in dispatch.batch.keys if key in keys] == keys


@given(GROUPS, RANKS, EACH, st.booleans())
def test_row_shards_are_the_mini_batches_of_the_ranks(groups: list[list[int]], ranks: int, each: int, equal: bool) -> None:
    dispatch = balance(batch_of(groups), ranks, groups_each=each, equal_counts=equal)
    keys = dispatch.batch.keys
    found = [[[keys[row] for row in rows] for rows in steps] for steps in dispatch.row_shards]
    told = [[[shard.batch.keys[row] for row in rows] for rows in shard.mini_batches] for shard in dispatch.shards]
    assert found == (told if ranks > 1 else [])


def test_equal_counts_do_not_split_a_session() -> None:
    with pytest.raises(FieldError, match="a session of several rows is not split"):
        balance(batch_of([[5, 6, 7]], 3), 2, groups_each=1, equal_counts=True)


@given(GROUPS, RANKS, EACH)
def test_equal_counts_take_no_more_padding_than_needed(groups: list[list[int]], ranks: int, each: int) -> None:
    batch = batch_of(groups)
    dispatch = balance(batch, ranks, groups_each=each, equal_counts=True)
    for step in range(len(dispatch.mini_batches)):
        assert len({len(shard.mini_batches[step]) for shard in dispatch.shards}) == 1
    assert sum(dispatch.batch.padding) == sum(-len(rows) % ranks for rows in mini_batches(batch.groups, each))
    assert dispatch.metrics["global_seqlen/mean"] == pytest.approx(sum(map(sum, groups)) / ranks)


@given(GROUPS, EACH)
def test_one_rank_is_the_identity(groups: list[list[int]], each: int) -> None:
    batch = batch_of(groups)
    dispatch = balance(batch, 1, groups_each=each)
    assert dispatch.batch is batch
    assert [list(rows) for rows in dispatch.shards[0].mini_batches] == mini_batches(batch.groups, each)


def test_one_rank_leaves_interleaved_groups_where_they_are() -> None:
    batch = batch_of([[5, 6], [7, 8]]).select([0, 2, 1, 3])
    dispatch = balance(batch, 1, groups_each=1)
    assert dispatch.batch is batch
    dispatch.check()


@given(GROUPS, RANKS, EACH)
def test_the_same_batch_is_always_split_the_same_way(groups: list[list[int]], ranks: int, each: int) -> None:
    assert balance(batch_of(groups), ranks, groups_each=each) == balance(batch_of(groups), ranks, groups_each=each)


def test_metrics_count_tokens_and_no_padding() -> None:
    dispatch = balance(batch_of([[9, 7, 2, 2, 1]]), 2, groups_each=1, equal_counts=True)
    assert sum(dispatch.batch.padding) == 1
    assert dispatch.metrics == {
        "global_seqlen/min": 3.0,
        "global_seqlen/max": 18.0,
        "global_seqlen/minmax_diff": 15.0,
        "global_seqlen/balanced_min": 10.0,
        "global_seqlen/balanced_max": 11.0,
        "global_seqlen/mean": 10.5,
    }


def test_the_example_of_the_metrics() -> None:
    metrics = balance(batch_of([[9, 7, 2, 2]]), 2, groups_each=1).metrics
    assert (metrics["global_seqlen/max"], metrics["global_seqlen/balanced_max"], metrics["global_seqlen/mean"]) == (16, 11, 10)


def test_the_heaviest_share_goes_to_the_rank_with_the_least_work() -> None:
    dispatch = balance(batch_of([[100, 10], [100, 10]]), 2, groups_each=1)
    assert [sum(int(tag["seq_len"]) for tag in shard.batch.tags) for shard in dispatch.shards] == [110, 110]


def test_a_tag_without_its_length_is_named() -> None:
    batch = KVBatchMeta(partition_id="train", keys=("a_0_0", "a_1_0"), tags=({"seq_len": 3}, {}))
    with pytest.raises(FieldError, match="a_1_0: tag 'seq_len' is missing"):
        balance(batch, 2, groups_each=1)


def test_a_batch_that_has_padding_rows_keeps_them_in_their_mini_batch() -> None:
    batch = padded(batch_of([[5, 6], [7, 8]]), 2).select([0, 1, 4, 2, 3, 5])
    dispatch = balance(batch, 2, groups_each=1)
    dispatch.check()
    assert [sum(rows.padding) for rows in dispatch.mini_batches] == [1, 1]


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match="ranks cannot take"):
        balance(batch_of([[1]]), ranks, groups_each=1)


def test_a_session_on_two_ranks_is_caught() -> None:
    batch = batch_of([[5, 6]], 2)
    broken = Dispatch(
        whole=batch, shards=tuple(Shard(batch=batch.select([row]), mini_batches=((0,),)) for row in (0, 1)), metrics={}
    )
    with pytest.raises(FieldError, match="session 'u0_0' is split over ranks 0 and 1"):
        broken.check()


@pytest.mark.parametrize("spoil", ["lost", "split"])
def test_a_broken_dispatch_is_caught(spoil: str) -> None:
    batch = batch_of([[5, 6], [7, 8]])
    steps = {"lost": ((0, 1), (2,)), "split": ((0, 2), (1, 3))}[spoil]
    broken = Dispatch(whole=batch, shards=(Shard(batch=batch, mini_batches=steps),), metrics={})
    with pytest.raises(FieldError):
        broken.check()
