"""Position ids: where a token stands for the model. Text has one number a token, a multi-modal model (mRoPE) one an axis.

    agents write ragged rows -> [pad_position_ids] -> padded -> [model_axes_first] -> forward pass

Legend: B rows, L = P + R, A axes. Three forms of the same numbers:

| form                        | text   | multi-axis  | who takes it                                                   |
|-----------------------------|--------|-------------|----------------------------------------------------------------|
| ragged, a row of the store  | [L]    | [L, A]      | the TransferQueue: the token first, like every other column    |
| padded, `DataProto.batch`   | [B, L] | [B, A, L]   | verl's DataProto: the batch first, so that it can be split     |
| of a forward pass           | [B, L] | [A, B, L]   | Hugging Face's Qwen2-VL and its kin: the axis first            |

The axes are time, height, width (A = 3), or text, time, height, width (A = 4): verl puts the plain count of tokens in front, which
the model takes for its mask. A text token has the same number on all axes of the first kind. Invariants:
1. Text counts up from 0 at the first token; in padded layout from the first real one, whatever stands before it.
2. Padding has 0, in every form: it is masked, and 0 is an entry that every position table has.
3. Each function has its inverse, and there and back is the identity.
"""

import torch

from asyncrl.errors import FieldError
from asyncrl.protocol.ragged import fill, from_values, lengths_of, offsets_of


def text_position_ids(attention_mask_BL: torch.Tensor) -> torch.Tensor:
    """int64 [B, L]: 0, 1, 2, ... over the real tokens of each row, 0 on padding. attention_mask_BL: bool or 0/1, True on tokens."""
    mask = attention_mask_BL.bool()
    return (mask.cumsum(1) - 1) * mask


def ragged_text_position_ids(lengths: torch.Tensor) -> torch.Tensor:
    """The same for ragged rows: 0 .. length - 1 in each. lengths: int64 [B], zero allowed."""
    offsets = offsets_of(lengths)
    return from_values(torch.arange(int(offsets[-1]), device=lengths.device) - offsets[:-1].repeat_interleave(lengths), offsets)


def pad_position_ids(column: torch.Tensor, attention_mask_BL: torch.Tensor) -> torch.Tensor:
    """Ragged [L] or [L, A] rows as [B, L] or [B, A, L]; 0 on padding.

    Raises FieldError when a row has another number of tokens than its mask, or its entries have more than one dimension.
    """
    values, mask = column.values(), attention_mask_BL.bool()
    _refuse_dimensions("ragged rows [L] or [L, A]", 1, tuple(values.shape))
    lengths, tokens = lengths_of(column), mask.sum(1)
    for row in (lengths != tokens).nonzero()[:1, 0].tolist():
        raise FieldError(
            f"row {row} of field 'position_ids' has {int(lengths[row])} entries, its attention mask has {int(tokens[row])} tokens"
        )
    padded = torch.zeros((*mask.shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return fill(padded, mask, values).movedim(1, -1)


def unpad_position_ids(padded: torch.Tensor, attention_mask_BL: torch.Tensor) -> torch.Tensor:
    """Inverse of `pad_position_ids`. Raises FieldError unless padded is [B, L] or [B, A, L] with the mask's B and L."""
    mask = attention_mask_BL.bool()
    _refuse_dimensions("padded [B, L] or [B, A, L]", 2, tuple(padded.shape))
    if (padded.shape[0], padded.shape[-1]) != mask.shape:
        raise FieldError(f"field 'position_ids' is padded to {tuple(padded.shape)}, its attention mask to {tuple(mask.shape)}")
    return from_values(padded.movedim(-1, 1)[mask], offsets_of(mask.sum(1)))


def model_axes_first(padded: torch.Tensor) -> torch.Tensor:
    """[B, A, L] as [A, B, L], what a forward pass takes; [B, L] as it is. Its own inverse."""
    _refuse_dimensions("padded [B, L] or [B, A, L]", 2, tuple(padded.shape))
    return padded if padded.ndim == 2 else padded.transpose(0, 1)


def _refuse_dimensions(form: str, fewest: int, shape: tuple[int, ...]) -> None:
    """Text has `fewest` dimensions in this form, the multi-axis ids one more."""
    if len(shape) not in (fewest, fewest + 1):
        raise FieldError(f"field 'position_ids' has shape {shape}; allowed: {form}")
