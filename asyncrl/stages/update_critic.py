"""update_critic: the critic's step towards the returns, before the actor's; and the warm-up, in which it alone learns."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tensordict import TensorDict

from asyncrl.ports import Shards, StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import values_of
from asyncrl.stages.old_log_prob import FORWARD_READS
from asyncrl.stages.stage import Stage, StageOutput

UpdateCritic = Callable[[TensorDict, Sequence[str | None], Shards], dict[str, float]]
"""(columns, uid of each row, None for padding; who takes which rows) -> metrics."""


def update_critic_stage(update: UpdateCritic, *, has_loss_weights: bool = False) -> Stage:
    """has_loss_weights: a stage before it may have rejected tokens."""
    reads = FORWARD_READS | {"loss_mask", "values", "returns"}
    if has_loss_weights:
        reads |= {"loss_weights"}

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        explained = _explained(columns)  # before the update: of the values that the advantages were computed with
        return StageOutput(metrics={**update(columns, batch.groups, context.shards), **explained})

    return Stage(name="update_critic", reads=reads, writes=frozenset(), compute=compute, learns=True)


def _explained(columns: TensorDict) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns) over the policy tokens: 1 is a perfect critic, 0 one that says the mean.

    Left out where the returns are all the same, as there is nothing to explain.
    Where we differ from verl 0.9.1: nothing is added to the denominator.
    """
    mask = values_of(columns["response_mask"])
    returns, values = (values_of(columns[name])[mask].double() for name in ("returns", "values"))
    if not len(returns) or returns.max() == returns.min():
        return {}
    return {"critic/vf_explained_var": 1 - float((returns - values).var(correction=0) / returns.var(correction=0))}


def after_warmup(stage: Stage, num_steps: int) -> Stage:
    """The stage, idle in the first `num_steps` training steps: it reads what it reads, and does and tells nothing.

    Where we differ from verl 0.9.1: the number is that of the steps left out; there it is the first step that is not.
    """

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        return StageOutput() if context.step <= num_steps else stage.compute(columns, batch, context)

    return replace(stage, compute=compute) if num_steps else stage
