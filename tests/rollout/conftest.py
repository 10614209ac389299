"""Tiny random models, and one kit an engine: what the conformance suite needs to know of an engine to test it.

An engine joins the suite by a kit of its own in `KITS`, or in `REAL_KITS` when it starts processes (`make vllm` runs those).
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from asyncrl.config.simulation import Scenario
from asyncrl.ports import Decode, GenerateRequest, Generation, RolloutEngine, SamplingParams, WeightSnapshot, World
from asyncrl.rollout.pool import EnginePool, PoolLimits
from asyncrl.rollout.publication.publisher import Publisher
from asyncrl.rollout.publication.shelf import Shelf
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.rollout.vllm.client import Client
from asyncrl.rollout.vllm.engine import VLLMEngine
from asyncrl.rollout.vllm.launch import launch
from asyncrl.rollout.vllm.settings import VLLMSettings
from asyncrl.simulation.edges.engines import SimEngines
from asyncrl.simulation.edges.template import VOCABULARY
from asyncrl.simulation.seams import Seams
from asyncrl.world import RealWorld
from tests.rollout.openai.kits import FakeKit, Fakes, LiveKit, fakes, live

__all__ = ["fakes", "live"]  # fixtures

VOCAB = 150
# Weights so large that a version leaves its mark on every log-prob.
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "head_dim": 12, "initializer_range": 0.15}
MakeLM = Callable[..., PreTrainedModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights by name."""

    tensors: Mapping[str, torch.Tensor]


def spell(ids: list[int]) -> str:
    """One letter a token: a decode function without a tokenizer."""
    return "".join(chr(0x4E00 + token) for token in ids)


class EngineKit(Protocol):
    """An engine under test, and an independent computation of what it should have sampled from."""

    vocab_size: int
    has_model: bool
    """Log-probs are those of a model, and `log_probs` and `kill` are there."""

    def make(
        self, *, max_num_seqs: int = 8, context_len: int = 128, version: int = 0, decode: Decode | None = spell
    ) -> RolloutEngine: ...

    def snapshot(self, version: int) -> WeightSnapshot:
        """Weights of a version; those of version 0 are the engine's own at its start."""
        ...

    def log_probs(self, version: int, ids: Sequence[int], temperature: float) -> torch.Tensor:
        """[len(ids) - 1, vocab]: log-probs of each next token by a plain forward of the version's weights."""
        ...

    def kill(self, engine: RolloutEngine) -> str:
        """Make the engine die of an internal error. Returns words that its errors have then."""
        ...


class TorchKit:
    """The embedded engine over one of the tiny models."""

    vocab_size = VOCAB
    has_model = True

    def __init__(self, build: MakeLM, *, deterministic: bool = False) -> None:
        self._build = build
        self._deterministic = deterministic
        self._model = cache(lambda version: build(100 + version))

    def make(
        self, *, max_num_seqs: int = 8, context_len: int = 128, version: int = 0, decode: Decode | None = spell
    ) -> RolloutEngine:
        return TorchEngine(
            self._build(100),
            max_num_seqs=max_num_seqs,
            context_len=context_len,
            deterministic=self._deterministic,
            version=version,
            decode=decode,
        )

    def snapshot(self, version: int) -> WeightSnapshot:
        return Snapshot(tensors=dict(self._model(version).state_dict()))

    def log_probs(self, version: int, ids: Sequence[int], temperature: float) -> torch.Tensor:
        with torch.no_grad():
            logits = self._model(version)(input_ids=torch.tensor([ids])).logits[0, :-1]
        return torch.log_softmax(logits.double() / temperature, -1)

    def kill(self, engine: RolloutEngine) -> str:
        def die() -> None:
            raise RuntimeError("out of luck")

        assert isinstance(engine, TorchEngine)
        engine._commands.put(die)
        return "out of luck"


