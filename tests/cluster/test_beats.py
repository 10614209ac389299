"""Beats: what a rank did last, in memory that the controller reads; nothing in a process that is no rank."""

import time
from collections.abc import Iterator
from mmap import mmap

import pytest

from asyncrl.cluster import beat, beats


@pytest.fixture
def board() -> Iterator[beats.Board]:
    yield beats.Board(mmap(-1, 2 * beats.SLOT_BYTES), 2)
    beats.listen(None)


def test_nobody_listens_in_one_process() -> None:
    beat("unheard")


def test_a_beat_has_its_rank_count_time_and_words(board: beats.Board) -> None:
    beats.listen(lambda text: board.write(1, text))
    before = time.monotonic()
    beat("a long text that is followed by a shorter one")
    beat("short")
    assert board.read(0) == beats.Beat(count=0, at=0.0, text="")
    last = board.all()[1]
    assert (last.count, last.text) == (2, "short")
    assert before <= last.at <= time.monotonic()


def test_words_of_any_length_stay_in_their_slot(board: beats.Board) -> None:
    board.write(1, "other")
    board.write(0, "\N{GREEK SMALL LETTER ALPHA}" * 1000 + "x")
    assert set(board.read(0).text) == {"\N{GREEK SMALL LETTER ALPHA}"}
    assert board.read(1).text == "other"
