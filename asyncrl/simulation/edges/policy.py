"""An actor that learns nothing but which groups it was trained on: its weights are that list, which is what I6 asks about."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncrl.config.simulation import Scenario
from asyncrl.ports import Shards, Topology
from asyncrl.protocol.ragged import values_of
from asyncrl.simulation.seams import Seams
from asyncrl.simulation.world import SimWorld

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from tensordict import TensorDict

Lineage = tuple[tuple[str, ...], ...]
"""Groups of each update, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSnapshot:
    """Weights of a version: no tensors."""

    lineage: Lineage
    tensors: "Mapping[str, torch.Tensor]" = field(default_factory=dict)


class SimPolicy:
    """`lineage`: of the weights that it starts with."""

    num_ranks = 1
    topology = Topology()

    def __init__(self, scenario: Scenario, world: SimWorld, seams: Seams, *, lineage: Lineage = ()) -> None:
        self._config = scenario.sim.training
        self._num_passes = scenario.actor.ppo_epochs
        self._tokens_per_id = scenario.sim.sessions.tokens_per_id
        self._world = world
        self._seams = seams
        self.lineage = lineage

    def snapshot(self, version: int) -> SimSnapshot:
        self._world.spend(self._config.snapshot_s)
        return SimSnapshot(lineage=self.lineage)

    def log_probs(self, columns: "TensorDict", shards: Shards = ()) -> "tuple[torch.Tensor, torch.Tensor]":
        """The engine's own, which a model with the same weights would give; entropy 1 where the policy spoke."""
        self._spend("forward", self._config.forward_token_s * self._num_tokens(columns))
        mask = columns["response_mask"]
        return columns["rollout_log_probs"] if "rollout_log_probs" in columns else mask.float() * -0.5, mask.float()

    def log_probs_and_squares(
        self, columns: "TensorDict", shards: Shards = ()
    ) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """A sum of squares of 0.5 where the policy spoke: an even choice between two tokens."""
        log_probs, entropy = self.log_probs(columns)
        return log_probs, entropy, entropy * 0.5

    def update(
        self,
        columns: "TensorDict",
        group_ids: Sequence[str | None],
        session_ids: Sequence[str | None],
        *,
        seed: int,
        shards: Shards = (),
    ) -> dict[str, float]:
        self._seams.updated(columns, group_ids)
        seconds = self._config.update_call_s + self._config.update_token_s * self._num_tokens(columns)
        self._spend("update", seconds * self._num_passes)
        self.lineage = (*self.lineage, tuple(dict.fromkeys(uid for uid in group_ids if uid is not None)))
        return {"actor/loss": 0.0, "actor/grad_norm": 1.0}

    def _num_tokens(self, columns: "TensorDict") -> int:
        return int(values_of(columns["input_ids"]).numel()) * self._tokens_per_id

    def _spend(self, what: str, seconds: float) -> None:
        now = self._world.now()
        self._seams.busy("trainer", what, now, now + seconds)
        self._world.spend(seconds)
