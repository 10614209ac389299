"""From ragged columns to micro-batches, and the forward pass without gradient. Shared by actor, reference and critic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn

from asyncrl.config import ModelConfig
from asyncrl.errors import FieldError
from asyncrl.ports import Shards
from asyncrl.protocol.ragged import from_values, offsets_of, rows_of
from asyncrl.training.mesh import Mesh
from asyncrl.training.microbatch import Budget, agreed_micro_batches
from asyncrl.training.mini_batch import check_shards, passes
from asyncrl.training.model import Policy
from asyncrl.training.placement import PACKED_ATTENTION
from asyncrl.training.sharding import free_gathered
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

    def micro_batches(
        self, ranks: Sequence[Sequence[int]], budget: Budget, *, together: Sequence[int] = ()
    ) -> list[list[list[int]]]:
        """`agreed_micro_batches` of the rows of each rank. together: a number for each row of the batch; rows of one number are not
        parted.

        Rows without a policy token (padding rows, responses of observations alone) are left out: they have no logit, so they would
        cost a forward pass and move the rounding of the rows beside them.
        """
        scored = [[row for row in rows if self.mask[row].any()] for rows in ranks]
        if budget.is_packed and self.has_own_positions:  # such rows are not packed (`token_batch.packed`)
            budget = replace(budget, is_packed=False)
        return agreed_micro_batches([len(ids) for ids in self.input_ids], scored, budget, together=together)

    @property
    def has_own_positions(self) -> bool:
        """Whether some row has other position ids than 0, 1, 2, ..."""
        ladder = torch.arange(max(map(len, self.position_ids), default=0))
        return not all(torch.equal(row, ladder[: len(row)]) for row in self.position_ids)

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


def budget_of(max_tokens: int, model: ModelConfig, mesh: Mesh, *, key: str = "actor.ppo_max_token_len_per_gpu") -> Budget:
    """max_tokens: of the pass on one rank; the ranks that share a row hold a part of it each."""
    is_packed = model.attn_implementation in PACKED_ATTENTION
    return Budget(max_tokens=max_tokens * mesh.sp_size, is_packed=is_packed, multiple=mesh.sp_size, key=key)


def joining_batch() -> TokenBatch:
    """The pass of a rank that has no rows when others have: one token, whose numbers nobody takes."""
    return token_batch([torch.zeros(2, dtype=torch.int64)], [torch.ones(1, dtype=torch.bool)])


def score_responses(
    policy: Policy, columns: TensorDict, *, temperature: float, budget: Budget, mesh: Mesh, shards: Shards = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_probs, entropy), ragged float32 on the response axis, without gradient; 0 where the mask is 0.

    columns needs input_ids, position_ids and response_mask. Natural logs under softmax(logits / temperature): top-k and top-p of
    the rollout are not modelled, so with them on the engine's log-probs are higher than these. The rest as `score_tokens`.
    """

    def forward(batch: TokenBatch) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = policy(batch, temperature)
        return found

    log_probs, entropy = score_tokens(policy, forward, columns, budget=budget, mesh=mesh, shards=shards, count=2)
    return log_probs, entropy


def score_tokens(
    module: nn.Module,
    forward: Callable[[TokenBatch], Sequence[torch.Tensor]],
    columns: TensorDict,
    *,
    budget: Budget,
    mesh: Mesh,
    count: int,
    shards: Shards = (),
    what: str = "log-probs",
) -> list[torch.Tensor]:
    """The `count` numbers that `forward` gives for each policy token, each as a ragged float32 column on the response axis.

    Without gradient; 0 where the mask is 0, and in the rows of other ranks. columns needs input_ids, position_ids and
    response_mask. module: what `forward` runs; the weights that it has gathered are freed, as only a backward pass would do. what:
    for the signs of life. Raises ConfigError, on every rank, for a row above the budget.
    """
    check_shards(shards, mesh)
    rows = Rows.of(columns)
    lengths = torch.tensor([len(mask) for mask in rows.mask])
    offsets = offsets_of(lengths)
    values = [torch.zeros(int(lengths.sum())) for _ in range(count)]
    ranks = [[row for chosen in steps for row in chosen] for steps in shards] or [list(range(len(rows.mask)))]
    with torch.no_grad():
        for chosen, _ in passes(what, rows.micro_batches(ranks, budget)[mesh.dp_rank]):
            if not chosen:
                forward(joining_batch())
                continue
            places = torch.cat([offsets[row] + rows.mask[row].nonzero()[:, 0] for row in chosen])
            for target, scored in zip(values, forward(rows.token_batch(chosen)), strict=True):
                target[places] = scored.float()
    free_gathered(module)
    return [from_values(value, offsets) for value in values]


def of_all_ranks(values_N: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Numbers of all rows, of which each rank has its own and 0 for the others': together. A collective."""
    if mesh.dp_group is None or not len(values_N):
        return values_N
    total = values_N.to(mesh.device)
    dist.all_reduce(total, group=mesh.dp_group)
    return total.cpu()
