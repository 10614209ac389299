"""Learner: a sharded model, its optimizer and its schedule. Actor, critic and warm start put their losses on top of it.

Invariants: a gradient that is not finite never reaches the weights.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from asyncrl.config import OptimConfig
from asyncrl.errors import ConfigError, NonFiniteGradientError
from asyncrl.training.gradients import groups_by_mesh, scale, sum_over, total_norm
from asyncrl.training.mesh import Mesh, all_sum
from asyncrl.training.model import Wrapper
from asyncrl.training.optim import learning_rate
from asyncrl.training.sharding import free_gathered, units_of

log = logging.getLogger(__name__)

Module = TypeVar("Module", bound=Wrapper)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one optimizer step did. `skipped`: its gradient was not finite, and the weights are as before."""

    grad_norm: float
    lr: float
    skipped: bool


class Learner(Generic[Module]):
    """Not thread-safe: one thread at a time calls it (the world's `model` pool has one).

    module: sharded over the mesh, such as `build_policy` makes it; total_updates: optimizer steps of the whole run, the schedule's
    end. On many ranks every method is a collective. Raises ConfigError when a schedule with an end has no total.
    """

    def __init__(self, module: Module, mesh: Mesh, optim: OptimConfig, *, total_updates: int) -> None:
        if total_updates < 1 and optim.lr_scheduler_type != "constant":
            raise ConfigError(f"lr_scheduler_type = {optim.lr_scheduler_type!r} needs the number of optimizer steps of the run")
        self._optim = optim
        self._total_updates = total_updates
        self.mesh = mesh
        self.module = module
        self.updates = 0
        """Optimizer steps so far, skipped ones included: the place on the schedule."""
        self.skipped_updates = 0
        self._skipped_in_a_row = 0
        self._broken_losses = 0
        self._sums_are_whole = True
        self.parameters: dict[str, nn.Parameter] = {module.hf_name(name): value for name, value in module.named_parameters()}
        """All parameters by Hugging Face name, frozen ones too."""
        self.trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        """Those that the optimizer changes."""
        groups = [{"params": group} for group in groups_by_mesh(self.trained.values())]
        self.optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, foreach=True)

    def backward(self, loss: torch.Tensor, *, is_last: bool = True) -> None:
        """Add the gradient of this rank's share of the loss, for one micro-batch; shares and gradients of all ranks are summed.

        is_last: of the micro-batches before a step. Copies of the weights (HSDP) add up their gradients at the last one alone.
        A loss that is not finite spoils the update even where its gradient looks fine: the backward of a clamp turns NaN into 0.
        """
        self._broken_losses += not torch.isfinite(loss.detach())
        if not self.mesh.is_alone:
            for unit in units_of(self.module):
                unit.set_requires_all_reduce(is_last, recurse=False)
        self._sums_are_whole = is_last
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, suspects: Callable[[], str]) -> UpdateReport:
        """Clip, update, clear the gradients. A loss or gradient that is not finite skips the update; `suspects()` names its rows.

        Raises NonFiniteGradientError after `max_nonfinite_in_a_row` skipped updates in a row.
        """
        assert self._sums_are_whole, "the last micro-batch before a step is not told to be the last"
        lr = learning_rate(self._optim, self.updates, self._total_updates)
        self.updates += 1
        self._sum_partial_gradients()
        gradients = [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]
        norm = total_norm(gradients)
        (broken,) = all_sum([float(self._broken_losses)], self.mesh)
        self._broken_losses = 0
        good = math.isfinite(norm) and not broken
        if good:
            if norm > self._optim.clip_grad:
                scale(gradients, self._optim.clip_grad / (norm + 1e-6))  # 1e-6 as in torch's clip_grad_norm_
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self._skipped_in_a_row = 0
        self.optimizer.zero_grad(set_to_none=True)
        if not good:
            self._skip(norm, suspects())
        return UpdateReport(grad_norm=norm, lr=lr, skipped=not good)

    def _sum_partial_gradients(self) -> None:
        """Over the tensor parallel ranks: of whole weights that have seen this rank's heads alone."""
        if self.mesh.tp is None:
            return
        for name in sorted(self.module.placement.partial_names & self.trained.keys()):
            if (gradient := self.trained[name].grad) is not None:
                sum_over(gradient, self.mesh.tp.get_group())

    def _skip(self, norm: float, suspects: str) -> None:
        self.skipped_updates += 1
        self._skipped_in_a_row += 1
        log.warning("update %d skipped, not finite: gradient norm %s; %s", self.updates, norm, suspects)
        if self._skipped_in_a_row >= self._optim.max_nonfinite_in_a_row:
            raise NonFiniteGradientError(
                f"{self._skipped_in_a_row} updates in a row were not finite (gradient norm {norm}); the last: {suspects}"
            )

    def counters(self) -> dict[str, int]:
        """What a checkpoint needs besides weights, moments and torch's generator."""
        return {
            "updates": self.updates,
            "skipped_updates": self.skipped_updates,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Go on at this place of the schedule, with weights and moments that were written into `parameters` and `optimizer`."""
        self.updates = counters["updates"]
        self.skipped_updates = counters["skipped_updates"]
        self._skipped_in_a_row = counters["skipped_in_a_row"]
        free_gathered(self.module)
