"""Kits of the engine over HTTP for the conformance suite: over a fake server in the default run, over vLLM's in `make vllm`."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from asyncrl.ports import Decode, RolloutEngine, WeightSnapshot
from asyncrl.rollout.openai.engine import OpenAIEngine
from asyncrl.rollout.openai.settings import ServerSettings
from asyncrl.rollout.publication.publisher import Publisher
from asyncrl.rollout.publication.shelf import Shelf
from asyncrl.world import RealWorld
from tests.rollout.openai.fake_server import VOCAB, FakeServer, Servers, distribution

START_TIMEOUT_S = 240.0
LIVE_VOCAB = 150
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights by name."""

    tensors: dict[str, torch.Tensor]


def spell(ids: list[int]) -> str:
    """One letter a token: a decode function without a tokenizer."""
    return "".join(chr(0x4E00 + token) for token in ids)


async def until(condition: Callable[[], bool]) -> None:
    """What a server's thread will have done in a moment."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (it sets no event on this loop)
            await asyncio.sleep(1e-3)


class Fakes:
    """Fake servers, and what publishes to them: their model is one number, the version of the formula."""

    def __init__(self, servers: Servers, folder: Path, world: RealWorld) -> None:
        self.servers = servers
        self.world = world
        self.folder = str(folder)
        self.shelf = Shelf(world=world)
        save_file({"version": torch.zeros(1)}, folder / "model.safetensors")

    def settings(self, url: str, **more: Any) -> ServerSettings:
        keys: dict[str, Any] = {"base_url": url, "max_num_seqs": 8, "context_len": 128, "vocab_size": VOCAB, "wait_s": 0.0} | more
        return ServerSettings(**keys)

    def publisher(self) -> Publisher:
        return Publisher("shm", self.folder, self.shelf)

    def engine(
        self, url: str, *, trains: bool = True, decode: Decode | None = spell, version: int = 0, **more: Any
    ) -> OpenAIEngine:
        publisher = self.publisher() if trains else None
        return OpenAIEngine(self.settings(url, **more), world=self.world, decode=decode, publisher=publisher, version=version)


def fake_snapshot(version: int) -> Snapshot:
    return Snapshot(tensors={"version": torch.tensor([float(version)])})


class FakeKit:
    """The engine over a fake server of its own."""

    vocab_size = VOCAB
    has_model = True

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes
        self._servers: dict[int, FakeServer] = {}

    def make(
        self, *, max_num_seqs: int = 8, context_len: int = 128, version: int = 0, decode: Decode | None = spell
    ) -> RolloutEngine:
        server, url = self._fakes.servers.add()
        engine = self._fakes.engine(url, max_num_seqs=max_num_seqs, context_len=context_len, version=version, decode=decode)
        self._servers[id(engine)] = server
        return engine

    def snapshot(self, version: int) -> WeightSnapshot:
        return fake_snapshot(version)

    def log_probs(self, version: int, ids: Sequence[int], temperature: float) -> torch.Tensor:
        return torch.tensor([distribution(version, last, temperature) for last in ids[:-1]], dtype=torch.float64)

    def kill(self, engine: RolloutEngine) -> str:
        server = self._servers[id(engine)]

        def die() -> None:
            server.is_healthy, server.has_gone = False, "out of luck"

        self._fakes.servers.call(die)
        return "out of luck"


class LiveServer:
    """vLLM's server over a tiny model, by the command that users have; started anew when a test has killed it."""

    def __init__(self, folder: Path, build: Callable[[int], PreTrainedModel], world: RealWorld) -> None:
        self.folder = str(folder)
        self.model = cache(build)
        self.world = world
        self.shelf = Shelf(world=world)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread
        self._url = ""
        self.model(0).save_pretrained(self.folder)

    def url(self) -> str:
        """Of a server that answers."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._url

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [sys.executable, "-m", "asyncrl.rollout.vllm.serve", self.folder, "--context-len", "1024"]
        words += ["--dtype", "float32", "--kv-cache-memory-mib", "128", "--port", str(port)]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._url = f"http://127.0.0.1:{port}"
        clock = threading.Timer(START_TIMEOUT_S, self._process.kill)
        clock.start()
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if "Application startup complete" in line:
                break
        else:
            raise AssertionError(f"vLLM's server did not start: {''.join(said)}")
        clock.cancel()
        self._reader = threading.Thread(target=_drain, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def core_pid(self) -> int:
        """Of EngineCore, the server's child that has children."""
        assert self._process is not None
        return next(pid for pid in _children(self._process.pid) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def kill_core(self) -> None:
        """The server ends by itself then."""
        os.kill(self.core_pid, signal.SIGKILL)

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait(60)

    def close(self) -> None:
        """By force, which must leave none of its processes behind."""
        if self._process is None or self._process.poll() is not None:
            return
        core = self.core_pid
        pids = [core, *_children(core)]
        assert len(pids) == 2, "EngineCore and a worker"
        ends = [os.pidfd_open(pid) for pid in pids]
        self._process.kill()
        self._process.wait(60)
        for pid, end in zip(pids, ends, strict=True):
            poll = select.poll()
            poll.register(end, select.POLLIN)
            assert poll.poll(30_000), f"process {pid} of vLLM outlived its server"
            os.close(end)
        self._reader.join(30)

    def settings(self, **more: Any) -> ServerSettings:
        keys: dict[str, Any] = {"base_url": self.url(), "max_num_seqs": 8, "context_len": 128, "vocab_size": LIVE_VOCAB} | more
        return ServerSettings(**keys)

    def engine(self, *, decode: Decode | None = spell, version: int = 0, **more: Any) -> OpenAIEngine:
        """Begins with the weights of version 0, whatever was published before."""
        publisher = Publisher("shm", self.folder, self.shelf)
        return _Fresh(self, self.settings(**more), world=self.world, decode=decode, publisher=publisher, version=version)

    def snapshot(self, version: int) -> Snapshot:
        return Snapshot(tensors=dict(self.model(version).state_dict()))

    def log_probs(self, version: int, ids: Sequence[int], temperature: float) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(version)(input_ids=torch.tensor([ids])).logits[0, :-1]
        return torch.log_softmax(logits.double() / temperature, -1)


def _drain(stream: IO[str]) -> None:
    """To its end: a full pipe would hold the server up."""
    with stream:
        for _ in stream:
            pass


def _children(pid: int) -> list[int]:
    """Resource trackers aside, which end when nobody holds their pipe."""
    found = [int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
    return [each for each in found if b"resource_tracker" not in Path(f"/proc/{each}/cmdline").read_bytes()]


class _Fresh(OpenAIEngine):
    def __init__(self, live: LiveServer, settings: ServerSettings, **keys: Any) -> None:
        super().__init__(settings, **keys)
        self._live = live

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.publish(self.version, self._live.snapshot(0))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await super().__aexit__(kind, error, trace)
        if self.failure != "the engine was closed":
            await self._live.world.offload(self._live.wait)


class LiveKit:
    """The engine over vLLM's server."""

    vocab_size = LIVE_VOCAB
    has_model = True

    def __init__(self, live: LiveServer) -> None:
        self.live = live
        self.make = live.engine
        self.snapshot = live.snapshot
        self.log_probs = live.log_probs

    def kill(self, engine: RolloutEngine) -> str:
        self.live.kill_core()
        return "the server is gone"


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fakes]:
    """Where fake servers come from."""
    servers = Servers()
    yield Fakes(servers, tmp_path_factory.mktemp("fake"), RealWorld())
    servers.close()


@pytest.fixture(scope="session")
def live(make_lm: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """vLLM's server, one for the session."""

    def build(version: int) -> PreTrainedModel:
        more = {"vocab_size": LIVE_VOCAB, "initializer_range": 0.15, "max_position_embeddings": 2048, "tie_word_embeddings": True}
        return make_lm("qwen2", seed=100 + version, **SIZES, **more)

    server = LiveServer(tmp_path_factory.mktemp("live"), build, RealWorld())
    yield server
    server.close()
