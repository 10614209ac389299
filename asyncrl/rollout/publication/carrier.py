"""Carrier: one way of weights into a vLLM. `Publisher` knows the order of things around it; a carrier moves numbers."""

from typing import Generic, Protocol, TypeVar

from asyncrl.rollout.publication.control import Control
from asyncrl.rollout.publication.placed import Tensors

Parcel = TypeVar("Parcel")


class Carrier(Protocol, Generic[Parcel]):
    """Opened once for the one vLLM that it serves. Every method raises EngineError."""

    async def open(self, control: Control, num_workers: int) -> None: ...

    async def pack(self, tensors: Tensors) -> Parcel:
        """What can be done while the engine still samples. Tensors are not changed meanwhile, nor before `deliver` returns."""
        ...

    async def deliver(self, control: Control, version: int, parcel: Parcel) -> None:
        """Weights into all workers, a tied head with them, and tokens from now on are of `version`. The engine is paused."""
        ...

    async def close(self) -> None: ...
