"""What the invariants are written with: rows and positions of tokens, and the first one that is wrong, with its numbers."""

import torch
from tensordict import TensorDict

from asyncrl.errors import FieldError
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import lengths_of, offsets_of, values_of


class Tokens:
    """The entries of a ragged column, flat: of its rows only the bounds are kept, so a check costs little where all is well."""

    def __init__(self, column: torch.Tensor) -> None:
        self._lengths = lengths_of(column)
        self._offsets = offsets_of(self._lengths)

    def place(self, at: int) -> tuple[int, int]:
        """Row and position of the flat entry `at`."""
        row = int(torch.searchsorted(self._offsets, at, right=True)) - 1
        return row, at - int(self._offsets[row])

    def first(self, wrong: torch.Tensor) -> list[tuple[int, int, int]]:
        """Row, position and flat index of the first True entry of bool [N]; empty when there is none."""
        if not wrong.any():
            return []
        at = int(wrong.int().argmax())
        return [(*self.place(at), at)]

    def chosen(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat indexes of the True entries, int64 [n], and the bounds of each row among them, int64 [B + 1]."""
        indexes = mask.nonzero()[:, 0]
        return indexes, torch.searchsorted(indexes, self._offsets)


def names_of(columns: TensorDict) -> list[str]:
    """In the order of the columns, so that a message is the same at every run."""
    return list(map(str, columns.keys()))


def present(columns: TensorDict, *names: str) -> list[str]:
    found = names_of(columns)
    return [name for name in names if name in found]


def row_sums(column: torch.Tensor) -> torch.Tensor:
    """[B], int64 for a mask."""
    values = values_of(column)
    if values.dtype == torch.bool:  # whole numbers: the difference of two running sums is exact, and needs no row numbers
        return offsets_of(values)[offsets_of(lengths_of(column))].diff()
    lengths = lengths_of(column)
    return values.new_zeros(len(lengths)).index_add(0, torch.repeat_interleave(lengths), values)


def differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ; NaN equals NaN."""
    return (left != right) & ~((left != left) & (right != right))


def refuse_rows(meta: KVBatchMeta, found: torch.Tensor, expected: torch.Tensor, says: str, but: str) -> None:
    """Raise for the first row whose two numbers differ: `<key>: <says> <found> <but> <expected>`."""
    for row in (found != expected).nonzero()[:1, 0].tolist():
        raise FieldError(f"{meta.keys[row]}: {says} {found[row].item()} {but} {expected[row].item()}")


def refuse_tags(meta: KVBatchMeta, tag: str, expected: torch.Tensor, source: str) -> None:
    """Raise for the first row whose tag is another number; rows without the tag are fine."""
    for key, tags, number in zip(meta.keys, meta.tags, expected.tolist(), strict=True):
        if tag in tags and tags[tag] != number:
            raise FieldError(f"{key}: tag {tag!r} is {tags[tag]}, but {source} is {number}")


def refuse_outside_mask(meta: KVBatchMeta, columns: TensorDict, name: str) -> None:
    """Raise for the first entry that is not 0 where `response_mask` is False."""
    values, mask = values_of(columns[name]), values_of(columns["response_mask"])
    for row, position, at in Tokens(columns[name]).first(~mask & (values != 0)):
        raise FieldError(
            f"{meta.keys[row]}: field {name!r} is {float(values[at])} at position {position}, "
            "where 'response_mask' is False; allowed: 0"
        )
