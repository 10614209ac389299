"""Whole weights out of sharded ones, before anything is sent: for engines, exports and checkpoints.

learner -> [publication] -> shared memory or a copy on rank 0 -> Snapshot -> engine

Invariant: when `gather` returns, no rank has a collective of it to join, and what rank 0 holds is changed by nobody. Gathering one
weight while another is on its way to an engine could wait for ever: ranks that send and ranks that gather wait for each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncrl.cluster import beat
from asyncrl.training.lora import Published
from asyncrl.training.mesh import Mesh, gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights after an update, by Hugging Face parameter name, in memory that nobody writes to. Tied weights stand once."""

    version: int
    tensors: Mapping[str, torch.Tensor]


def gather(
    published: Sequence[Published],
    parameters: Mapping[str, torch.Tensor],
    mesh: Mesh,
    *,
    into: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """All of `published`, whole and on CPU, by name, in memory of their own on rank 0; {} on the others.

    parameters: of the learner. into: where they are written on rank 0, such as shared memory; None: new memory. A collective: the
    same names in the same order everywhere.
    """
    found: dict[str, torch.Tensor] = {}
    for one in published:
        beat(f"gather {one.name}")
        sources = [gathered(parameters[name].detach()) for name in one.sources]
        if mesh.rank == 0:
            made = one.make(sources)
            target = torch.empty(made.shape, dtype=made.dtype) if into is None else into[one.name]
            found[one.name] = target.copy_(made)
    return found
