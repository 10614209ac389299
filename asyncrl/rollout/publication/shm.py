"""Weights through shared memory, for a vLLM on this machine: the transfer engine `asyncrl_shm` of rollout/vllm/worker.py.

One copy here, whatever the number of engines and workers; each worker maps it and takes its shards out of it.
"""

from dataclasses import asdict

from asyncrl.rollout.publication.control import Control
from asyncrl.rollout.publication.placed import Placed, Tensors
from asyncrl.rollout.publication.shelf import Shelf


class ShmCarrier:
    """A Carrier. All of a model travels in one update, so fused layers (query, key, value; gate, up) are whole."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def open(self, control: Control, num_workers: int) -> None:
        await control.init_weight_transfer({})

    async def pack(self, tensors: Tensors) -> Placed:
        return await self._shelf.place(tensors)

    async def deliver(self, control: Control, version: int, parcel: Placed) -> None:
        await control.start_weight_update()
        await control.update_weights({"where": asdict(parcel.where)})
        await control.finish_weight_update(str(version))

    async def close(self) -> None:
        """The memory is the shelf's."""
