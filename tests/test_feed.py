"""The feed: every row once an epoch, in an order that seed and epoch decide, and the exact row after a restart."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import DataConfig
from asyncrl.dataset import RLHFDataset
from asyncrl.errors import ConfigError, GroupsExhaustedError
from asyncrl.feed import Feed, epoch_order
from asyncrl.world import RealWorld

MakeFeed = Callable[..., Feed]


@pytest.fixture(scope="module")
def make_feed(tmp_path_factory: pytest.TempPathFactory) -> MakeFeed:
    path = tmp_path_factory.mktemp("feed") / "x.jsonl"
    rows = [{"prompt": [{"role": "user", "content": str(number)}]} for number in range(7)]
    path.write_text("\n".join(map(json.dumps, rows)))
    dataset = RLHFDataset([str(path)], DataConfig())

    def make(
        *, seed: int = 1, shuffle: bool = True, epochs: int | None = 3, cursor: int = 0, run_seed: int = 0, out: str = ""
    ) -> Feed:
        world, is_left_out = RealWorld(run_seed=run_seed), lambda row: str(row) in out
        return Feed(dataset, world, seed=seed, shuffle=shuffle, epochs=epochs, cursor=cursor, is_left_out=is_left_out)

    return make


def drain(feed: Feed) -> list[tuple[str, str]]:
    """(uid, text) of every prompt that is left."""
    taken = []
    while prompt := feed.take(0):
        taken.append((prompt.uid, prompt.messages[0]["content"]))
    return taken


def test_every_epoch_has_every_row_once_and_an_order_of_its_own(make_feed: MakeFeed) -> None:
    texts = [text for _, text in drain(make_feed())]
    epochs = [texts[start : start + 7] for start in (0, 7, 14)]
    assert [sorted(epoch) for epoch in epochs] == [list("0123456")] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_without_shuffle_rows_come_as_in_the_files(make_feed: MakeFeed) -> None:
    assert "".join(text for _, text in drain(make_feed(shuffle=False, epochs=2))) == "01234560123456"


@given(cursor=st.integers(0, 25), shuffle=st.booleans())
def test_a_feed_goes_on_at_the_exact_row(make_feed: MakeFeed, cursor: int, shuffle: bool) -> None:
    feed = make_feed(shuffle=shuffle)
    for _ in range(cursor):
        feed.take(0)
    resumed = make_feed(shuffle=shuffle, cursor=feed.cursor)
    assert drain(resumed) == drain(feed) == drain(make_feed(shuffle=shuffle))[cursor:]


def test_the_order_depends_on_seed_and_epoch_alone(make_feed: MakeFeed) -> None:
    texts = [text for _, text in drain(make_feed(run_seed=1))]
    assert texts == [text for _, text in drain(make_feed(run_seed=2))]
    assert texts != [text for _, text in drain(make_feed(seed=2))]


def test_uids_are_those_of_the_worlds_numbers(make_feed: MakeFeed) -> None:
    world = RealWorld(run_seed=5)
    uids = [uid for uid, _ in drain(make_feed(run_seed=5, cursor=4))]
    assert uids == [world.uid(number) for number in range(4, 21)]
    assert len(set(uids)) == len(uids)


def test_the_end_leaves_the_cursor_where_it_is(make_feed: MakeFeed) -> None:
    feed = make_feed(epochs=1)
    assert len(drain(feed)) == feed.num_rows == feed.cursor == 7
    assert feed.take(0) is None
    assert feed.cursor == 7
    assert make_feed(epochs=1, cursor=50).take(0) is None


def test_without_epochs_there_is_no_end(make_feed: MakeFeed) -> None:
    feed = make_feed(epochs=None, cursor=7_000_000)
    assert feed.take(0) is not None
    assert feed.cursor == 7_000_001


def test_prompts_carry_the_version_of_their_admission(make_feed: MakeFeed) -> None:
    prompt = make_feed().take(42)
    assert prompt is not None
    assert prompt.global_steps == 42


def test_rows_in_quarantine_are_passed_over_and_the_others_keep_number_and_uid(make_feed: MakeFeed) -> None:
    every = drain(make_feed())
    assert drain(make_feed(out="25")) == [(uid, text) for uid, text in every if text not in "25"]


def test_a_prompt_knows_the_position_of_its_row(make_feed: MakeFeed) -> None:
    prompt = make_feed().take(0)
    assert prompt is not None
    assert str(prompt.row) == prompt.messages[0]["content"]


def test_a_feed_whose_rows_are_all_in_quarantine_says_so(make_feed: MakeFeed) -> None:
    with pytest.raises(GroupsExhaustedError, match=r"all 7 rows of data\.train_files are in quarantine"):
        make_feed(out="0123456", epochs=None).take(0)


def test_a_negative_cursor_is_refused(make_feed: MakeFeed) -> None:
    with pytest.raises(ConfigError, match="cursor is -1"):
        make_feed(cursor=-1)


def test_the_order_is_the_same_on_every_machine() -> None:
    # A change here makes every run that was begun before it resume at other rows.
    assert epoch_order(1, 0, 10).tolist() == [7, 4, 5, 9, 8, 1, 0, 6, 2, 3]
    assert epoch_order(1, 1, 10).tolist() == [9, 3, 7, 6, 4, 8, 1, 2, 5, 0]
    assert epoch_order(2**62, 10**6, 5).tolist() == [0, 1, 4, 2, 3]


def test_every_row_is_as_likely_in_every_place() -> None:
    counts = [[0] * 5 for _ in range(5)]
    for epoch in range(2000):
        for place, row in enumerate(epoch_order(3, epoch, 5).tolist()):
            counts[place][row] += 1
    assert all(320 < count < 480 for line in counts for count in line)
