"""Gradients of parameters that are cut in different ways: groups for the optimizer, the norm of all, and its clip.

backward -> [gradients] -> optimizer. With tensor parallel, some parameters live on a mesh of two dimensions and the others on one
of one; torch takes no list of both.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_Cut = tuple[DeviceMesh, tuple[int, ...]]


def groups_by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters, those of one mesh together, in order of first appearance."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def total_norm(gradients: Iterable[torch.Tensor]) -> float:
    """The 2-norm of all of them as one vector, each number counted once. A collective over the meshes that cut them."""
    norms: dict[_Cut | None, list[torch.Tensor]] = {}
    for gradient in gradients:
        local, cut = _local(gradient)
        norms.setdefault(cut, []).append(torch.linalg.vector_norm(local))
    return math.sqrt(sum(_square(torch.stack(found), cut) for cut, found in norms.items()))


def scale(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply each of them, in place."""
    for gradient in gradients:
        _local(gradient)[0].mul_(factor)


def sum_over(gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add up this rank's part with the same part of the other ranks of the group, in place."""
    dist.all_reduce(_local(gradient)[0], group=group)


def _local(gradient: torch.Tensor) -> tuple[torch.Tensor, _Cut | None]:
    """The part of this rank, and over which dimensions of which mesh the rest is; None: it is all here."""
    if not isinstance(gradient, DTensor):
        return gradient, None
    mesh = gradient.device_mesh
    dims = tuple(dim for dim, placement in enumerate(gradient.placements) if mesh.size(dim) > 1 and not placement.is_replicate())
    return gradient.to_local(), (mesh, dims) if dims else None


def _square(norms: torch.Tensor, cut: _Cut | None) -> float:
    square = norms.double().square().sum()
    if cut is not None:
        mesh, dims = cut
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
    return float(square)
