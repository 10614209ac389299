"""Weights through a directory of safetensors: slower, but it works wherever the workers can read it, a shared disk included."""

from asyncrl.rollout.publication.control import Control
from asyncrl.rollout.publication.placed import Tensors
from asyncrl.rollout.publication.shelf import Shelf
from asyncrl.rollout.publication.written import Written


class DirectoryCarrier:
    """A Carrier. vLLM's own reload, and then the tied head, which that forgets on a CPU."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def open(self, control: Control, num_workers: int) -> None:
        """vLLM can reload as it is."""

    async def pack(self, tensors: Tensors) -> Written:
        return await self._shelf.write(tensors)

    async def deliver(self, control: Control, version: int, parcel: Written) -> None:
        await control.collective_rpc("reload_weights", {"weights_path": str(parcel.path)})
        await control.collective_rpc("asyncrl_mend_tied_head", {})
        await control.set_version(str(version))

    async def close(self) -> None:
        """The directory is the shelf's."""
