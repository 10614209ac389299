"""The ranks of one model: who shares rows, who shares a row, who shares a weight; and sums over them.

Topology -> [mesh] -> models, learner, batches. Layout: rank = (dp_rank * sp + sp_rank) * tp + tp_rank, so that ranks which talk
most are neighbours. Weights are cut over all ranks of one tp coordinate, sequence parallel ones too: FSDP knows no rows and tokens.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from asyncrl.ports import Topology

Value = TypeVar("Value")

ONE_RANK = Topology()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This rank's place among the ranks of a model."""

    topology: Topology
    device: torch.device
    rank: int
    fsdp: DeviceMesh
    """("fsdp",), or ("ddp", "fsdp") where the weights are copied as well as cut: all ranks of this tp coordinate."""
    tp: DeviceMesh | None
    dp_group: dist.ProcessGroup | None
    """The ranks that have other rows, at this place of the row and of the weights; None: this one alone."""
    sp_group: dist.ProcessGroup | None
    """The ranks that have other tokens of the same rows; None: this one alone."""
    dp_rank: int
    dp_size: int
    sp_rank: int
    sp_size: int
    tp_rank: int

    @property
    def is_alone(self) -> bool:
        """Whether this rank holds whole weights and all rows."""
        return self.topology.world == 1


def open_mesh(topology: Topology = ONE_RANK) -> Mesh:
    """The mesh of the default process group; without a group, and for one rank, a group of this process alone is made: it needs no
    port, file or environment. A collective: every rank calls it."""
    device = _open_group(topology.world)
    world, rank, sp, tp = topology.world, dist.get_rank(), topology.sp, topology.tp
    dp = world // (sp * tp)
    cut = _cut_mesh(device, dp * sp, topology.fsdp_size, tp)
    places = _places(device, dp, sp, tp)
    return Mesh(
        topology=topology,
        device=device,
        rank=rank,
        fsdp=cut if tp == 1 else cut[tuple(name for name in cut.mesh_dim_names or () if name != "tp")],
        tp=cut["tp"] if tp > 1 else None,
        dp_group=places.get_group("dp") if places and dp > 1 else None,
        sp_group=places.get_group("sp") if places and sp > 1 else None,
        dp_rank=rank // (sp * tp),
        dp_size=dp,
        sp_rank=rank // tp % sp,
        sp_size=sp,
        tp_rank=rank % tp,
    )


def _open_group(world: int) -> torch.device:
    """The device of this rank: a GPU of its own where the group talks through NCCL."""
    if not dist.is_initialized():
        assert world == 1, f"a mesh of {world} ranks needs a process group"
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    assert dist.get_world_size() == world, f"a mesh of {world} ranks in a group of {dist.get_world_size()}"
    if "nccl" not in dist.get_backend_config():
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return device


def _cut_mesh(device: torch.device, ranks: int, fsdp_size: int, tp: int) -> DeviceMesh:
    """The mesh whose dimensions cut weights: ddp (copies), fsdp, tp; those of one rank left out, but for fsdp."""
    fsdp_size = fsdp_size or ranks
    sizes = {"ddp": ranks // fsdp_size, "fsdp": fsdp_size, "tp": tp}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _places(device: torch.device, dp: int, sp: int, tp: int) -> DeviceMesh | None:
    """The mesh whose dimensions share rows (dp) and tokens of a row (sp)."""
    if dp * sp == 1:
        return None
    return init_device_mesh(device.type, (dp, sp, tp), mesh_dim_names=("dp", "sp", "tp"))


def all_sum(values: list[float], mesh: Mesh) -> list[float]:
    """Each number summed over the ranks that have other rows."""
    if mesh.dp_group is None:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=mesh.device)
    dist.all_reduce(total, group=mesh.dp_group)
    return [float(value) for value in total]


def gather_objects(value: Value, mesh: Mesh) -> list[Value]:
    """The values of the ranks that have other rows, in their order."""
    if mesh.dp_group is None:
        return [value]
    found: list[Value | None] = [None] * mesh.dp_size
    dist.all_gather_object(found, value, group=mesh.dp_group)
    return found  # type: ignore[return-value]


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on CPU, in memory of its own. A collective: every rank calls it.

    At one rank the gathered tensor is the live parameter itself, so the copy is not optional.
    """
    whole = gathered(tensor.detach())
    return whole.clone() if whole.device.type == "cpu" else whole.cpu()


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; may be the live one. A collective.

    One dimension of the mesh after the other, fsdp before tp: the reverse of how it was cut. `full_tensor()` does so, too, but
    warns of it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    for dim in range(tensor.device_mesh.ndim):
        placements = [Replicate()] * (dim + 1) + list(tensor.placements[dim + 1 :])
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
