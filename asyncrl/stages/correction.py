"""correction: importance weights and rejection for the gap between the engine that sampled and the policy that is trained.

old_log_prob -> [correction] -> advantage, update_actor. It writes `rollout_is_weights` and `loss_weights` where they are on, and
never the mask. Without either it only measures the gap. A session is one sequence, however many trajectories it has.
"""

from typing import TYPE_CHECKING

from tensordict import TensorDict

from asyncrl.algorithms.correction import CorrectionOptions
from asyncrl.algorithms.session_correction import correct_sessions
from asyncrl.ports import StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.data_proto import pad_batch, unpad_field
from asyncrl.protocol.mini_batches import numbered
from asyncrl.stages.stage import Stage, StageOutput

if TYPE_CHECKING:
    import torch

READS = frozenset({"old_log_probs", "rollout_log_probs", "response_mask"})


def correction_writes(options: CorrectionOptions) -> frozenset[str]:
    """The columns that these options make."""
    weights = {"rollout_is_weights"} if options.rollout_is else set()
    return frozenset(weights | ({"loss_weights"} if options.rollout_rs else set()))


def correction_stage(options: CorrectionOptions) -> Stage:
    """Metrics under `rollout_corr/`."""

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        padded = pad_batch(columns)
        found = correct_sessions(
            padded.batch["old_log_probs"],
            padded.batch["rollout_log_probs"],
            padded.batch["response_mask"],
            padded.batch["response_lens"],
            numbered(batch.sessions),
            options,
        )
        written: dict[str, torch.Tensor] = {}
        if found.weights_BR is not None:
            written["rollout_is_weights"] = unpad_field(padded, "rollout_is_weights", found.weights_BR)
        if options.rollout_rs:
            written["loss_weights"] = unpad_field(padded, "loss_weights", found.accepted_BR.float())
        return StageOutput(columns=written, metrics={f"rollout_corr/{name}": value for name, value in found.metrics.items()})

    return Stage(name="correction", reads=READS, writes=correction_writes(options), compute=compute)
