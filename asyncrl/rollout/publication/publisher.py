"""Publisher: new weights into a running vLLM, between two of its steps.

trainer.publish -> engine -> [Publisher] -> pause -> carrier: weights and their version -> caches -> resume -> engine

Invariants:
1. A snapshot that does not fit is refused before anything is changed.
2. From the pause to the resume no step runs, so no token is of two versions, and none sees KV of an older one.
3. A publication that began and did not end leaves an engine that must not answer: `broken` says why, for ever.
"""

from collections.abc import Mapping
from typing import Any, assert_never

import torch

from asyncrl.config.rollout import Transfer
from asyncrl.errors import BrokenWeightsError, EngineError
from asyncrl.rollout.publication.carrier import Carrier
from asyncrl.rollout.publication.check import ModelHeaders, fitting, read_headers
from asyncrl.rollout.publication.control import Control
from asyncrl.rollout.publication.directory import DirectoryCarrier
from asyncrl.rollout.publication.shelf import Shelf
from asyncrl.rollout.publication.shm import ShmCarrier


class Publisher:
    """Of one vLLM, from its start to its end. model: its folder, as the trainer sees it. shelf: one for all engines of the process.

    Nothing here has a deadline: whoever publishes has one. Calls must not overlap, nor the pauses and resumes of somebody else.
    """

    def __init__(self, transfer: Transfer, model: str, shelf: Shelf, *, address: str = "127.0.0.1") -> None:
        """address: of this machine, as the vLLM's workers reach it; nccl alone asks."""
        self._model = model
        self._shelf = shelf
        self._carrier = _make_carrier(transfer, shelf, address)
        self._headers: ModelHeaders | None = None
        self._broken: str | None = None

    @property
    def broken(self) -> str | None:
        """Why the engine must not answer any more. It is also set when the publishing task was cancelled half way."""
        return self._broken

    async def open(self, control: Control, version: int) -> None:
        """Make the vLLM ready for publications; its weights now are of `version`.

        Raises EngineError when it was not started with what a publication needs, ModelError when the model has no safetensors.
        """
        self._headers = await self._shelf.world.offload(read_headers, self._model)
        await self._carrier.open(control, await _num_workers(control))
        await control.set_version(str(version))

    async def publish(self, control: Control, version: int, tensors: Mapping[str, torch.Tensor], *, is_paused: bool) -> None:
        """Returns when the next step samples from `tensors`. An engine that was paused stays so.

        Raises EngineError, with nothing changed, when they do not fit; BrokenWeightsError when the engine is good for nothing any
        more.
        """
        if self._broken is not None:
            raise BrokenWeightsError(self._broken)
        assert self._headers is not None, "open it first"
        fits = await self._shelf.world.offload(fitting, self._headers, tensors)
        parcel = await self._carrier.pack(fits)
        self._broken = f"the publication of version {version} did not come to its end"
        try:
            await self._swap(control, version, parcel, is_paused=is_paused)
        except EngineError as error:
            self._broken = (
                f"the publication of version {version} failed, and left the engine with weights that are not whole: {error}"
            )
            raise BrokenWeightsError(self._broken) from error
        self._broken = None

    async def _swap(self, control: Control, version: int, parcel: Any, *, is_paused: bool) -> None:
        if not is_paused:
            await control.pause()
        await self._carrier.deliver(control, version, parcel)
        await control.reset_caches()
        if not is_paused:
            await control.resume()

    async def close(self) -> None:
        """Let go of what the carrier holds; the vLLM may be gone already."""
        await self._carrier.close()


async def _num_workers(control: Control) -> int:
    """Every worker with our extension answers."""
    try:
        return len(await control.collective_rpc("asyncrl_version", {}))
    except EngineError as error:
        raise EngineError(
            "vLLM cannot be given weights: it was not started with --worker-extension-cls "
            f"asyncrl.rollout.vllm.worker.WorkerExtension, or it is gone: {error}"
        ) from error


def _make_carrier(transfer: Transfer, shelf: Shelf, address: str) -> Carrier[Any]:
    match transfer:
        case "shm":
            return ShmCarrier(shelf)
        case "directory":
            return DirectoryCarrier(shelf)
        case "nccl":
            from asyncrl.rollout.publication.nccl import NcclCarrier  # it imports vllm

            return NcclCarrier(shelf.world, address)
        case _:
            assert_never(transfer)
