"""update_actor: the policy update; the last box that reads the batch's payload for training."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from tensordict import TensorDict

from asyncrl.ports import Shards, StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.stages.old_log_prob import FORWARD_READS
from asyncrl.stages.stage import Stage, StageOutput


class Update(Protocol):
    """Updates the policy; returns metrics."""

    def __call__(
        self,
        columns: TensorDict,
        group_ids: Sequence[str | None],
        session_ids: Sequence[str | None],
        *,
        seed: int,
        shards: Shards,
    ) -> dict[str, float]:
        """group_ids, session_ids: uid and session of each row, None for padding; seed: of what a loss picks at random;
        shards: who takes which rows."""
        ...


def update_actor_stage(update: Update, *, columns: Iterable[str] = ()) -> Stage:
    """columns: what stages before it have written for the loss, such as old_log_probs, ref_log_prob and loss_weights."""
    reads = FORWARD_READS | {"loss_mask", "advantages", "rollout_log_probs"} | set(columns)

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        metrics = update(columns, batch.groups, batch.sessions, seed=context.seed, shards=context.shards)
        return StageOutput(metrics=metrics)

    return Stage(name="update_actor", reads=reads, writes=frozenset(), compute=compute, learns=True)


LOSS_COLUMNS = frozenset({"old_log_probs", "ref_log_prob", "loss_weights", "rollout_is_weights"})
"""Columns that the loss reads when a stage has written them."""
