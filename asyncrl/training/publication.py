"""Whole weights out of sharded ones, before anything is sent: for engines, exports and checkpoints.

learner -> [publication] -> shared memory or a copy on rank 0 -> Snapshot -> engine

Invariant: when `gather` returns, no rank has a collective of it to join, and what rank 0 holds is changed by nobody. Gathering one
weight while another is on its way to an engine could wait for ever: ranks that send and ranks that gather wait for each other.
"""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate

from asyncrl.training.mesh import Mesh


def gather(
    parameters: Mapping[str, torch.Tensor], mesh: Mesh, *, into: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Copies of the whole tensors by name, on rank 0; {} on the others. A collective: the same names in the same order everywhere.

    into: where they are written on rank 0, such as shared memory; None: new memory.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        whole = _whole(parameter.detach())
        if mesh.rank != 0:
            continue
        found[name] = whole.clone() if into is None else into[name].copy_(whole)
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """May be the live tensor itself. One dimension of the mesh after the other, innermost first, which is how they were cut."""
    if not isinstance(tensor, DTensor):
        return tensor
    for place in reversed(range(len(tensor.placements))):
        if not tensor.placements[place].is_replicate():
            before = tensor.placements[:place]
            tensor = tensor.redistribute(placements=[*before, *[Replicate()] * (len(tensor.placements) - place)])
    return tensor.to_local()
