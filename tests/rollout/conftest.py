"""Tiny random models, and one kit an engine: what the conformance suite needs to know of an engine to test it.

An engine joins the suite by a kit of its own in `KITS`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.config.simulation import Scenario
from asyncrl.ports import Decode, GenerateRequest, Generation, RolloutEngine, SamplingParams, WeightSnapshot
from asyncrl.rollout.pool import EnginePool, PoolLimits
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.simulation.edges.engine import SimEngines
from asyncrl.simulation.edges.template import VOCABULARY
from asyncrl.simulation.seams import Seams
from asyncrl.world import RealWorld

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

    def kill(self, engine: RolloutEngine) -> None:
        """Make the engine die of an internal error."""
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

    def kill(self, engine: RolloutEngine) -> None:
        def die() -> None:
            raise RuntimeError("out of luck")

        assert isinstance(engine, TorchEngine)
        engine._commands.put(die)


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

    def kill(self, engine: RolloutEngine) -> None:
        assert isinstance(engine, EnginePool)
        for life in engine._lives():
            super().kill(life.engine)


class SimulatedKit:
    """The simulated engines, on the real clock: what they say goes on until something ends it."""

    vocab_size = VOCABULARY
    has_model = False

    def __init__(self, prefill_tokens: int = 0) -> None:
        self._prefill_tokens = prefill_tokens

    def make(
        self, *, max_num_seqs: int = 8, context_len: int = 128, version: int = 0, decode: Decode | None = spell
    ) -> RolloutEngine:
        times = {"decode_step_s": 2e-4, "decode_row_s": 0.0, "prefill_call_s": 0.0, "prefill_token_s": 0.0}
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

    def kill(self, engine: RolloutEngine) -> None:
        raise NotImplementedError


KITS: dict[str, Callable[[MakeLM], EngineKit]] = {
    "torch-qwen2": lambda tiny_model: TorchKit(partial(tiny_model, "qwen2")),
    "torch-qwen3": lambda tiny_model: TorchKit(partial(tiny_model, "qwen3")),
    "torch-llama": lambda tiny_model: TorchKit(partial(tiny_model, "llama")),
    "pool-torch": lambda tiny_model: PoolKit(partial(tiny_model, "llama")),
    "torch-deterministic": lambda tiny_model: TorchKit(partial(tiny_model, "qwen2"), deterministic=True),
}


SIMULATED = {"simulated": SimulatedKit(), "simulated-batching": SimulatedKit(prefill_tokens=64)}


@pytest.fixture(params=[*KITS, *SIMULATED])
def kit(request: pytest.FixtureRequest, tiny_model: MakeLM) -> EngineKit:
    """Each engine in turn."""
    return SIMULATED[request.param] if request.param in SIMULATED else KITS[request.param](tiny_model)


@pytest.fixture(params=KITS)
def model_kit(request: pytest.FixtureRequest, tiny_model: MakeLM) -> EngineKit:
    """Each engine with a model."""
    return KITS[request.param](tiny_model)


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