class PoolKit(TorchKit):
    """Two embedded engines behind a pool, which share the rows. None is ever brought back: a death is that of the pool."""

    def make(
        self, *, max_num_seqs: int = 8, context_len: int = 128, version: int = 0, decode: Decode | None = spell
    ) -> RolloutEngine:
        first = max(max_num_seqs // 2, 1)
        shares = [first, max(max_num_seqs - first, 1)]
        make = super().make
        makers = [partial(make, max_num_seqs=share, context_len=context_len, version=version, decode=decode) for share in shares]
        limits = PoolLimits(start_timeout_s=60, slow_after_s=30, hung_after_s=60, publish_timeout_s=60, max_restarts=0)
        return EnginePool(makers, limits=limits)

    def kill(self, engine: RolloutEngine) -> str:
        assert isinstance(engine, EnginePool)
        words = {super(PoolKit, self).kill(life.engine) for life in engine._lives()}
        return words.pop()


class SimulatedKit:
    """The simulated engines, on the real clock: what they say goes on until something ends it."""

    vocab_size = VOCABULARY
    has_model = False

    def __init__(self, prefill_tokens: int = 0) -> None:
        self._prefill_tokens = prefill_tokens

    def make(
        self, *, max_num_seqs: int = 8, context_len: int = 128, version: int = 0, decode: Decode | None = spell
    ) -> RolloutEngine:
        times = {"decode_step_s": 1e-3, "decode_row_s": 0.0, "prefill_call_s": 0.0, "prefill_token_s": 0.0}
        times["prefill_tokens"] = self._prefill_tokens
        tree = {
            "data": {"max_prompt_length": 1, "max_response_length": 1},
            "rollout": {"max_num_seqs": max_num_seqs, "max_model_len": context_len},
            "trainer": {"total_training_steps": 1},
            "sim": {"sessions": {"turn_len": 500_000}, "engine": times, "training": {"publish_s": 1e-3}},
        }
        return SimEngines(Scenario.model_validate(tree), RealWorld(), Seams(), version=version)

    def snapshot(self, version: int) -> WeightSnapshot:
        return Snapshot(tensors={})

    def log_probs(self, version: int, ids: Sequence[int], temperature: float) -> torch.Tensor:
        raise NotImplementedError

    def kill(self, engine: RolloutEngine) -> str:
        raise NotImplementedError


# --- a real vLLM ------------------------------------------------------------------------------------------------------------------

REAL = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]
"""Marks of what starts a vLLM: it takes its time, and warns of its own affairs while it is imported."""

VLLM_SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 1024}
"""vLLM's CPU build has no smaller heads."""


