"""From ragged columns to micro-batches, and the forward pass without gradient. Shared by actor, reference and critic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from tensordict import TensorDict

from asyncrl.errors import FieldError
from asyncrl.protocol.ragged import from_values, offsets_of, rows_of
from asyncrl.training.microbatch import pack_micro_batches
from asyncrl.training.model import Policy
from asyncrl.training.token_batch import TokenBatch, token_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a batch, one tensor each: input_ids int64 [P + R], position_ids int64 [P + R], mask bool [R] (policy tokens)."""

    input_ids: list[torch.Tensor]
    position_ids: list[torch.Tensor]
    mask: list[torch.Tensor]

    @classmethod
    def of(cls, columns: TensorDict) -> Self:
        """Raises FieldError when a response is longer than its sequence."""
        rows = cls(
            input_ids=rows_of(columns["input_ids"]),
            position_ids=rows_of(columns["position_ids"]),
            mask=rows_of(columns["response_mask"]),
        )
        for number, (ids, mask) in enumerate(zip(rows.input_ids, rows.mask, strict=True)):
            if len(mask) > len(ids):
                raise FieldError(f"row {number} has a response_mask of {len(mask)} entries but {len(ids)} input_ids")
        return rows

    def micro_batches(self, chosen: Sequence[int], max_tokens: int, *, together: Sequence[int] = ()) -> list[list[int]]:
        """The chosen rows packed under the token budget, as row numbers of the batch. together: a number for each row of the batch;
        rows of one number are not parted.

        Rows without a policy token (padding rows, responses of observations alone) are left out: they have no logit, so they would
        cost a forward pass and move the rounding of the rows beside them.
        """
        scored = [row for row in chosen if self.mask[row].any()]
        units = [together[row] for row in scored] if together else ()
        packed = pack_micro_batches([len(self.input_ids[row]) for row in scored], max_tokens, together=units)
        return [[scored[place] for place in places] for places in packed]

    def token_batch(self, chosen: Sequence[int]) -> TokenBatch:
        return token_batch(
            [self.input_ids[row] for row in chosen],
            [self.mask[row] for row in chosen],
            [self.position_ids[row] for row in chosen],
        )

    def split(self, values_n: torch.Tensor, chosen: Sequence[int]) -> list[torch.Tensor]:
        """Values at the policy tokens of the chosen rows, a tensor a row again."""
        return list(torch.split(values_n, [int(self.mask[row].sum()) for row in chosen]))

    def on_policy_tokens(self, column: Sequence[torch.Tensor], chosen: Sequence[int]) -> torch.Tensor:
        """Values of a response column at the policy tokens of the chosen rows, in the order of `token_batch(chosen).labels_n`."""
        return torch.cat([column[row][self.mask[row]] for row in chosen])


def score_responses(
    policy: Policy, columns: TensorDict, *, max_tokens: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_probs, entropy), ragged float32 on the response axis, without gradient; 0 where the mask is 0.

    columns needs input_ids, position_ids and response_mask. Natural logs under softmax(logits / temperature): top-k and top-p of
    the rollout are not modelled, so with them on the engine's log-probs are higher than these.
    """
    log_probs, entropy = score_tokens(lambda batch: policy(batch, temperature), columns, max_tokens=max_tokens, count=2)
    return log_probs, entropy


def score_tokens(
    forward: Callable[[TokenBatch], Sequence[torch.Tensor]], columns: TensorDict, *, max_tokens: int, count: int
) -> list[torch.Tensor]:
    """The `count` numbers that `forward` gives for each policy token, each as a ragged float32 column on the response axis.

    Without gradient; 0 where the mask is 0. columns needs input_ids, position_ids and response_mask.
    """
    rows = Rows.of(columns)
    lengths = torch.tensor([len(mask) for mask in rows.mask])
    offsets = offsets_of(lengths)
    values = [torch.zeros(int(lengths.sum())) for _ in range(count)]
    with torch.no_grad():
        for chosen in rows.micro_batches(range(len(rows.mask)), max_tokens):
            places = torch.cat([offsets[row] + rows.mask[row].nonzero()[:, 0] for row in chosen])
            for target, scored in zip(values, forward(rows.token_batch(chosen)), strict=True):
                target[places] = scored.float()
    return [from_values(value, offsets) for value in values]
