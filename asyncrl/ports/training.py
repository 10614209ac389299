"""A training step: the actor, what a stage knows and leaves, and what a column looks like."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from asyncrl.ports.generation import WeightSnapshot
from asyncrl.ports.topology import Topology

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


Shards = tuple[tuple[tuple[int, ...], ...], ...]
"""[data-parallel rank][mini-batch] -> numbers of the rows of a batch that the rank takes in it, maybe none. A session is on one
rank. (): one rank, and mini-batches by groups, in order of first appearance."""


class Policy(Protocol):
    """The actor as the trainer and its stages see it. Its methods block, and are called one at a time in the `model` pool."""

    @property
    def num_ranks(self) -> int:
        """Ranks that share a batch: the data-parallel size."""
        ...

    @property
    def topology(self) -> Topology: ...

    def snapshot(self, version: int) -> WeightSnapshot:
        """The weights now, as version `version`."""
        ...

    def log_probs(self, columns: "TensorDict", shards: Shards = ()) -> "tuple[torch.Tensor, torch.Tensor]":
        """(log_probs, entropy), ragged float32 on the response axis."""
        ...

    def log_probs_and_squares(
        self, columns: "TensorDict", shards: Shards = ()
    ) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """(log_probs, entropy, sum over the vocabulary of squared probabilities), ragged float32 on the response axis."""
        ...

    def update(
        self,
        columns: "TensorDict",
        group_ids: Sequence[str | None],
        session_ids: Sequence[str | None],
        *,
        seed: int,
        shards: Shards = (),
    ) -> dict[str, float]:
        """One pass over the batch; metrics. group_ids, session_ids: uid and session of each row, None for padding; seed: of what a
        loss picks at random."""
        ...


class ValueFunction(Protocol):
    """The critic as its stages see it. Its methods block, and are called one at a time in the `model` pool."""

    def values(self, columns: "TensorDict", shards: Shards = ()) -> "torch.Tensor":
        """The return to be expected at each token, ragged float32 on the response axis, 0 outside the mask."""
        ...

    def update(self, columns: "TensorDict", group_ids: Sequence[str | None], shards: Shards = ()) -> dict[str, float]:
        """One pass over the batch; metrics. group_ids: the uid of each row, None for padding."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What a stage knows besides its batch."""

    step: int
    """Training step, from 1."""
    version: int
    """Weight version of the actor: the number of published updates so far."""
    seed: int
    shards: Shards = ()
    """Who takes which rows of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSchema:
    """What one column of some rows looks like, without its payload."""

    field: str
    dtype: str
    """A torch dtype name, or `object`."""
    device: str
    layout: str
    """`ragged`, `stacked` (one tensor a row) or `object` (one JSON value a row)."""
    shape: tuple[int, ...]
    """Of one entry along the ragged axis, or of one stacked row."""
    lengths: tuple[int, ...]
    """A row: its entries along the ragged axis, 1 in the other layouts, -1 where it lacks the column."""
    mask_sums: tuple[int, ...] | None
    """A row: `response_mask.sum()` as it was found beside the column; None where no mask was there."""


class Access(StrEnum):
    """What a box of the way did with a column."""

    READ = "read"
    WRITE = "write"
    TAKE = "take"  # sample: handed its keys on
    FREE = "free"  # retire: ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldReport(FieldSchema):
    """A column as a box of the way found or left it, for the lineage: of the traced rows alone."""

    stage: str
    access: Access


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldField(FieldSchema):
    """A column as the store holds it. by_stage: a training step wrote it, not a session."""

    by_stage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What a stage leaves behind in the controller: numbers, and what it read and wrote of traced rows; never the payload."""

    metrics: dict[str, float]
    reports: tuple[FieldReport, ...] = ()
