"""FSDP2 over a mesh: what is gathered together, in which type it computes, and that gradients are summed, never averaged.

mesh -> [sharding] -> policy, value model
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from asyncrl.config import FSDPConfig
from asyncrl.errors import ConfigError
from asyncrl.training.mesh import Mesh


def shard(module: nn.Module, layers: Sequence[nn.Module], mesh: Mesh, fsdp: FSDPConfig, *, wide: Sequence[nn.Module] = ()) -> None:
    """FSDP2 in place: each layer is a unit, and what is left (embedding, norm, head) belongs to the root. wide: units that compute
    in the type of their weights whatever `mixed_precision` says.

    The gradient of a parameter is the sum of those of all ranks of the mesh; losses are shares of one sum. Alone, a gathered layer
    is kept from forward to backward: gathering it again would be a copy of what is already here.
    Raises ConfigError for `offload_policy` without a GPU.
    """
    offload = _offload(mesh, fsdp)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if fsdp.mixed_precision else _plain(module)
    reshard = fsdp.reshard_after_forward and not mesh.is_alone
    for layer in layers:
        fully_shard(layer, mesh=mesh.fsdp, reshard_after_forward=reshard, mp_policy=mixed, offload_policy=offload)
    for layer in wide:
        fully_shard(layer, mesh=mesh.fsdp, reshard_after_forward=reshard, offload_policy=offload)
    fully_shard(module, mesh=mesh.fsdp, reshard_after_forward=False, mp_policy=mixed, offload_policy=offload)
    if mesh.fsdp.size() > 1:
        for unit in units_of(module):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no average


def _plain(module: nn.Module) -> MixedPrecisionPolicy:
    """Sums over ranks of bfloat16 gradients are made in float32."""
    narrow = any(parameter.dtype == torch.bfloat16 for parameter in module.parameters())
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)


def _offload(mesh: Mesh, fsdp: FSDPConfig) -> OffloadPolicy:
    if not fsdp.offload_policy:
        return OffloadPolicy()
    if mesh.device.type != "cuda":
        raise ConfigError(
            "actor.fsdp_config.offload_policy keeps the weights of a GPU in the host's memory, and there is no GPU here"
        )
    return CPUOffloadPolicy()


def units_of(module: nn.Module) -> list[FSDPModule]:
    """The parts of a sharded module that are gathered together."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def free_gathered(module: nn.Module) -> None:
    """Free gathered weights, which are copies. A backward pass does; passes without gradient leave them behind, where they take
    memory, and are stale once parameters are written other than by an optimizer step."""
    for unit in units_of(module):
        unit.reshard()
