"""The device mesh and FSDP2. One rank now: a 1-D mesh over an in-process group that needs no port, file or environment.

Not covered yet: many ranks, HSDP, sequence parallel. Code above this file sees only a mesh, its size, and sums over it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.ports import Topology


def open_mesh() -> DeviceMesh:
    """A 1-D mesh over the ranks of the default process group; without a group, a group of this process alone is made."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def topology_of(mesh: DeviceMesh) -> Topology:
    """Sizes of the mesh's dimensions by name, those it lacks being 1."""
    names = mesh.mesh_dim_names or ()
    sizes = {name: mesh.size(dim) for dim, name in enumerate(names)}
    return Topology(world=mesh.size(), **sizes)


def shard(module: nn.Module, layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """FSDP2 in place: each layer is a unit, and what is left (embedding, norm, head) belongs to the root.

    Alone, a gathered layer is kept from forward to backward: gathering it again would be a copy of what is already here.
    """
    alone = mesh.size() == 1
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not alone)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)


def all_sum(values: list[float], mesh: DeviceMesh) -> list[float]:
    """Each number summed over the ranks of the mesh."""
    if mesh.size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, group=mesh.get_group())
    return [float(value) for value in total]


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor in memory of its own. A collective: every rank calls it.

    At one rank `full_tensor()` is the live parameter itself, so the copy is not optional.
    """
    whole = tensor.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write a whole tensor over a parameter or its optimizer state, sharded the way the target is."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            source = distribute_tensor(source.to(target.dtype), target.device_mesh, target.placements)
        target.copy_(source)


def like(parameter: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A new tensor with the values of `source`, sharded like `parameter`."""
    empty = torch.empty_like(parameter, dtype=source.dtype, requires_grad=False)
    copy_into(empty, source)
    return empty