class SharedVLLM:
    """One vLLM for many tests: started when it is asked for, reset for each engine, started anew when a test has killed it."""

    def __init__(self, folder: Path, models: Callable[[int], PreTrainedModel], world: World) -> None:
        self.folder = str(folder)
        self.models = cache(models)
        self.world = world
        self.shelf = Shelf(world=world)
        self.is_killed = False
        """Said by who has done it: vLLM itself takes a moment to notice."""
        self._client: Client | None = None
        self._publisher = Publisher("shm", self.folder, self.shelf)
        self.models(0).save_pretrained(self.folder)

    async def lend(self, settings: VLLMSettings, world: World) -> Client:
        """An Opener: of a vLLM with room for all that the tests ask, with weights of version 0."""
        if self._client is None or self.is_killed:
            await self.close()
            self.is_killed = False
            self._publisher = Publisher("shm", self.folder, self.shelf)
            self._client = await launch(replace(settings, max_num_seqs=64, context_len=512), self.world)
            await self._publisher.open(self._client.control, 0)
        else:
            await self._publisher.publish(self._client.control, 0, self.models(0).state_dict(), is_paused=False)
        meter = self._client.meter
        for each in fields(meter):
            setattr(meter, each.name, each.default)
        return _Lent(self._client)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class _Lent:
    """A Client that outlives the engine it is lent to."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def close(self) -> None:
        pass


class VLLMKit:
    """The real vLLM over a tiny model."""

    vocab_size = VOCAB
    has_model = True

    def __init__(self, shared: SharedVLLM) -> None:
        self._shared = shared

    def make(
        self, *, max_num_seqs: int = 8, context_len: int = 128, version: int = 0, decode: Decode | None = spell
    ) -> RolloutEngine:
        shared = self._shared
        return VLLMEngine(
            VLLMSettings(model=shared.folder, dtype="float32", max_num_seqs=max_num_seqs, context_len=context_len),
            world=shared.world,
            publisher=Publisher("shm", shared.folder, shared.shelf),
            decode=decode,
            version=version,
            opener=shared.lend,
        )

    def snapshot(self, version: int) -> WeightSnapshot:
        return Snapshot(tensors=dict(self._shared.models(version).state_dict()))

    def log_probs(self, version: int, ids: Sequence[int], temperature: float) -> torch.Tensor:
        with torch.no_grad():
            logits = self._shared.models(version)(input_ids=torch.tensor([ids])).logits[0, :-1]
        return torch.log_softmax(logits.double() / temperature, -1)

    def kill(self, engine: RolloutEngine) -> str:
        assert isinstance(engine, VLLMEngine)
        assert engine._client is not None
        core = engine._client.processes[0]
        os.kill(core.pid, signal.SIGKILL)
        self._shared.is_killed = True
        return f"EngineCore (pid {core.pid})"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_vllm(make_lm: MakeLM, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedVLLM]:
    """With a Qwen2 whose head is its embedding: the CPU build forgets that one, when nobody sees to it."""
    sizes = {**SIZES, **VLLM_SIZES, "tie_word_embeddings": True}
    async with RealWorld() as world:
        folder = tmp_path_factory.mktemp("vllm") / "model"
        shared = SharedVLLM(folder, lambda version: make_lm("qwen2", seed=100 + version, **sizes), world)
        yield shared
        await shared.close()
        await shared.shelf.close()


@pytest.fixture
def vllm_kit(shared_vllm: SharedVLLM) -> VLLMKit:
    """The vLLM of the conformance suite, for tests of it alone. They need the marks of `REAL`."""
    return VLLMKit(shared_vllm)


KITS: dict[str, Callable[[MakeLM], EngineKit]] = {
    "torch-qwen2": lambda tiny_model: TorchKit(partial(tiny_model, "qwen2")),
    "torch-qwen3": lambda tiny_model: TorchKit(partial(tiny_model, "qwen3")),
    "torch-llama": lambda tiny_model: TorchKit(partial(tiny_model, "llama")),
    "pool-torch": lambda tiny_model: PoolKit(partial(tiny_model, "llama")),
    "torch-deterministic": lambda tiny_model: TorchKit(partial(tiny_model, "qwen2"), deterministic=True),
}


SIMULATED = {"simulated": SimulatedKit(), "simulated-batching": SimulatedKit(prefill_tokens=64)}


REAL_KITS: dict[str, Callable[[pytest.FixtureRequest], EngineKit]] = {
    "vllm": lambda request: VLLMKit(request.getfixturevalue("shared_vllm")),
    "openai": lambda request: LiveKit(request.getfixturevalue("live")),
}
FAKE = "openai-fake"
"""The engine over HTTP, its server a fake."""
REAL_PARAMS = [pytest.param(name, marks=REAL) for name in REAL_KITS]


def kit_of(request: pytest.FixtureRequest, tiny_model: MakeLM, fakes: Fakes) -> EngineKit:
    name = request.param
    if name == FAKE:
        return FakeKit(fakes)
    if name in REAL_KITS:
        return REAL_KITS[name](request)
    return SIMULATED[name] if name in SIMULATED else KITS[name](tiny_model)


@pytest.fixture(params=[*KITS, FAKE, *SIMULATED, *REAL_PARAMS])
def kit(request: pytest.FixtureRequest, tiny_model: MakeLM, fakes: Fakes) -> EngineKit:
    """Each engine in turn."""
    return kit_of(request, tiny_model, fakes)


@pytest.fixture(params=[*KITS, FAKE, *REAL_PARAMS])
def model_kit(request: pytest.FixtureRequest, tiny_model: MakeLM, fakes: Fakes) -> EngineKit:
    """Each engine with a model."""
    return kit_of(request, tiny_model, fakes)


def make_request(
    prompt: Sequence[int] = (1, 2, 3), *, seed: int = 0, sampling: SamplingParams | None = None, **params: object
) -> GenerateRequest:
    """A request with sampling parameters by keyword."""
    sampling = sampling or SamplingParams(**params)  # type: ignore[arg-type]
    return GenerateRequest(request_id=f"request-{seed}", prompt_ids=prompt, sampling=sampling, seed=seed)


RequestMaker = Callable[..., GenerateRequest]


@pytest.fixture
def request_of() -> RequestMaker:
    return make_request


@pytest.fixture
def tiny_model(make_lm: MakeLM) -> MakeLM:
    """tiny_model(kind, seed, **config): Qwen2 with tied weights, Qwen3 with wider heads, Llama."""
    special: dict[str, dict[str, object]] = {"qwen2": {"tie_word_embeddings": True}, "qwen3": {"head_dim": 16}, "llama": {}}
    return lambda kind, seed, **config: make_lm(kind, seed=seed, **{**SIZES, **special[kind], **config})


@pytest.fixture
def snapshot_of() -> Callable[[Mapping[str, torch.Tensor]], Snapshot]:
    return lambda tensors: Snapshot(tensors=tensors)


async def _generate_all(engine: RolloutEngine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(request)) for request in requests]
    return [task.result() for task in tasks]


@pytest.fixture
def generate_all() -> Callable[..., object]:
    """Run requests at once; results in their order."""
    return _generate_all
