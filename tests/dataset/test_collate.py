"""Rows to columns: tensors stacked, everything else one object a row."""

import numpy as np
import pytest
import torch

from asyncrl.dataset import collate_fn
from asyncrl.errors import FieldError
from asyncrl.ports import Json


def test_tensors_are_stacked_and_the_rest_are_object_arrays() -> None:
    rows = [{"ids": torch.tensor([number, 1]), "raw_prompt": [{"role": "user"}], "n": number} for number in range(3)]
    batch = collate_fn(rows)
    assert isinstance(batch["ids"], torch.Tensor)
    assert batch["ids"].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert isinstance(batch["n"], np.ndarray)
    assert (batch["n"].dtype, batch["n"].tolist()) == (np.dtype(object), [0, 1, 2])


@pytest.mark.parametrize("value", [[1, 2], "text", {"a": 1}, None, np.arange(2), (1, 2), [[1], [2]], b"xy"])
def test_equal_lengths_do_not_become_a_second_dimension(value: Json) -> None:
    column = collate_fn([{"a": value}, {"a": value}])["a"]
    assert isinstance(column, np.ndarray)
    assert (column.shape, column.dtype) == ((2,), np.dtype(object))
    assert column[0] is value


def test_dummy_tensor_counts_the_rows() -> None:
    dummy = collate_fn([{"a": 1}, {"a": 2}])["dummy_tensor"]
    assert isinstance(dummy, torch.Tensor)
    assert (dummy.shape, dummy.dtype, int(dummy.sum())) == ((2, 1), torch.uint8, 0)


def test_a_column_of_some_rows_is_none_in_the_others() -> None:
    batch = collate_fn([{"a": 1}, {"b": [2]}])
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([1, None], [None, [2]])


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.int64), None, 0.0])
def test_tensors_that_cannot_be_stacked_are_named(other: Json) -> None:
    with pytest.raises(FieldError, match="column 'ids' cannot be stacked"):
        collate_fn([{"ids": torch.zeros(2)}, {"ids": other}])


def test_no_rows_are_refused() -> None:
    with pytest.raises(FieldError, match="no rows"):
        collate_fn([])
