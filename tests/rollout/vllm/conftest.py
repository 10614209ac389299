"""A vLLM without a model, in this process: what VLLMEngine asks of one, with every answer in the test's hand."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from asyncrl.errors import EngineError
from asyncrl.ports import Json, World
from asyncrl.rollout.publication.publisher import Publisher
from asyncrl.rollout.publication.shelf import Shelf
from asyncrl.rollout.vllm.answers import Call, Part
from asyncrl.rollout.vllm.engine import VLLMEngine
from asyncrl.rollout.vllm.meter import Meter
from asyncrl.rollout.vllm.processes import Process
from asyncrl.rollout.vllm.settings import VLLMSettings
from asyncrl.world import RealWorld


def spell(ids: list[int]) -> str:
    """A letter a token."""
    return "".join(chr(ord("a") + token) for token in ids)


class FakeControl:
    """Notes what it is told. `held`: a method that waits for `released`; `broken`: one that fails."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.held = ""
        self.broken = ""
        self.is_reached = asyncio.Event()
        self.released = asyncio.Event()

    async def _note(self, what: str) -> None:
        self.told.append(what)
        if self.held == what:
            self.is_reached.set()
            await self.released.wait()
        if self.broken == what:
            raise EngineError(f"{what} is broken")

    async def pause(self) -> None:
        await self._note("pause")

    async def resume(self) -> None:
        await self._note("resume")

    async def init_weight_transfer(self, init_info: Mapping[str, Json]) -> None:
        await self._note("init")

    async def start_weight_update(self) -> None:
        await self._note("start")

    async def update_weights(self, update_info: Mapping[str, Json]) -> None:
        await self._note("update")

    async def finish_weight_update(self, version: str) -> None:
        await self._note(f"finish {version}")

    async def set_version(self, version: str) -> None:
        await self._note(f"version {version}")

    async def reset_caches(self) -> None:
        await self._note("reset")

    async def collective_rpc(self, method: str, kwargs: Mapping[str, Json]) -> list[Json]:
        await self._note(method)
        return [1]


class FakeClient:
    """A Client. Each answer is what `answer` says; without one, it never comes."""

    vocab_size = 26

    def __init__(self) -> None:
        self.meter = Meter()
        self.processes: Sequence[Process] = ()
        self.control = FakeControl()
        self.is_dead = False
        self.answer: Callable[[Call], Sequence[Part]] | None = None
        self.calls: list[Call] = []
        self.aborted: list[str] = []
        self.is_closed = False
        self.left: list[str] = []
        """Requests whose generator was closed or cancelled before its end."""

    async def parts(self, call: Call) -> AsyncGenerator[Part, None]:
        self.calls.append(call)
        is_whole = False
        try:
            if self.answer is None:
                await asyncio.Event().wait()
            else:
                for part in self.answer(call):
                    yield part
            is_whole = True
        finally:
            if not is_whole:
                self.left.append(call.request_id)

    async def abort(self, call: Call) -> None:
        self.aborted.append(call.request_id)

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def child(client: FakeClient) -> "Iterator[subprocess.Popen[bytes]]":
    """The one process of `client`, under the name of "the worker"."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    client.processes = [Process(name="the worker", pid=process.pid)]
    yield process
    process.kill()
    process.wait()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[RealWorld]:
    async with RealWorld() as world:
        yield world


MakeEngine = Callable[..., VLLMEngine]


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Of the model that the engines are told they have."""
    return {"layer.weight": torch.ones(2, 2), "lm_head.weight": torch.ones(3, 2)}


@pytest.fixture
def make_engine(client: FakeClient, tmp_path: Path, weights: dict[str, torch.Tensor]) -> MakeEngine:
    """make_engine(world, **settings) over `client`."""
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "tie_word_embeddings": false}')

    async def opener(settings: VLLMSettings, world: World) -> FakeClient:
        return client

    def make(world: RealWorld, *, version: int = 0, **settings: object) -> VLLMEngine:
        plain: dict[str, object] = {"model": str(tmp_path), "dtype": "float32", "max_num_seqs": 4, "context_len": 32}
        return VLLMEngine(
            VLLMSettings(**{**plain, **settings}),  # type: ignore[arg-type]
            world=world,
            publisher=Publisher("shm", str(tmp_path), Shelf(world=world)),
            decode=spell,
            version=version,
            opener=opener,
        )

    return make
