"""Weights from the trainer's GPU to those of a vLLM, by vLLM's own NCCL transfer. Imports vllm: imported by who asks for it.

NOT RUN: it was written and tested where there is no GPU. The tests cover what is said to vLLM (its own classes read it), the order
of the calls, the world's size and the address; not one byte has gone through NCCL.

Ranks of the transfer's group: 0 is this process, 1 .. are the workers. Every vLLM has a group of its own.
"""

import asyncio
import socket
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from asyncrl.errors import EngineError
from asyncrl.ports import Json, World
from asyncrl.rollout.publication.control import Control
from asyncrl.rollout.publication.placed import Tensors
from asyncrl.wording import named_message_of

POOL = "tools"
"""Its threads are many and keep no process alive: a transfer whose other end died may stand in NCCL for good."""


class NcclCarrier:
    """A Carrier. The workers call this machine back at `address`, and a port that is free when the carrier is opened."""

    def __init__(self, world: World, address: str) -> None:
        self._world = world
        self._address = address
        self._source = Source()
        self._engine: NCCLTrainerWeightTransferEngine | None = None

    async def open(self, control: Control, num_workers: int) -> None:
        port = free_port(self._address)
        info = NCCLTrainerInitInfo(rank=0, master_address=self._address, master_port=port, world_size=1 + num_workers)
        client = Client(control, asyncio.get_running_loop())

        def rendezvous() -> NCCLTrainerWeightTransferEngine:
            return NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=self._source)

        with _transferred("the rendezvous"):
            self._engine = await self._world.offload(rendezvous, pool=POOL)

    async def pack(self, tensors: Tensors) -> Tensors:
        return tensors

    async def deliver(self, control: Control, version: int, parcel: Tensors) -> None:
        assert self._engine is not None, "open it first"
        self._source.tensors = parcel
        self._engine.client.version = str(version)
        try:
            with _transferred("the transfer"):
                await self._world.offload(self._engine.send_weights, pool=POOL)
        finally:
            self._source.tensors = {}
        await control.collective_rpc("asyncrl_mend_tied_head", {})

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await self._world.offload(engine.shutdown, pool=POOL)


class Source(WeightSource):  # type: ignore[misc] # vllm has no types where mypy runs
    """The weights of one transfer, brought to the accelerator one by one as they are sent."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        for name, tensor in self.tensors.items():
            yield name, tensor.detach().to(device)


class Client:
    """A Control for vLLM's sending side, which calls from threads and waits: each call runs on the loop."""

    def __init__(self, control: Control, loop: asyncio.AbstractEventLoop) -> None:
        self._control = control
        self._loop = loop
        self.version = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(self._control.init_weight_transfer(init_info))

    def start_weight_update(self) -> None:
        self._call(self._control.start_weight_update())

    def update_weights(self, update_info: Mapping[str, Json]) -> None:
        self._call(self._control.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(self._control.finish_weight_update(weight_version or self.version))

    def _call(self, told: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(told, self._loop).result()


def free_port(address: str) -> int:
    """A port of this machine that nobody listens at now. Raises EngineError when the address is not this machine's."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
            server.bind((address, 0))
            return int(server.getsockname()[1])
    except OSError as error:
        raise EngineError(f"{address} is no address of this machine, where vLLM's workers could meet it: {error}") from error


@contextmanager
def _transferred(what: str) -> Iterator[None]:
    """NCCL and vLLM raise RuntimeError and its like."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # of whatever class; it goes on as ours
        raise EngineError(f"{what} of weights by NCCL failed: {named_message_of(error)}") from error
