"""values: what the critic expects at each token, before it sees how the trajectories of this batch end."""

from collections.abc import Callable

import torch
from tensordict import TensorDict

from asyncrl.ports import Shards, StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import values_of
from asyncrl.stages.old_log_prob import FORWARD_READS
from asyncrl.stages.stage import Stage, StageOutput

Values = Callable[[TensorDict, Shards], torch.Tensor]
"""(columns, who takes which rows) -> values, ragged float32 on the response axis, 0 outside the mask."""


def values_stage(values: Values) -> Stage:
    """values: of the critic. Metrics: critic/values/{mean,max,min} over the policy tokens; none when there are none."""

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        found = values(columns, context.shards)
        valid = values_of(found)[values_of(columns["response_mask"])]
        metrics = {f"critic/values/{name}": float(getattr(valid, name)()) for name in ("mean", "max", "min") if len(valid)}
        return StageOutput(columns={"values": found}, metrics=metrics)

    return Stage(name="values", reads=FORWARD_READS, writes=frozenset({"values"}), compute=compute)
