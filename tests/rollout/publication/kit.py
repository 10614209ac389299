"""A real vLLM that takes one publication after another, and what it should say: started once, lent to every test."""

import gc
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from asyncrl.config.rollout import Transfer
from asyncrl.ports import GenerateRequest, Generation, SamplingParams, World
from asyncrl.rollout.publication import Publisher, Shelf
from asyncrl.rollout.vllm.client import Client
from asyncrl.rollout.vllm.engine import VLLMEngine
from asyncrl.rollout.vllm.launch import launch
from asyncrl.rollout.vllm.settings import VLLMSettings
from asyncrl.world import RealWorld

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 150
CONTEXT = 512
# Heads of 32 are the smallest that vLLM serves on a CPU; weights so large that a version leaves its mark on every log-prob.
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "initializer_range": 0.15}
TIED = {"kind": "qwen2", "tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1}
UNTIED = {"kind": "llama", "tie_word_embeddings": False, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights by name."""

    tensors: Mapping[str, torch.Tensor]


class Lent:
    """A Client that whoever closes it does not end."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def close(self) -> None:
        pass


@dataclass
class Vllm:
    """A vLLM that runs, the models of its versions, and engines over it, one at a time."""

    client: Client
    settings: VLLMSettings
    world: World
    shelf: Shelf
    build: "Callable[[int], PreTrainedModel]"
    models: "dict[int, PreTrainedModel]" = field(default_factory=dict)

    def engine(self, transfer: Transfer = "shm", shelf: Shelf | None = None) -> VLLMEngine:
        """An engine at version 0, of whatever weights it had before: publish first."""

        async def lend(settings: VLLMSettings, world: World) -> Client:
            return Lent(self.client)

        publisher = Publisher(transfer, self.settings.model, shelf or self.shelf)
        return VLLMEngine(self.settings, world=self.world, publisher=publisher, opener=lend)

    def model(self, version: int) -> "PreTrainedModel":
        return self.models.setdefault(version, self.build(version))

    def snapshot(self, version: int, dtype: torch.dtype = torch.float32) -> Snapshot:
        parameters = self.model(version).named_parameters()
        return Snapshot(tensors={name: tensor.detach().to(dtype, copy=True) for name, tensor in parameters})

    @torch.inference_mode()
    def log_probs(self, version: int, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """[len(ids) - 1, vocab]: of each next token, by a plain forward of the version's weights."""
        logits: torch.Tensor = self.model(version)(torch.tensor([ids])).logits[0, :-1]
        return torch.log_softmax(logits.double() / temperature, -1)

    def worst_error(self, prompt: Sequence[int], answer: Generation, temperature: float = 1.0) -> float:
        """Of the answer's log-probs, each against the model of its token's version."""
        worst = 0.0
        ids = [*prompt, *answer.token_ids]
        for span in answer.version_spans:
            log_probs = self.log_probs(span.version, ids, temperature)[len(prompt) - 1 :]
            for index in range(span.start, span.end):
                worst = max(worst, abs(float(log_probs[index, answer.token_ids[index]]) - answer.log_probs[index]))
        return worst

    def greedy(self, version: int, prompt: Sequence[int], num: int) -> list[int]:
        """What the version's model says, token by token."""
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(num):
                ids.append(int(self.model(version)(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]


def request(prompt: Sequence[int], num: int, *, temperature: float = 1.0, seed: int = 1) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num, temperature=temperature)
    return GenerateRequest(request_id=str(seed), prompt_ids=list(prompt), sampling=sampling, seed=seed)


@dataclass(frozen=True)
class Start:
    """Of one vLLM for the whole session."""

    make_lm: "Callable[..., PreTrainedModel]"
    folder: Path
    kind: Mapping[str, Any]
    tensor_parallel_size: int

    def build(self, version: int) -> "PreTrainedModel":
        return self.make_lm(**self.kind, **SIZES, seed=100 + version)

    @cached_property
    def settings(self) -> VLLMSettings:
        self.build(0).save_pretrained(self.folder)
        return VLLMSettings(
            model=str(self.folder),
            dtype="float32",
            max_num_seqs=64,
            context_len=CONTEXT,
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_memory_mib=64,
        )

    async def run(self) -> AsyncIterator[Vllm]:
        async with RealWorld() as world:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vLLM's own, at its import
                client = await launch(self.settings, world)
            vllm = Vllm(client=client, settings=self.settings, world=world, shelf=Shelf(world=world), build=self.build)
            yield vllm
            await vllm.shelf.close()
            await client.close()
            del vllm.client, client
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM leaves a context of its sockets to the collector
            gc.collect()
