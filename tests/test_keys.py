"""Keys restore the hierarchy; leases are values."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import KeyFormatError
from asyncrl.keys import GroupLease, Lease, SessionLease, StepLease, TrajectoryKey

numbers = st.integers(0, 10**18 - 1)


@given(uid=st.text(min_size=1), session_id=numbers, index=numbers)
def test_a_key_restores_uid_session_and_index(uid: str, session_id: int, index: int) -> None:
    key = TrajectoryKey(uid=uid, session_id=session_id, index=index)
    assert TrajectoryKey.parse(str(key)) == key


def test_numbers_are_taken_from_the_right() -> None:
    assert TrajectoryKey.parse("a_1_2_3") == TrajectoryKey(uid="a_1", session_id=2, index=3)


@given(text=st.from_regex(r"[a_]{0,3}_[0-9_²-]{0,3}_[0-9]{0,3}"))
def test_a_text_that_parses_is_spelled_exactly_like_its_key(text: str) -> None:
    with contextlib.suppress(KeyFormatError):
        assert str(TrajectoryKey.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "a", "a_1", "_0_0", "a_0_01", "a_-1_0", "a_1_", "a_1_²", "a_1_1.0", "a_ 1_0", f"a_0_{10**18}"]
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(KeyFormatError, match="uid_session_index"):
        TrajectoryKey.parse(text)


@pytest.mark.parametrize(("uid", "session_id", "index"), [("", 0, 0), ("a", -1, 0), ("a", 0, -1)])
def test_a_key_that_could_not_be_restored_is_never_made(uid: str, session_id: int, index: int) -> None:
    with pytest.raises(KeyFormatError, match="needs a uid and numbers from 0"):
        TrajectoryKey(uid=uid, session_id=session_id, index=index)


def test_keys_sort_by_number_not_by_spelling() -> None:
    keys = [TrajectoryKey(uid="a", session_id=number, index=0) for number in (10, 9, 2)]
    assert [key.session_id for key in sorted(keys)] == [2, 9, 10]


def test_leases_of_another_attempt_or_incarnation_differ() -> None:
    leases: set[Lease] = {
        GroupLease(uid="a"),
        GroupLease(uid="a", incarnation=1),
        SessionLease(uid="a", session_id=0),
        SessionLease(uid="a", session_id=0, attempt=1),
        SessionLease(uid="a", session_id=0, incarnation=1),
        StepLease(step=0),
        StepLease(step=0, incarnation=1),
    }
    assert len(leases) == 7
    assert SessionLease(uid="a", session_id=0, attempt=1) in leases
