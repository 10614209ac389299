"""old_log_probs: the log-probs that the importance ratio is taken against.

Three meanings (`algorithm.old_log_probs`): *elide*, no stage at all, because with one update a batch they equal the detached new
ones; *recompute*, a forward pass of the actor before its first update, with the entropy beside it; *bypass*, the engine's own
log-probs.
"""

from collections.abc import Callable
from typing import Literal

import torch
from tensordict import TensorDict

from asyncrl.ports import Shards, StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import values_of
from asyncrl.stages.stage import Stage, StageOutput

FORWARD_READS = frozenset({"prompts", "responses", "input_ids", "position_ids", "response_mask"})
"""What a forward pass that scores responses reads; prompts and responses only for the invariant that they make up the input ids."""

LogProbs = Callable[[TensorDict, Shards], tuple[torch.Tensor, torch.Tensor]]
"""(columns, who takes which rows) -> (log-probs, entropy), both ragged float32 on the response axis."""
Squares = Callable[[TensorDict, Shards], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""The same, and the sum of squared probabilities over the vocabulary at each token."""


def recompute_stage(log_probs: "LogProbs | Squares", *, with_squares: bool = False) -> Stage:
    """A forward pass of the actor before its first update; the entropy comes with it, and `with_squares` sum_pi_squared."""
    names = ("old_log_probs", "entropy", *(["sum_pi_squared"] if with_squares else []))

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        written = dict(zip(names, log_probs(columns, context.shards), strict=True))
        mask, entropy = values_of(columns["response_mask"]), values_of(written["entropy"])
        mean_entropy = entropy[mask].mean() if mask.any() else entropy.new_zeros(())
        return StageOutput(columns=written, metrics={"actor/entropy": float(mean_entropy)})

    return Stage(name="old_log_prob", reads=FORWARD_READS, writes=frozenset(names), compute=compute)


def bypass_stage() -> Stage:
    """The engine's own log-probs: nothing is computed."""

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        return StageOutput(columns={"old_log_probs": columns["rollout_log_probs"]})

    return Stage(name="old_log_prob", reads=frozenset({"rollout_log_probs"}), writes=frozenset({"old_log_probs"}), compute=compute)


def old_log_prob_stages(
    kind: Literal["elide", "recompute", "bypass"], log_probs: "LogProbs | Squares", *, with_squares: bool = False
) -> tuple[Stage, ...]:
    """No stage, or one."""
    if kind == "elide":
        return ()
    return (recompute_stage(log_probs, with_squares=with_squares),) if kind == "recompute" else (bypass_stage(),)
