"""update_actor: the policy update; the last box that reads the batch's payload for training."""

from collections.abc import Callable, Sequence

from tensordict import TensorDict

from asyncrl.ports import StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.stages.old_log_prob import FORWARD_READS
from asyncrl.stages.stage import Stage, StageOutput

Update = Callable[[TensorDict, Sequence[str | None]], dict[str, float]]
"""(columns, uid of each row, None for padding) -> metrics."""


def update_actor_stage(update: Update, *, has_old_log_probs: bool, has_reference: bool) -> Stage:
    """Reads the old and the reference's log-probs only where a stage before it has written them."""
    reads = FORWARD_READS | {"loss_mask", "advantages", "rollout_log_probs"}
    if has_old_log_probs:
        reads |= {"old_log_probs"}
    if has_reference:
        reads |= {"ref_log_prob"}

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        return StageOutput(metrics=update(columns, batch.groups))

    return Stage(name="update_actor", reads=reads, writes=frozenset(), compute=compute)
