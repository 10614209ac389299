"""What an estimator gets and gives. Legend: B rows (whole sessions, once packed), R response tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from asyncrl.algorithms.sessions import Packing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageInputs:
    """The columns of one batch. Raises ValueError when shapes do not fit together or the mask is not bool.

    A row without policy tokens is padding or an empty answer: it gets zeros, and what is written over it here has no effect beyond
    what the docstring of an estimator says. float32 gives float32 advantages, float64 float64.
    """

    rewards_BR: torch.Tensor
    """Float, per token; the reward of a row is the sum. 0 outside the row."""
    mask_BR: torch.Tensor
    """Bool, True on policy tokens; gaps (tool observations) and padding are False."""
    groups_B: torch.Tensor
    """int64, any numbering of the prompts; a padding row has a number of its own."""
    values_BR: torch.Tensor | None = None
    """The critic's value before each token."""
    reward_baselines_B: torch.Tensor | None = None
    """The reward of the greedy answer to the row's prompt."""
    components: Mapping[str, torch.Tensor] | None = None
    """Float [B] each: the parts of the reward by name."""
    old_log_probs_BR: torch.Tensor | None = None
    """log pi(token) under the policy before the update."""
    sum_pi_squared_BR: torch.Tensor | None = None
    """Sum over the vocabulary of pi squared, at each token, under the same policy."""
    rollout_is_weights_BR: torch.Tensor | None = None
    """Importance weights pi_old / pi_rollout; an estimator that uses them takes 1 without them."""

    def __post_init__(self) -> None:
        shape = self.rewards_BR.shape
        if self.mask_BR.dtype != torch.bool:
            raise ValueError(f"mask_BR is {self.mask_BR.dtype}; it must be bool, True on policy tokens")
        for name, tensor in self._tensors().items():
            expected = shape if name.endswith("_BR") else shape[:1]
            if tensor.shape != expected:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; with rewards_BR {tuple(shape)} it must be {tuple(expected)}"
                )

    def packed(self, packing: Packing) -> "AdvantageInputs":
        """The same with one row a session. Rewards are added up over the rows: see `sessions.session_rewards` for scores."""
        if packing.is_identity:
            return self
        packed = {
            name: packing.pack(tensor) if name.endswith("_BR") else packing.of_sessions(tensor)
            for name, tensor in self._tensors(of_components=False).items()
        }
        components = self.components and {name: packing.of_sessions(values) for name, values in self.components.items()}
        return AdvantageInputs(**packed, components=components)

    def _tensors(self, *, of_components: bool = True) -> dict[str, torch.Tensor]:
        parts = {f"components[{name!r}]": values for name, values in (self.components or {}).items()} if of_components else {}
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "components"}
        return {name: tensor for name, tensor in named.items() if tensor is not None} | parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """One number a policy token, 0 elsewhere; the dtype of the rewards."""

    advantages_BR: torch.Tensor
    returns_BR: torch.Tensor
    """What a critic learns to predict. Estimators of one number a row give the advantages, the same tensor."""

    def unpacked(self, packing: Packing) -> "Advantages":
        """The rows of a batch again, after `AdvantageInputs.packed`."""
        if packing.is_identity:
            return self
        advantages_BR = packing.unpack(self.advantages_BR)
        returns_BR = advantages_BR if self.returns_BR is self.advantages_BR else packing.unpack(self.returns_BR)
        return Advantages(advantages_BR=advantages_BR, returns_BR=returns_BR)
