"""ref_log_prob: log-probs of the sampled tokens under the frozen reference, for a KL term."""

from tensordict import TensorDict

from asyncrl.ports import StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.stages.old_log_prob import FORWARD_READS, LogProbs
from asyncrl.stages.stage import Stage, StageOutput


def ref_log_prob_stage(log_probs: LogProbs) -> Stage:
    """log_probs: of the frozen reference."""

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        reference, _ = log_probs(columns, context.shards)
        return StageOutput(columns={"ref_log_prob": reference})

    return Stage(name="ref_log_prob", reads=FORWARD_READS, writes=frozenset({"ref_log_prob"}), compute=compute)
