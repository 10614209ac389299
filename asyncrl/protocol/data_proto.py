"""DataProto: the padded carrier between a stage and `algorithms/`, and its layout.

Padded layout (verl's): prompts padded on the left to P, responses on the right to R, input_ids = prompts | responses of width
L = P + R, so column P is the first response token of every row. Position ids of several axes are [B, A, L] (`position_ids.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from asyncrl.errors import FieldError
from asyncrl.fields import Axis, Field
from asyncrl.fields import field as catalogue_field
from asyncrl.ports import Json
from asyncrl.protocol.position_ids import pad_position_ids, unpad_position_ids
from asyncrl.protocol.ragged import fill, from_values, is_ragged, lengths_of, mask_of, offsets_of, to_padded, to_ragged, values_of


@dataclass(slots=True, kw_only=True)
class DataProto:
    """batch: tensors with the same leading size B; non_tensor_batch: object arrays of length B; meta_info: about the whole batch.

    Raises FieldError when an array's length is not B.
    """

    batch: TensorDict
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in self.non_tensor_batch.items():
            if column.ndim != 1 or len(column) != len(self):
                raise FieldError(f"non-tensor field {name!r} has shape {column.shape}, the batch has {len(self)} rows")

    def __len__(self) -> int:
        return int(self.batch.batch_size[0])


def pad_batch(columns: TensorDict) -> DataProto:
    """Ragged columns of a batch as padded tensors, plus `prompt_lens` and `response_lens` (int64 [B]) for the way back, and
    `attention_mask` (bool [B, L]) where there is a column of the sequence axis.

    Raises FieldError when columns of one axis differ in length, a sequence column comes without a prompt-axis column, or an
    `attention_mask` column is False somewhere: ragged rows have no padding.
    """
    lengths = _axis_lengths(columns)
    mask_BL = _sequence_mask(lengths) if Axis.SEQUENCE in lengths else None
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, np.ndarray] = {}
    for name, entry, column in _entries(columns):
        if not entry.is_tensor:
            objects[name] = object_array(column.tolist())
        elif is_ragged(column):
            tensors[name] = _pad(name, column, entry.axis, mask_BL)
        else:
            tensors[name] = column
    if Axis.PROMPT in lengths:
        tensors["prompt_lens"] = lengths[Axis.PROMPT]
    if Axis.RESPONSE in lengths:
        tensors["response_lens"] = lengths[Axis.RESPONSE]
    if mask_BL is not None:
        tensors["attention_mask"] = mask_BL
    return DataProto(batch=TensorDict(tensors, batch_size=[len(columns)]), non_tensor_batch=objects)


def unpad_field(data: DataProto, name: str, padded: torch.Tensor) -> torch.Tensor:
    """A padded [B, ...] field back to its ragged form, by the lengths that `pad_batch` kept."""
    axis = catalogue_field(name).axis
    if axis is Axis.NONE:
        return padded
    if axis is Axis.PROMPT:
        return to_ragged(padded, data.batch["prompt_lens"], side="left")
    if axis is Axis.RESPONSE:
        return to_ragged(padded, data.batch["response_lens"])
    mask = data.batch["attention_mask"]
    if name == "position_ids":
        return unpad_position_ids(padded, mask)
    return from_values(padded[mask], offsets_of(mask.sum(1)))


def object_array(values: list[Json]) -> np.ndarray:
    """1-D object array; equal-length lists stay lists (numpy would make them a second dimension)."""
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):
        array[position] = value
    return array


def _entries(columns: TensorDict) -> Iterator[tuple[str, Field, Any]]:
    """Name, catalogue entry and column, of every column."""
    for key in columns.keys():  # noqa: SIM118  a TensorDict iterates over rows, not names
        name = str(key)
        yield name, catalogue_field(name), columns.get(name)


def _axis_lengths(columns: TensorDict) -> dict[Axis, torch.Tensor]:
    lengths: dict[Axis, torch.Tensor] = {}
    for name, entry, column in _entries(columns):
        if entry.is_tensor and is_ragged(column):
            found = lengths_of(column)
            known = lengths.setdefault(entry.axis, found)
            if not torch.equal(found, known):
                raise FieldError(
                    f"field {name!r} has {entry.axis} lengths {found.tolist()}, others of its axis have {known.tolist()}"
                )
    if Axis.SEQUENCE in lengths and Axis.PROMPT not in lengths:
        raise FieldError("sequence fields can only be padded beside 'prompts', which says where a response begins")
    if Axis.SEQUENCE in lengths:
        response = lengths[Axis.SEQUENCE] - lengths[Axis.PROMPT]
        known = lengths.setdefault(Axis.RESPONSE, response)
        if not torch.equal(response, known):
            raise FieldError(f"sequence lengths less prompt lengths are {response.tolist()}, response lengths {known.tolist()}")
    return lengths


def _pad(name: str, column: torch.Tensor, axis: Axis, mask_BL: torch.Tensor | None) -> torch.Tensor:
    if axis is Axis.PROMPT:
        return to_padded(column, side="left")
    if axis is Axis.RESPONSE:
        return to_padded(column)
    assert mask_BL is not None, "there is a mask where there is a column of the sequence axis"
    if name == "position_ids":
        return pad_position_ids(column, mask_BL)
    values = values_of(column)
    if name == "attention_mask" and not values.all():
        raise FieldError(f"field 'attention_mask' is False at entry {int(values.int().argmin())}, but ragged rows have no padding")
    return fill(torch.zeros((*mask_BL.shape, *values.shape[1:]), dtype=values.dtype, device=values.device), mask_BL, values)


def _sequence_mask(lengths: Mapping[Axis, torch.Tensor]) -> torch.Tensor:
    """bool [B, L]: the prompt's tokens end, and the response's begin, at column P."""
    prompts, responses = lengths[Axis.PROMPT], lengths[Axis.RESPONSE]
    return torch.cat([mask_of(prompts, int(prompts.max()), side="left"), mask_of(responses, int(responses.max()))], dim=1)
