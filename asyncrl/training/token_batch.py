"""One padded micro-batch for the policy: ids on the left, padding on the right, and where the tokens that need logits sit.

Legend: b rows, L longest row, n policy tokens of all rows together.

Right padding under causal attention needs no mask: a real token never looks right, and what padding computes is never read. So no
mask is built and the fast causal kernel runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from asyncrl.errors import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """input_ids_bL: int64. position_ids_bL: int64, or None for 0, 1, 2, ... in every row. select_n: int64, index into the flattened
    [b * L] hidden states whose next token is a policy token, row by row. labels_n: int64, that next token. lengths: of each row
    without its padding. is_packed: one row is several, one after the other; their position ids start again at 0."""

    input_ids_bL: torch.Tensor
    position_ids_bL: torch.Tensor | None
    select_n: torch.Tensor
    labels_n: torch.Tensor
    lengths: tuple[int, ...]
    is_packed: bool = False

    def to(self, device: torch.device) -> "TokenBatch":
        """The same on a device; itself where it is there."""
        if self.input_ids_bL.device == device:
            return self
        moved = {name: getattr(self, name).to(device) for name in ("input_ids_bL", "select_n", "labels_n")}
        positions = None if self.position_ids_bL is None else self.position_ids_bL.to(device)
        return replace(self, position_ids_bL=positions, **moved)


def token_batch(
    input_ids: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    position_ids: Sequence[torch.Tensor] | None = None,
) -> TokenBatch:
    """Rows to a micro-batch.

    input_ids: int64 [length] each; masks: bool [r] each, True on policy tokens among the *last* r tokens of the row;
    position_ids: int64 [length] each, or None. Log-probs of a row's last r tokens come from hidden states [end - r - 1, end - 1).
    Raises FieldError when a policy token has nothing before it, or a mask is longer than its row.
    """
    width = max(len(row) for row in input_ids)
    padded = torch.zeros(len(input_ids), width, dtype=torch.int64)
    selected = []
    for number, (ids, mask) in enumerate(zip(input_ids, masks, strict=True)):
        padded[number, : len(ids)] = ids
        first = len(ids) - len(mask)
        places = first + mask.nonzero()[:, 0]
        if first < 0 or (len(places) and int(places[0]) == 0):
            raise FieldError(
                f"row {number}: {len(mask)} response tokens in a sequence of {len(ids)}; the first has no token before it"
            )
        selected.append(number * width + places)
    labels_at = torch.cat(selected)
    return TokenBatch(
        input_ids_bL=padded,
        position_ids_bL=_positions(position_ids, width),
        select_n=labels_at - 1,
        labels_n=padded.flatten()[labels_at],
        lengths=tuple(len(row) for row in input_ids),
    )


def packed(batch: TokenBatch) -> TokenBatch:
    """The rows one after the other in one row without padding; itself where rows have position ids of their own, which would look
    like further rows.

    lengths (3, 2) -> position ids [0, 1, 2, 0, 1].
    """
    if batch.position_ids_bL is not None:
        return batch
    width = batch.input_ids_bL.shape[1]
    lengths = torch.tensor(batch.lengths)
    starts = lengths.cumsum(0) - lengths
    positions = torch.cat([torch.arange(length) for length in batch.lengths])
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    return TokenBatch(
        input_ids_bL=batch.input_ids_bL[rows, positions][None],
        position_ids_bL=positions[None],
        select_n=starts[batch.select_n // width] + batch.select_n % width,
        labels_n=batch.labels_n,
        lengths=batch.lengths,
        is_packed=True,
    )


def _positions(rows: Sequence[torch.Tensor] | None, width: int) -> torch.Tensor | None:
    ladder = torch.arange(width)
    if rows is None or all(torch.equal(row, ladder[: len(row)]) for row in rows):
        return None
    padded = torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded
