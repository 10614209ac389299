"""advantage: from rewards to one number a token. The work is in `algorithms/`."""

import torch
from tensordict import TensorDict

from asyncrl.algorithms.advantages import grpo_advantages
from asyncrl.config import AlgorithmConfig
from asyncrl.ports import StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.data_proto import pad_batch, unpad_field
from asyncrl.protocol.ragged import values_of
from asyncrl.stages.stage import Stage, StageOutput

READS = frozenset({"response_mask", "rm_scores"})
WRITES = frozenset({"token_level_scores", "token_level_rewards", "advantages", "returns"})


ESTIMATORS = {"grpo": grpo_advantages}
"""Advantages by the name that `algorithm.adv_estimator` gives them."""


def advantage_stage(config: AlgorithmConfig) -> Stage:
    """The group is the uid, taken from the keys. No KL term is in the reward, so rewards equal scores."""
    estimate = ESTIMATORS[config.adv_estimator]

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        padded = pad_batch(columns)
        scores_BR, mask_BR = padded.batch["rm_scores"], padded.batch["response_mask"]
        advantages_BR = estimate(scores_BR.sum(1), group_numbers(batch.uids), mask_BR, norm_by_std=config.norm_adv_by_std_in_grpo)
        advantages = unpad_field(padded, "advantages", advantages_BR)
        scores = columns["rm_scores"]
        written = {"token_level_scores": scores, "token_level_rewards": scores, "advantages": advantages, "returns": advantages}
        return StageOutput(columns=written, metrics=_metrics(values_of(advantages), values_of(columns["response_mask"])))

    return Stage(name="advantage", reads=READS, writes=WRITES, compute=compute)


def group_numbers(uids: tuple[str, ...]) -> torch.Tensor:
    """int64 [B]: rows of one uid share a number, numbered by first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids])


def _metrics(advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    valid = advantages[mask]
    if not len(valid):
        return {"critic/advantages/mean": 0.0, "critic/advantages/max": 0.0, "critic/advantages/min": 0.0}
    return {
        "critic/advantages/mean": float(valid.mean()),
        "critic/advantages/max": float(valid.max()),
        "critic/advantages/min": float(valid.min()),
    }
