"""Policy losses, token by token: `POLICY_LOSSES` by name, `LossInputs` in, `PolicyLoss` out."""

from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss
from asyncrl.algorithms.losses.ratios import LOG_RATIO_BOUND
from asyncrl.algorithms.losses.registry import POLICY_LOSSES, LossSpec

__all__ = ["LOG_RATIO_BOUND", "POLICY_LOSSES", "LossInputs", "LossSpec", "PolicyLoss"]
