"""Actor, critic and reference in rank processes, seen from the controller: what `Learners` is in the one process.

stages, trainer -> [ranks] -> RankGroup ... rank processes -> training.rank

Columns are copied once, into shared memory; results come back in it. Methods block, and are called one at a time in the world's
`model` pool; `close` may be called from any thread. Raises RankDiedError and RankHungError as `RankGroup.call` does, and what the
ranks raise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from tensordict import TensorDict

from asyncrl.cluster import ForkServer, RankGroup
from asyncrl.config import ModelConfig, TrainRun, topology_of
from asyncrl.ports import Shards, Topology
from asyncrl.protocol.ragged import from_values
from asyncrl.training.checkpoint import Counters
from asyncrl.training.columns import flat_columns, offsets_in
from asyncrl.training.publication import Snapshot
from asyncrl.training.rank import TARGET, Shapes, SharedBatch


class RankedLearners:
    """start -> open -> [read] -> the policy, the critic and the reference work -> close. Not thread-safe but for `close`."""

    def __init__(self, run: TrainRun, *, server: ForkServer | None = None) -> None:
        self._run = run
        self._shapes: Shapes = {}
        self.topology = topology_of(run)
        self.group = RankGroup(
            self.topology.world,
            TARGET,
            timeout_s=run.cluster.rank_timeout_s,
            num_threads=run.trainer.num_threads,
            server=server,
        )
        self.actor = RankedPolicy(ranks=self)
        self.critic = RankedCritic(ranks=self) if run.has_critic else None
        self.reference = RankedReference(ranks=self) if run.needs_reference else None

    def start(self) -> None:
        """Start the processes and let them find each other; nothing is loaded yet."""
        self.group.start(self._run)

    def open(self, total_steps: int) -> None:
        """Load the models. total_steps: of the run. Raises ModelError and ConfigError as `open_learners` does."""
        self.group.call("open", total_steps)

    def read(self, folder: Path, counters: Counters) -> None:
        """As `Learners.read`."""
        self.group.call("read", folder, counters)

    def write(self, folder: Path, *, model: ModelConfig) -> Counters:
        """As `Learners.write`."""
        return cast("Counters", self.group.call("write", folder, model)[0])

    def export(self, folder: Path, *, model: ModelConfig) -> None:
        """As `Learners.export`."""
        self.group.call("export", folder, model)

    def snapshot(self, version: int) -> Snapshot:
        """The weights in memory of their own, which lives as long as its tensors."""
        if not self._shapes:
            self._shapes = cast("Shapes", self.group.call("snapshot", version, None)[0])
            room, tensors = self.group.arena.new_block(self._shapes)
            self.group.call("hand_over", room)
        else:
            room, tensors = self.group.arena.new_block(self._shapes)
            self.group.call("snapshot", version, room)
        return Snapshot(version=version, tensors=tensors)

    def close(self) -> None:
        """End the processes; twice is once."""
        self.group.close()

    def score(self, method: str, columns: TensorDict, shards: Shards, *names: str) -> list[torch.Tensor]:
        """Results of a pass without update, each a ragged float32 column on the response axis."""
        offsets = offsets_in(columns["response_mask"])
        outputs = {name: ((int(offsets[-1]),), torch.float32) for name in names}
        placed, results = self.group.arena.place(flat_columns(columns), outputs)
        self.group.call(method, SharedBatch(placed=placed, num_rows=len(offsets) - 1, shards=shards, results=names))
        return [from_values(results[name], offsets) for name in names]

    def update(self, method: str, columns: TensorDict, shards: Shards, *arguments: object) -> dict[str, float]:
        """Metrics of an update; all ranks have the same."""
        placed, _ = self.group.arena.place(flat_columns(columns), {})
        batch = SharedBatch(placed=placed, num_rows=columns.batch_size[0], shards=shards)
        return cast("dict[str, float]", self.group.call(method, batch, *arguments)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPolicy:
    """The actor, as the trainer and its stages see it."""

    ranks: RankedLearners

    @property
    def topology(self) -> Topology:
        return self.ranks.topology

    @property
    def num_ranks(self) -> int:
        return self.ranks.topology.dp

    def snapshot(self, version: int) -> Snapshot:
        return self.ranks.snapshot(version)

    def log_probs(self, columns: TensorDict, shards: Shards = ()) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = self.ranks.score("log_probs", columns, shards, "log_probs", "entropy")
        return log_probs, entropy

    def log_probs_and_squares(self, columns: TensorDict, shards: Shards = ()) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        names = ("log_probs", "entropy", "squares")
        log_probs, entropy, squares = self.ranks.score("log_probs_and_squares", columns, shards, *names)
        return log_probs, entropy, squares

    def update(
        self,
        columns: TensorDict,
        group_ids: Sequence[str | None],
        session_ids: Sequence[str | None],
        *,
        seed: int,
        shards: Shards = (),
    ) -> dict[str, float]:
        return self.ranks.update("update_actor", columns, shards, list(group_ids), list(session_ids), seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCritic:
    """The critic, as its stages see it."""

    ranks: RankedLearners

    def values(self, columns: TensorDict, shards: Shards = ()) -> torch.Tensor:
        (values,) = self.ranks.score("values", columns, shards, "new_values")
        return values

    def update(self, columns: TensorDict, group_ids: Sequence[str | None], shards: Shards = ()) -> dict[str, float]:
        return self.ranks.update("update_critic", columns, shards, list(group_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedReference:
    """The reference, as its stage sees it."""

    ranks: RankedLearners

    def log_probs(self, columns: TensorDict, shards: Shards = ()) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = self.ranks.score("reference_log_probs", columns, shards, "log_probs", "entropy")
        return log_probs, entropy
