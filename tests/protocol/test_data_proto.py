"""DataProto: the padded layout, and the way back to ragged columns."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from asyncrl.errors import FieldError
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.data_proto import DataProto, object_array, pad_batch, unpad_field
from asyncrl.protocol.ragged import lengths_of, ragged, rows_of


def _columns(prompts: list[list[int]], responses: list[list[int]], *names: str) -> TensorDict:
    rows = {
        "prompts": [torch.tensor(row, dtype=torch.int64) for row in prompts],
        "responses": [torch.tensor(row, dtype=torch.int64) for row in responses],
        "input_ids": [torch.tensor(p + r, dtype=torch.int64) for p, r in zip(prompts, responses, strict=True)],
        "position_ids": [torch.arange(len(p) + len(r)) for p, r in zip(prompts, responses, strict=True)],
    }
    return TensorDict({name: ragged(rows[name]) for name in names}, batch_size=[len(prompts)])


def test_the_padded_layout_starts_every_response_at_one_column() -> None:
    data = pad_batch(_columns([[1, 2, 3], [4]], [[5], [6, 7]], "prompts", "responses", "input_ids"))
    assert data.batch["prompts"].tolist() == [[1, 2, 3], [0, 0, 4]]
    assert data.batch["responses"].tolist() == [[5, 0], [6, 7]]
    assert data.batch["input_ids"].tolist() == [[1, 2, 3, 5, 0], [0, 0, 4, 6, 7]]
    assert data.batch["attention_mask"].int().tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert data.batch["prompt_lens"].tolist() == [3, 1]
    assert data.batch["response_lens"].tolist() == [1, 2]


def test_the_way_back_needs_no_input_ids() -> None:
    columns = _columns([[1, 2], [3]], [[4], [5, 6]], "prompts", "position_ids")
    data = pad_batch(columns)
    assert lengths_of(unpad_field(data, "position_ids", data.batch["position_ids"])).tolist() == [3, 3]


def test_the_way_back_works_on_a_part_of_the_rows() -> None:
    data = pad_batch(_columns([[1, 2, 3], [4]], [[5], [6, 7]], "prompts", "responses", "input_ids"))
    part = DataProto(batch=data.batch[1:])
    assert [row.tolist() for row in rows_of(unpad_field(part, "input_ids", part.batch["input_ids"]))] == [[4, 6, 7]]


def test_objects_and_scalars_pass_untouched() -> None:
    columns = TensorDict(
        {"session_id": torch.tensor([3, 4]), "extra_info": NonTensorStack({"a": [1, 2]}, {"a": [3, 4]})}, batch_size=[2]
    )
    data = pad_batch(columns)
    assert data.batch["session_id"].tolist() == [3, 4]
    assert data.non_tensor_batch["extra_info"].tolist() == [{"a": [1, 2]}, {"a": [3, 4]}]


def test_equal_length_lists_stay_lists() -> None:
    array = object_array([[1, 2], [3, 4]])
    assert array.shape == (2,)
    assert array.tolist() == [[1, 2], [3, 4]]


def test_columns_that_do_not_fit_are_refused() -> None:
    columns = _columns([[1, 2]], [[3]], "prompts", "responses", "input_ids")
    columns["advantages"] = ragged([torch.ones(2)])
    with pytest.raises(FieldError, match=r"field 'advantages' has response lengths \[2\], others of its axis have \[1\]"):
        pad_batch(columns)
    columns = _columns([[1, 2]], [[3]], "prompts", "responses")
    columns["input_ids"] = ragged([torch.ones(4, dtype=torch.int64)])
    with pytest.raises(FieldError, match=r"sequence lengths less prompt lengths are \[2\], response lengths \[1\]"):
        pad_batch(columns)
    with pytest.raises(FieldError, match="beside 'prompts'"):
        pad_batch(_columns([[1, 2]], [[3]], "input_ids"))
    with pytest.raises(FieldError, match="'nonsense' is not in the catalogue"):
        pad_batch(TensorDict({"nonsense": torch.zeros(1)}, batch_size=[1]))


@pytest.mark.parametrize("array", [np.empty(3, dtype=object), np.empty((2, 2), dtype=object)])
def test_an_object_array_of_another_shape_is_refused(array: "np.ndarray[tuple[int, ...], np.dtype[np.object_]]") -> None:
    with pytest.raises(FieldError, match="the batch has 2 rows"):
        DataProto(batch=TensorDict({"session_id": torch.zeros(2)}, batch_size=[2]), non_tensor_batch={"x": array})


def test_a_whole_batch_survives(make_batch: Callable[[], tuple[KVBatchMeta, TensorDict]]) -> None:
    _, columns = make_batch()
    data = pad_batch(columns)
    assert len(data) == 4
    assert data.non_tensor_batch["uid"].tolist() == ["u1", "u1", "u1", "u2"]
    assert data.batch["response_mask"].shape == (4, 4)
