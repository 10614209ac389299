"""What each rank serves: its part of actor, critic and reference, on columns in shared memory.

training.ranks -> RankGroup ... rank process -> [rank] -> learners -> actor, critic, reference

1. Every rank is asked the same in the same order; all of them work on a call, whatever their part of it is.
2. Columns and results never go through a message: a call says where they lie. Each result has one writer, a row at a time.
3. Weights are gathered whole before rank 0 hands them on: nobody outside waits for a gather, and no gather for anybody outside.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict

from asyncrl.cluster import Placed, Rank
from asyncrl.config import ModelConfig, TrainRun, topology_of
from asyncrl.ports import Shards
from asyncrl.protocol.ragged import lengths_of, values_of
from asyncrl.training.checkpoint import Counters
from asyncrl.training.columns import columns_of
from asyncrl.training.learners import Learners, open_learners
from asyncrl.training.mesh import Mesh, open_mesh

TARGET = "asyncrl.training.rank:serve"
"""For RankGroup."""

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBatch:
    """Columns of a stage, and room for its results, in shared memory; and who takes which rows."""

    placed: Placed
    num_rows: int
    shards: Shards
    results: tuple[str, ...] = ()
    """Their names, in the order in which they are made."""


def serve(rank: Rank, run: object) -> "RankLearners":
    """Called in each rank once all of them have joined; `open` makes the learners."""
    assert isinstance(run, TrainRun)
    _say_warnings(rank.rank)
    return RankLearners(rank, run, open_mesh(topology_of(run)))


def _say_warnings(rank: int) -> None:
    """To stderr, where the controller says its own; what all ranks have to say, rank 0 says for them."""
    logging.basicConfig(level=logging.WARNING if rank == 0 else logging.ERROR, format="%(message)s", stream=sys.stderr)
    # As in the one process: FSDP's first forward makes torch warn about a function that torch itself calls.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


class RankLearners:
    """One rank's side of `RankedLearners`; a public method is what the controller may call."""

    def __init__(self, rank: Rank, run: TrainRun, mesh: Mesh) -> None:
        self._rank, self._run, self._mesh = rank, run, mesh
        self._opened: Learners | None = None
        self._kept: Mapping[str, torch.Tensor] = {}

    @property
    def _learners(self) -> Learners:
        assert self._opened is not None, "open() comes first"
        return self._opened

    def open(self, total_steps: int) -> None:
        """Load the models. Raises what `open_learners` does."""
        self._opened = open_learners(self._run, self._mesh, total_steps=total_steps)

    # --- stages

    def log_probs(self, batch: SharedBatch) -> None:
        self._give(batch, self._learners.actor.log_probs(self._columns(batch), batch.shards))

    def log_probs_and_squares(self, batch: SharedBatch) -> None:
        self._give(batch, self._learners.actor.log_probs_and_squares(self._columns(batch), batch.shards))

    def reference_log_probs(self, batch: SharedBatch) -> None:
        assert self._learners.reference is not None
        self._give(batch, self._learners.reference.log_probs(self._columns(batch), batch.shards))

    def values(self, batch: SharedBatch) -> None:
        assert self._learners.critic is not None
        self._give(batch, (self._learners.critic.values(self._columns(batch), batch.shards),))

    def update_actor(
        self, batch: SharedBatch, group_ids: Sequence[str | None], session_ids: Sequence[str | None], seed: int
    ) -> dict[str, float]:
        columns = self._columns(batch)
        return self._learners.actor.update(columns, group_ids, session_ids, seed=seed, shards=batch.shards)

    def update_critic(self, batch: SharedBatch, group_ids: Sequence[str | None]) -> dict[str, float]:
        assert self._learners.critic is not None
        return self._learners.critic.update(self._columns(batch), group_ids, batch.shards)

    def _columns(self, batch: SharedBatch) -> TensorDict:
        return columns_of(self._rank.arena.open(batch.placed), batch.num_rows)

    def _give(self, batch: SharedBatch, results: Sequence[torch.Tensor]) -> None:
        """Write the rows of this rank; ranks that share rows have the same results, and the first of them writes."""
        if self._mesh.sp_rank or self._mesh.tp_rank:
            return
        outputs = self._rank.arena.open(batch.placed)
        for name, result in zip(batch.results, results, strict=True):
            own = _own_entries(lengths_of(result), batch.shards, self._mesh.dp_rank)
            outputs[name][own] = values_of(result)[own]

    # --- weights

    def snapshot(self, version: int, room: Placed | None) -> Shapes:
        """All weights, gathered and then copied into shared memory. room: for what the last snapshot had; None: it is not known
        yet, so rank 0 keeps its copy until `hand_over`. Returns what the room must be for; {} on other ranks."""
        into = self._rank.arena.open(room) if room is not None and self._mesh.rank == 0 else None
        tensors = self._learners.snapshot(version, into=into).tensors
        self._kept = tensors if room is None else {}
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def hand_over(self, room: Placed) -> None:
        """Copy the kept weights into shared memory."""
        places = self._rank.arena.open(room) if self._kept else {}
        for name, tensor in self._kept.items():
            places[name].copy_(tensor)
        self._kept = {}

    def write(self, folder: Path, model: ModelConfig) -> Counters:
        return self._learners.write(folder, model=model)

    def read(self, folder: Path, counters: Counters) -> None:
        self._learners.read(folder, counters)

    def export(self, folder: Path, model: ModelConfig) -> None:
        self._learners.export(folder, model=model)


def _own_entries(lengths: torch.Tensor, shards: Shards, dp_rank: int) -> torch.Tensor | slice:
    """Which entries of a ragged column are in rows of that rank. lengths: int64 [B]."""
    if not shards:
        return slice(None)
    own = torch.zeros(len(lengths), dtype=torch.bool)
    own[[row for rows in shards[dp_rank] for row in rows]] = True
    return own.repeat_interleave(lengths)
