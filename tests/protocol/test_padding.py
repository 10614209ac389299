"""Padding rows: valid by every invariant, weightless, and dropped without a trace."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from asyncrl.errors import FieldError
from asyncrl.fields import CATALOGUE, TAGS, Axis
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants import check_batch, padding_and_back_is_the_identity
from asyncrl.protocol.padding import drop_padding, padded, with_padding
from asyncrl.protocol.ragged import is_ragged, lengths_of, ragged, rows_of

Batch = tuple[KVBatchMeta, TensorDict]

LENGTHS = {Axis.PROMPT: 1, Axis.RESPONSE: 1, Axis.SEQUENCE: 2}


def _same(left: TensorDict, right: TensorDict) -> None:
    assert list(left.keys()) == list(right.keys())
    for name in map(str, left.keys()):
        one, other = left.get(name), right.get(name)
        if not isinstance(one, torch.Tensor):
            assert one.tolist() == other.tolist()
        elif is_ragged(one):
            assert [row.tolist() for row in rows_of(one)] == [row.tolist() for row in rows_of(other)]
            assert one.dtype == other.dtype
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_padded_batch_keeps_every_invariant(make_batch: Callable[[], Batch], count: int) -> None:
    meta, columns = make_batch()
    meta = padded(meta, count)
    columns = with_padding(meta, columns)
    check_batch(meta, columns)
    padding_and_back_is_the_identity(meta, columns)


def test_adding_and_dropping_is_the_identity(make_batch: Callable[[], Batch]) -> None:
    meta, columns = make_batch()
    whole = padded(meta, 3)
    dropped, back = drop_padding(whole, with_padding(whole, columns))
    assert dropped == meta
    _same(back, columns)
    assert drop_padding(meta, columns) == (meta, columns)


@given(st.permutations(range(7)))
def test_padding_rows_may_stand_anywhere(order: list[int]) -> None:
    meta = padded(KVBatchMeta(partition_id="train", keys=("a_0_0", "a_1_0", "b_0_0", "b_1_0"), tags=({},) * 4), 3).select(order)
    rows = [torch.arange(1, 2 + row) for row in order if row < 4]
    whole = with_padding(meta, TensorDict({"responses": ragged(rows)}, batch_size=[4]))
    assert [len(row) for row in rows_of(whole["responses"])] == [row + 1 if row < 4 else 1 for row in order]
    back, columns = drop_padding(meta, whole)
    assert back == meta.without_padding()
    assert [row.tolist() for row in rows_of(columns["responses"])] == [row.tolist() for row in rows]


def test_every_field_of_the_catalogue_can_be_padded() -> None:
    column: dict[str, object] = {}
    for name, entry in CATALOGUE.items():
        if not entry.is_tensor:
            column[name] = NonTensorStack({"told": 1})
        elif entry.axis is Axis.NONE:
            column[name] = torch.ones(1, dtype=getattr(torch, entry.dtype))
        else:
            column[name] = ragged([torch.ones(LENGTHS[entry.axis] + 3, dtype=getattr(torch, entry.dtype))])
    meta = padded(KVBatchMeta(partition_id="train", keys=("a_0_0",), tags=({},)), 1)
    whole = with_padding(meta, TensorDict(column, batch_size=[1]))
    for name, entry in CATALOGUE.items():
        value = whole.get(name)
        if entry.is_tensor:
            assert value.dtype == getattr(torch, entry.dtype)
            assert entry.axis is Axis.NONE or lengths_of(value).tolist()[1] == LENGTHS[entry.axis]
    assert whole["token_versions"].unbind()[1].tolist() == [-1]
    assert whole["position_ids"].unbind()[1].tolist() == [0, 1]
    assert whole["attention_mask"].unbind()[1].tolist() == [True, True]
    assert not whole["response_mask"].unbind()[1].any()
    assert whole.get("uid").tolist() == [{"told": 1}, "padding0"]
    assert whole.get("extra_fields").tolist() == [{"told": 1}, {}]


def test_position_ids_of_several_axes_keep_their_axes() -> None:
    meta = padded(KVBatchMeta(partition_id="train", keys=("a_0_0",), tags=({},)), 1)
    whole = with_padding(meta, TensorDict({"position_ids": ragged([torch.zeros(5, 3, dtype=torch.int64)])}, batch_size=[1]))
    assert rows_of(whole["position_ids"])[1].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_a_padding_row_has_a_uid_of_its_own_and_a_whole_tag() -> None:
    first = padded(KVBatchMeta(partition_id="train", keys=("padding1_0_0", "b_0_0"), tags=({}, {})), 2)
    again = padded(first, 1)
    assert again.uids == ("padding1", "b", "padding0", "padding2", "padding3")
    assert again.groups == ("padding1", "b", None, None, None)
    assert set(again.tags[-1]) == {name for name, tag in TAGS.items() if tag.on in ("both", "trajectory")}
    assert again.without_padding().keys == ("padding1_0_0", "b_0_0")


def test_columns_of_another_batch_are_refused(make_batch: Callable[[], Batch]) -> None:
    meta, columns = make_batch()
    with pytest.raises(FieldError, match=r"3 trajectories and 0 padding rows got \[4\] rows"):
        with_padding(meta.select([0, 1, 2]), columns)
    only_padding = padded(meta, 2).select([4, 5])
    with pytest.raises(FieldError, match="0 trajectories among 2 rows"):
        drop_padding(only_padding, TensorDict({"responses": ragged([torch.zeros(1)] * 2)}, batch_size=[2]))
