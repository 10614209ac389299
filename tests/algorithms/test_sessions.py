"""Rows packed into sessions and back."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.sessions import Packing, session_rewards

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=9)


def _packing(rows: list[tuple[int, int]]) -> Packing:
    lengths, sessions = zip(*rows, strict=True)
    return Packing.of(torch.tensor(lengths), torch.tensor(sessions), num_columns=4)


def _numbered(rows: list[tuple[int, int]]) -> torch.Tensor:
    """1, 2, 3 ... on the tokens of the rows, 0 behind them."""
    inside = torch.arange(4) < torch.tensor([length for length, _ in rows])[:, None]
    return torch.where(inside, inside.flatten().cumsum(0).view(inside.shape), 0)


def test_rows_of_a_session_follow_each_other() -> None:
    packing = _packing([(2, 7), (0, 7), (3, 4), (1, 7), (2, 4)])
    rows = _numbered([(2, 7), (0, 7), (3, 4), (1, 7), (2, 4)])
    assert packing.pack(rows).tolist() == [[1, 2, 6, 0, 0], [3, 4, 5, 7, 8]]
    assert packing.pack(rows > 6).tolist() == [[False] * 5, [False] * 3 + [True] * 2]
    assert packing.sessions_B.tolist() == [0, 0, 1, 0, 1]
    assert packing.of_sessions(torch.tensor([10, 11, 12, 13, 14])).tolist() == [13, 14]
    assert packing.of_rows(torch.tensor([5, 6])).tolist() == [5, 5, 6, 5, 6]


@given(ROWS)
def test_packed_as_python_would(rows: list[tuple[int, int]]) -> None:
    packing, values = _packing(rows), _numbered(rows)
    sessions = list(dict.fromkeys(session for _, session in rows))
    joined = [
        [int(v) for row, (length, owner) in zip(values, rows, strict=True) if owner == session for v in row[:length]]
        for session in sessions
    ]
    packed = packing.pack(values)
    assert [row[: len(want)].tolist() for row, want in zip(packed, joined, strict=True)] == joined
    assert int(packed.sum()) == int(values.sum())  # and nothing else
    assert torch.equal(packing.unpack(packed), values)


@given(ROWS)
def test_the_index_tensors_pack_as_the_identity_does(rows: list[tuple[int, int]]) -> None:
    # one row a session takes the fast way; a second, empty row of one session takes the other
    alone = [(length, number) for number, (length, _) in enumerate(rows)]
    long_way = _packing([*alone, (0, 0)])
    assert _packing(alone).is_identity
    assert not long_way.is_identity
    packed = long_way.pack(torch.cat([_numbered(alone), torch.zeros(1, 4, dtype=torch.int64)]))
    assert torch.equal(packed, _numbered(alone)[:, : packed.shape[1]])


def test_the_identity_hands_its_input_back() -> None:
    packing = _packing([(4, 9), (1, 3)])
    rows = torch.rand(2, 4)
    assert packing.is_identity
    assert packing.pack(rows) is rows
    assert packing.unpack(rows) is rows
    assert session_rewards(rows, packing) is rows
    assert packing.of_sessions(rows) is rows


def test_a_score_counts_once_and_at_the_last_row_with_a_token() -> None:
    packing = _packing([(2, 0), (3, 0), (0, 0), (1, 1)])
    scores = torch.tensor([[0, 5.0, 0, 0], [0, 0, 5.0, 0], [0, 0, 0, 0], [2.0, 0, 0, 0]])
    assert packing.last_rows_S.tolist() == [1, 3]
    assert packing.pack(session_rewards(scores, packing)).tolist() == [[0, 0, 0, 0, 5], [2, 0, 0, 0, 0]]


def test_gradients_pass_through() -> None:
    packing = _packing([(2, 0), (1, 1), (2, 0)])
    rows = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(packing.pack(rows).square().sum(), rows)
    inside = torch.arange(4) < torch.tensor([2, 1, 2])[:, None]
    assert torch.equal(gradient, torch.where(inside, 2 * rows.detach(), 0.0))


def test_nothing_to_pack() -> None:
    packing = Packing.of(torch.tensor([0, 0]), torch.tensor([3, 3]), num_columns=2)
    assert packing.pack(torch.ones(2, 2)).shape == (1, 0)
    assert packing.unpack(torch.zeros(1, 0)).tolist() == [[0, 0], [0, 0]]
    assert Packing.of(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)).is_identity


def test_lengths_and_sessions_are_one_a_row() -> None:
    with pytest.raises(ValueError, match="2 lengths for 3 session numbers"):
        Packing.of(torch.tensor([1, 2]), torch.tensor([0, 0, 1]))


def test_a_wrong_index_is_noticed() -> None:
    packing, rows = _packing([(2, 0), (3, 1), (2, 0)]), _numbered([(2, 0), (3, 1), (2, 0)])
    broken = replace(packing, to_n=packing.to_n.flip(0))
    assert not torch.equal(broken.pack(rows), packing.pack(rows))
