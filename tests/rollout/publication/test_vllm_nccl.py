"""What is said to vLLM for its NCCL transfer, as far as it goes without a GPU: nothing is sent, but vLLM's own classes drive it."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import torch

from asyncrl.errors import EngineError
from asyncrl.ports import Json
from asyncrl.world import RealWorld

if TYPE_CHECKING:
    from asyncrl.rollout.publication.nccl import NcclCarrier

pytestmark = pytest.mark.vllm

TENSORS = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


class Workers:
    """A Control that reads what it is told with vLLM's classes, and says when it has heard of the weights."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.init_info: Any = None
        self.update_info: Any = None
        self.fails_at = ""

    def _note(self, what: str) -> None:
        self.told.append(what)
        if what == self.fails_at:
            raise EngineError(f"no {what} today")

    async def init_weight_transfer(self, init_info: Mapping[str, Json]) -> None:
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

        self._note("init")
        self.init_info = NCCLWeightTransferInitInfo(**init_info)

    async def start_weight_update(self) -> None:
        self._note("start")

    async def update_weights(self, update_info: Mapping[str, Json]) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        self._note("update")
        self.update_info = NCCLWeightTransferUpdateInfo(**update_info)

    async def finish_weight_update(self, version: str) -> None:
        self._note(f"finish {version}")

    async def collective_rpc(self, method: str, kwargs: Mapping[str, Json]) -> list[Json]:
        self._note(method)
        return [None]

    async def _never(self) -> None:
        raise AssertionError("this is the publisher's")

    pause = resume = reset_caches = _never

    async def set_version(self, version: str) -> None:
        await self._never()


class Group:
    """In the place of NCCL's communicator."""

    is_destroyed = False

    def destroy(self) -> None:
        self.is_destroyed = True


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would have gone through NCCL: the rendezvous and the tensors."""
    from vllm.distributed.weight_transfer import nccl_engine

    found: dict[str, Any] = {"group": Group()}

    def rendezvous(info: Any) -> Group:
        found["info"] = info
        return found["group"]  # type: ignore[no-any-return]

    def broadcast(self: Any, source: Any, meta: Any) -> None:
        pairs: Iterator[tuple[str, torch.Tensor]] = self._checked_iter(source, meta)
        found["tensors"] = dict(pairs)

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", rendezvous)
    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_broadcast", broadcast)
    return found


@pytest_asyncio.fixture
async def carrier() -> AsyncIterator["NcclCarrier"]:
    from asyncrl.rollout.publication.nccl import NcclCarrier

    async with RealWorld() as world:
        yield NcclCarrier(world, "127.0.0.1")


async def test_the_workers_are_told_where_to_meet(carrier: "NcclCarrier", sent: dict[str, Any]) -> None:
    workers = Workers()
    await carrier.open(workers, 4)
    ours, theirs = sent["info"], workers.init_info
    assert (ours.world_size, theirs.world_size, theirs.rank_offset) == (5, 5, 1)
    assert (ours.master_address, ours.master_port) == (theirs.master_address, theirs.master_port)
    assert ours.master_address == "127.0.0.1"
    assert (ours.packed, ours.packed_buffer_size_bytes) == (theirs.packed, theirs.packed_buffer_size_bytes)
    await carrier.close()
    assert sent["group"].is_destroyed


async def test_weights_go_between_start_and_finish(carrier: "NcclCarrier", sent: dict[str, Any]) -> None:
    workers = Workers()
    await carrier.open(workers, 1)
    for version in (1, 2):
        workers.told.clear()
        await carrier.deliver(workers, version, await carrier.pack(TENSORS))
        assert workers.told == ["start", "update", f"finish {version}", "asyncrl_mend_tied_head"]
        assert workers.update_info.names == ["a", "b"]
        assert workers.update_info.dtype_names == ["float32", "bfloat16"]
        assert workers.update_info.shapes == [[2, 3], [4]]
        assert sent["tensors"].keys() == TENSORS.keys()
    await carrier.close()


@pytest.mark.parametrize("fails_at", ["start", "update", "finish 1"])
async def test_a_refusal_of_the_workers_is_an_engines_error(carrier: "NcclCarrier", sent: dict[str, Any], fails_at: str) -> None:
    workers = Workers()
    await carrier.open(workers, 1)
    workers.fails_at = fails_at
    with pytest.raises(EngineError, match=f"no {fails_at} today"):
        await carrier.deliver(workers, 1, TENSORS)
    await carrier.close()


async def test_without_an_accelerator_the_rendezvous_fails_with_words(carrier: "NcclCarrier") -> None:
    if torch.accelerator.is_available():
        pytest.skip("it would wait for workers")
    with pytest.raises(EngineError, match="the rendezvous of weights by NCCL failed: RuntimeError: "):
        async with asyncio.timeout(60):
            await carrier.open(Workers(), 1)


async def test_an_address_of_another_machine_is_named() -> None:
    from asyncrl.rollout.publication.nccl import free_port

    with pytest.raises(EngineError, match=r"192\.0\.2\.1 is no address of this machine"):
        free_port("192.0.2.1")
