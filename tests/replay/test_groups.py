"""The state machine of a group."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import TransitionError
from asyncrl.ports import GroupStatus
from asyncrl.replay import PromptGroup, transition
from asyncrl.replay.groups import follow

PENDING, RUNNING, FINISHED, FAILURE = GroupStatus
EDGES = {(PENDING, RUNNING), (RUNNING, FINISHED), (RUNNING, FAILURE)}
PAIRS = list(itertools.product(GroupStatus, GroupStatus))
FORWARD = {*EDGES, (PENDING, FINISHED), (PENDING, FAILURE), *((status, status) for status in GroupStatus)}


@pytest.mark.parametrize(("start", "to"), PAIRS)
def test_a_status_moves_along_its_edges_only(start: GroupStatus, to: GroupStatus) -> None:
    group = PromptGroup(uid="a", since=0.0, status=start)
    if (start, to) in EDGES:
        transition(group, to)
        assert group.status is to
        return
    with pytest.raises(TransitionError, match=f"group 'a' cannot go from {start} to {to}"):
        transition(group, to)
    assert group.status is start


@pytest.mark.parametrize(("start", "to"), PAIRS)
def test_a_coalesced_view_may_skip_but_never_go_back(start: GroupStatus, to: GroupStatus) -> None:
    group = PromptGroup(uid="a", since=0.0, status=start)
    if (start, to) in FORWARD:
        follow(group, to)
        assert group.status is to
    else:
        with pytest.raises(TransitionError):
            follow(group, to)


def test_terminal_states_are_the_two_ends() -> None:
    assert [status for status in GroupStatus if status.is_terminal] == [FINISHED, FAILURE]


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), unique=True))
def test_keys_are_ordered_by_number_not_by_text(places: list[tuple[int, int]]) -> None:
    group = PromptGroup(uid="a_1", since=0.0, trajectories={f"a_1_{session}_{index}": {} for session, index in places})
    assert group.keys == [f"a_1_{session}_{index}" for session, index in sorted(places)]
    assert group.sessions == sorted({session for session, _ in places})


@pytest.mark.parametrize(("scores", "has_signal"), [((0.0, 1.0, 1.0), False), ((1.0, 0.0, 1.0), True), ((0.0, 0.0, 1.0), True)])
def test_the_last_trajectory_of_a_session_has_its_reward(scores: tuple[float, ...], has_signal: bool) -> None:
    tags = {key: {"score": score} for key, score in zip(("a_0_0", "a_0_1", "a_1_0"), scores, strict=True)}
    assert PromptGroup(uid="a", since=0.0, trajectories={**tags}).has_signal == has_signal
