"""Is what an estimator or a loss answers something to train on? For functions of the user; ours are tested.

Raises ValueError whose message goes on after the function's name: "returned ...". What broadcasts would otherwise train something
else, and what is not finite end the run far from its cause.
"""

from collections.abc import Mapping

import torch

from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss

LOSS_METRICS = frozenset({"pg_loss", "kl_loss", "entropy_loss", "loss", "entropy", "grad_norm", "lr", "skipped_updates"})
"""Names of `actor/*` that the update itself tells; a fact of a loss needs another."""


def check_advantages(found: object, inputs: AdvantageInputs) -> Advantages:
    """Both tensors as large as the rewards, of their dtype, and finite on policy tokens."""
    if not isinstance(found, Advantages):
        raise ValueError(f"returned {_kind(found)}; it must be Advantages(advantages_BR=..., returns_BR=...)")
    for name in ("advantages_BR", "returns_BR"):
        values = _like(f"{name}=", getattr(found, name), inputs.rewards_BR)
        if not values[inputs.mask_BR].isfinite().all():
            raise ValueError(f"returned {name} that is not finite on every policy token")
    return found


def check_loss(found: object, inputs: LossInputs) -> PolicyLoss:
    """One number a token, with gradient, and facts of one number a token each. What is not finite the optimizer step skips."""
    if not isinstance(found, PolicyLoss):
        raise ValueError(f"returned {_kind(found)}; it must be PolicyLoss(loss_n=...)")
    loss_n = _like("loss_n=", found.loss_n, inputs.log_prob_n)
    if len(loss_n) and not loss_n.requires_grad:
        raise ValueError("returned loss_n without a gradient; it must be made of log_prob_n")
    if not isinstance(found.facts, Mapping):
        raise ValueError(f"returned facts={_kind(found.facts)}; it must be a dict of tensors")
    for name, values in found.facts.items():
        if name in LOSS_METRICS:
            raise ValueError(f"returned a fact {name!r}, which the update tells itself; give it another name")
        if not isinstance(values, torch.Tensor) or values.shape != inputs.log_prob_n.shape:
            raise ValueError(
                f"returned facts[{name!r}]={_kind(values)}; it must be a tensor {_size(inputs.log_prob_n)}, one a token"
            )
    return found


def check_selected(found: object, like: torch.Tensor) -> torch.Tensor:
    """bool, one a token."""
    if not isinstance(found, torch.Tensor) or found.shape != like.shape or found.dtype != torch.bool:
        raise ValueError(f"selected {_kind(found)}; it must be a bool tensor {_size(like)}, one a token")
    return found


def _like(name: str, found: object, expected: torch.Tensor) -> torch.Tensor:
    if isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (expected.shape, expected.dtype):
        return found
    raise ValueError(f"returned {name}{_kind(found)}; it must be a tensor {_size(expected)} of {expected.dtype}")


def _kind(found: object) -> str:
    return f"a tensor {_size(found)} of {found.dtype}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"


def _size(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))
