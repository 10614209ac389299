"""Position ids of text and of several axes: ragged, padded and as a model takes them, there and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.errors import FieldError
from asyncrl.protocol.position_ids import (
    model_axes_first,
    pad_position_ids,
    ragged_text_position_ids,
    text_position_ids,
    unpad_position_ids,
)
from asyncrl.protocol.ragged import lengths_of, mask_of, ragged, rows_of

MASK = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)

masks = st.integers(1, 7).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4)
)


def _column(mask: torch.Tensor, num_axes: int | None) -> torch.Tensor:
    """Rows as long as the mask says, every entry another number: an entry that moves is seen."""
    lengths, inner = mask.sum(1).tolist(), () if num_axes is None else (num_axes,)
    start, rows = 0, []
    for length in lengths:
        count = length * (num_axes or 1)
        rows.append(torch.arange(start, start + count).reshape(length, *inner))
        start += count
    return ragged(rows)


def test_text_counts_from_the_first_real_token_and_padding_has_zero() -> None:
    expected = [[0, 0, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0] * 6]
    assert text_position_ids(MASK).tolist() == expected
    assert text_position_ids(MASK.long()).tolist() == expected, "Hugging Face's masks are int64"
    assert text_position_ids(MASK).dtype == torch.int64


def test_padding_inside_a_row_is_not_counted() -> None:
    """A padded prompt, then a padded response: the second begins where the first ended."""
    assert text_position_ids(torch.tensor([[False, True, True, False, True, False]])).tolist() == [[0, 0, 1, 0, 2, 0]]


@given(rows=masks)
def test_ragged_and_padded_text_ids_are_the_same_numbers(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    column = ragged_text_position_ids(mask.sum(1))
    assert [row.tolist() for row in rows_of(column)] == [list(range(sum(row))) for row in rows]
    assert torch.equal(pad_position_ids(column, mask), text_position_ids(mask))


@pytest.mark.parametrize("num_axes", [None, 1, 3, 4], ids=["text", "one axis", "three axes", "four axes"])
@given(rows=masks)
def test_padding_and_back_is_the_identity(num_axes: int | None, rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    column = _column(mask, num_axes)
    padded = pad_position_ids(column, mask)
    assert padded.shape == (len(rows), *([] if num_axes is None else [num_axes]), len(rows[0]))
    assert not padded.movedim(-1, 1)[~mask].any(), "padding has position 0"
    back = unpad_position_ids(model_axes_first(model_axes_first(padded)), mask)
    assert [row.tolist() for row in rows_of(back)] == [row.tolist() for row in rows_of(column)]
    assert torch.equal(lengths_of(back), lengths_of(column))


def test_every_axis_of_a_token_stays_with_its_token() -> None:
    """Two tokens of text around an image of 1 x 2 x 2: (time, height, width) of each, by hand."""
    token_axes = [[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [3, 3, 3]]
    padded = pad_position_ids(ragged([torch.tensor(token_axes)]), mask_of(torch.tensor([6]), 8, side="left"))
    assert padded.tolist() == [[[0, 0, 0, 1, 1, 1, 1, 3], [0, 0, 0, 1, 1, 2, 2, 3], [0, 0, 0, 1, 2, 1, 2, 3]]]
    assert model_axes_first(padded).shape == (3, 1, 8), "axis, batch, token: what a Hugging Face model takes"
    assert model_axes_first(text_position_ids(MASK)).shape == (3, 6), "text is [B, L] there too"


def test_left_padding_changes_no_logit() -> None:
    """The reason for counting from the first real token, on a model that knows nothing of our layouts."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    model = Qwen2ForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], dim=1)
    mask = mask_of(torch.tensor([5]), 8, side="left")
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        shifted = model(input_ids=padded, attention_mask=mask.long(), position_ids=text_position_ids(mask)).logits
    torch.testing.assert_close(shifted[:, 3:], plain)


def test_another_shape_is_refused() -> None:
    with pytest.raises(FieldError, match=r"row 1 of field 'position_ids' has 2 entries, its attention mask has 3 tokens"):
        pad_position_ids(ragged([torch.arange(3), torch.arange(2)]), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(FieldError, match=r"'position_ids' has shape \(2, 3, 4\); allowed: ragged rows \[L\] or \[L, A\]"):
        pad_position_ids(ragged([torch.zeros(2, 3, 4)]), torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(FieldError, match=r"padded to \(2, 3, 5\), its attention mask to \(2, 3\)"):
        unpad_position_ids(torch.zeros(2, 3, 5), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(FieldError, match=r"'position_ids' has shape \(5,\); allowed: padded"):
        unpad_position_ids(torch.zeros(5), torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(FieldError, match="allowed: padded"):
        model_axes_first(torch.zeros(5))
