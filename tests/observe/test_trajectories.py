"""Trajectories as text: the turns are those of the mask, and no text can imitate or break the page."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe.run_folder import RunFolder
from asyncrl.observe.trajectories import TrajectoryText, Turn, render_trajectory, to_turns, write_trajectories


def spell(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def to_ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_turns_are_cut_where_the_mask_changes() -> None:
    turns = to_turns(to_ids("call<result>done"), [1] * 4 + [0] * 8 + [1] * 4, lambda ids: spell(list(ids)))
    assert turns == (Turn(is_policy=True, text="call"), Turn(is_policy=False, text="<result>"), Turn(is_policy=True, text="done"))


@given(st.lists(st.tuples(st.integers(32, 126), st.booleans())))
def test_no_token_is_lost_and_neighbours_differ(tokens: list[tuple[int, bool]]) -> None:
    ids, mask = [token for token, _ in tokens], [bit for _, bit in tokens]
    turns = to_turns(ids, mask, lambda part: spell(list(part)))
    assert "".join(turn.text for turn in turns) == spell(ids)
    assert all(first.is_policy != second.is_policy for first, second in pairwise(turns))


def test_ids_and_mask_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        to_turns([1, 2], [1], str)


def test_a_page_reads_like_this() -> None:
    trajectory = TrajectoryText(
        key="ab_0_0",
        reward=1.0,
        prompt="<user>12 + 30?",
        turns=(Turn(is_policy=True, text="call\nit"), Turn(is_policy=False, text="42"), Turn(is_policy=True, text="42")),
        facts={"num_turns": 2},
    )
    assert render_trajectory(trajectory).splitlines() == [
        "=== ab_0_0  reward=1  num_turns=2",
        "--- prompt", "| <user>12 + 30?",
        "--- policy", "| call", "| it",
        "--- environment", "| 42",
        "--- policy", "| 42",
    ]  # fmt: skip


@given(st.text(st.characters(codec=None)), st.text(st.characters(codec=None)))
def test_no_text_moves_the_cursor_or_imitates_a_heading(text: str, fact: str) -> None:
    page = render_trajectory(TrajectoryText(key=fact, reward=0.0, prompt=text, turns=(), facts={"data_source": fact}))
    lines = page.split("\n")
    assert [line for line in lines if not line.startswith("| ")] == [lines[0], "--- prompt", ""]
    assert all(character.isprintable() or character == "\u3000" for line in lines for character in line)
    page.encode("utf-8")


def test_control_characters_are_spelled_out() -> None:
    page = render_trajectory(TrajectoryText(key="k", reward=0.0, prompt="a\x1b[2J\r\u202eb\ud800\u00e9\u4e2d\u3000", turns=()))
    assert r"| a\x1b[2J\r\u202eb\ud800" + "\u00e9\u4e2d\u3000" in page


def test_a_repeated_step_replaces_its_file(folder: RunFolder) -> None:
    for prompt in ("first", "second"):
        path = write_trajectories(folder.trajectories, 12, [TrajectoryText(key="k", reward=0.5, prompt=prompt, turns=())] * 2)
    assert path == folder.trajectories / "step_000012.txt"
    assert list(folder.trajectories.iterdir()) == [path]
    assert path.read_text().count("second") == 2
    assert "first" not in path.read_text()
