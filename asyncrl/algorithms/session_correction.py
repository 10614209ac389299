"""The off-policy correction with a session as the sequence, however many rows it has. Legend: B rows, R response tokens."""

from dataclasses import replace

import torch

from asyncrl.algorithms.correction import Correction, CorrectionOptions, correct
from asyncrl.algorithms.sessions import Packing


def correct_sessions(
    old_log_probs_BR: torch.Tensor,
    rollout_log_probs_BR: torch.Tensor,
    mask_BR: torch.Tensor,
    lengths_B: torch.Tensor,
    sessions_B: torch.Tensor,
    options: CorrectionOptions,
) -> Correction:
    """`correct` on the packed sessions; its answer in rows again.

    lengths_B: int64, response tokens of each row; sessions_B: int64, any numbering of the sessions. The rest as `correct`, with the
    same errors.
    """
    packing = Packing.of(lengths_B, sessions_B, num_columns=mask_BR.shape[1])
    found = correct(packing.pack(old_log_probs_BR), packing.pack(rollout_log_probs_BR), packing.pack(mask_BR), options)
    weights = None if found.weights_BR is None else packing.unpack(found.weights_BR)
    return replace(found, weights_BR=weights, accepted_BR=packing.unpack(found.accepted_BR))
