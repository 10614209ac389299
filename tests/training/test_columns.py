"""Columns as flat tensors: what comes back is what went in, and columns of one axis still have their offsets in common."""

import torch
from tensordict import TensorDict

from asyncrl.protocol.ragged import ragged, rows_of
from asyncrl.training.columns import columns_of, flat_columns, offsets_in


def _columns() -> TensorDict:
    lengths = (3, 0, 2)
    columns = {
        "input_ids": ragged([torch.arange(length + 2) for length in lengths]),
        "response_mask": ragged([torch.rand(length) < 0.5 for length in lengths]),
        "advantages": ragged([torch.randn(length) for length in lengths]),
        "routed": ragged([torch.randint(9, (length, 2, 4), dtype=torch.int16) for length in lengths]),
        "rm_scores": torch.randn(3),
    }
    return TensorDict(columns, batch_size=[3])


def test_columns_come_back_as_they_were() -> None:
    columns = _columns()
    back = columns_of(flat_columns(columns), 3)
    assert set(back.keys()) == set(columns.keys())
    assert back.batch_size == columns.batch_size
    assert back["rm_scores"].equal(columns["rm_scores"])
    for name in ("input_ids", "response_mask", "advantages", "routed"):
        assert back[name].dtype == columns[name].dtype
        assert all(one.equal(two) for one, two in zip(rows_of(back[name]), rows_of(columns[name]), strict=True))


def test_columns_of_one_axis_share_their_offsets_and_can_be_combined() -> None:
    flat = flat_columns(_columns())
    assert sorted(name for name in flat if name.startswith("|")) == ["|0", "|1"]
    back = columns_of(flat, 3)
    assert offsets_in(back["response_mask"]) is offsets_in(back["advantages"])
    assert (back["response_mask"] * back["advantages"]).shape == back["advantages"].shape


def test_nothing_is_copied_and_what_is_no_column_is_left_out() -> None:
    columns = _columns()
    flat = flat_columns(columns)
    back = columns_of({**flat, "a result": torch.zeros(5)}, 3)
    assert set(back.keys()) == set(columns.keys())
    back["advantages"].values()[0] = 7.0
    assert float(columns["advantages"].values()[0]) == 7.0
