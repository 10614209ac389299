"""Publication of the quick start's model to a vLLM that has requests in flight: how long it takes, and what it does to them.

    .venv-vllm/bin/python benchmarks/publication.py [--transfer shm directory] [--publications 20] [--rows 32] [--json]

`rows` requests of 100-200 new tokens are in flight all the time, a new one for each that ends. Each version has other random
weights, so large that they leave a mark on every log-prob. A greedy request follows each publication.

    ms       from the call of `engine.publish` to its return, the copy into shared memory (or the file) included
    parts    of that, each command to vLLM; vLLM's own pause sleeps 20 ms, and waits for the step in flight
    lost     requests that failed, or came back short
    wrong    tokens whose log-prob is not that of a forward by the Hugging Face model of their version (> 1e-4), and greedy
             tokens that are not that model's first choice

The goal: 150 ms, none lost, none wrong. Exit code 1 when one is lost or wrong. JSON: {transfer: {median_ms, worst_ms, lost,
wrong, requests, tokens, parts: {command: median ms}}}.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from asyncrl.config.rollout import Transfer
from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation, SamplingParams, World
from asyncrl.rollout.publication import Publisher, Shelf
from asyncrl.training.publication import Snapshot
from asyncrl.world import RealWorld

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from asyncrl.rollout.vllm.client import Client
    from asyncrl.rollout.vllm.engine import VLLMEngine
    from asyncrl.rollout.vllm.settings import VLLMSettings

TOLERANCE = 1e-4
CONTEXT, GREEDY_TOKENS, PAUSE_S = 512, 16, 0.1
START_S = 400.0
"""A deadline, for a machine with much else to do."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and its answer."""

    request: GenerateRequest
    answer: Generation


@dataclass(slots=True)
class Tally:
    """What one transfer has shown."""

    publish_ms: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    asked: list[Asked] = field(default_factory=list)
    num_lost: int = 0


class Timed:
    """A Control whose commands are timed."""

    def __init__(self, control: Any, parts: dict[str, list[float]]) -> None:
        self._control = control
        self._parts = parts

    def __getattr__(self, name: str) -> Callable[..., Any]:
        command = getattr(self._control, name)

        async def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return await command(*args, **kwargs)
            finally:
                told = args[0] if name == "collective_rpc" else name
                self._parts[told].append((time.perf_counter() - start) * 1e3)

        return timed


def make_model(folder: Path) -> "Callable[[int], PreTrainedModel]":
    """The quick start's model in `folder`, and a function version -> model."""
    from asyncrl.examples.calculator import demonstrations
    from asyncrl.examples.demonstrator import MECHANICS
    from asyncrl.examples.tiny_model import build_model, save_model, train_tokenizer
    from asyncrl.tools import load_tools

    schemas = [tool.schema for tool in load_tools(["calculator"]).values()]
    tokenizer = train_tokenizer(demonstrations(MECHANICS, 300, seed=1, name="mechanics"), schemas)
    save_model(build_model(tokenizer, seed=0), tokenizer, folder)

    def build(version: int) -> "PreTrainedModel":
        model = build_model(tokenizer, seed=version)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(7)
        return model

    return build


class Bench:
    """One engine, its load, and the models of its versions."""

    def __init__(self, engine: "VLLMEngine", build: "Callable[[int], PreTrainedModel]", tally: Tally, vocab_size: int) -> None:
        self._engine = engine
        self._tally = tally
        self._models = [build(0)]
        self._build = build
        self._vocab_size = vocab_size
        self._random = random.Random(1)
        self._is_over = False

    async def run(self, publications: int, rows: int) -> None:
        await self._publish(0)  # the file's weights are not those of version 0
        await self._ask(GREEDY_TOKENS, temperature=0.0)  # a fresh vLLM's first steps take a second
        self._tally.publish_ms.clear()
        self._tally.parts.clear()
        async with asyncio.TaskGroup() as group:
            for _ in range(rows):
                group.create_task(self._keep_asking())
            await asyncio.sleep(1.0)
            for version in range(1, publications + 1):
                self._models.append(self._build(version))
                await asyncio.sleep(PAUSE_S)
                await self._publish(version)
                await self._ask(GREEDY_TOKENS, temperature=0.0)
            self._is_over = True

    async def _publish(self, version: int) -> None:
        tensors = {name: tensor.detach().clone() for name, tensor in self._models[version].named_parameters()}
        start = time.perf_counter()
        await self._engine.publish(version, Snapshot(version=version, tensors=tensors))
        self._tally.publish_ms.append((time.perf_counter() - start) * 1e3)

    async def _keep_asking(self) -> None:
        while not self._is_over:
            await self._ask(self._random.randint(100, 200), temperature=1.0)

    async def _ask(self, num_tokens: int, *, temperature: float) -> None:
        seed = self._random.getrandbits(32)
        prompt = [self._random.randrange(self._vocab_size) for _ in range(self._random.randint(20, 60))]
        sampling = SamplingParams(max_tokens=num_tokens, temperature=temperature)
        request = GenerateRequest(request_id=str(seed), prompt_ids=prompt, sampling=sampling, seed=seed)
        try:
            answer = await self._engine.generate(request)
        except EngineError as error:
            print(f"a request was lost: {error}")
            self._tally.num_lost += 1
            return
        self._tally.num_lost += len(answer.token_ids) != num_tokens
        self._tally.asked.append(Asked(request, answer))

    def num_wrong(self) -> int:
        """Tokens that no forward of their version's model gives."""
        return sum(self._num_wrong(asked) for asked in self._tally.asked)

    @torch.inference_mode()
    def _num_wrong(self, asked: Asked) -> int:
        prompt, answer = list(asked.request.prompt_ids), asked.answer
        ids, wrong = torch.tensor([[*prompt, *answer.token_ids]]), 0
        for span in answer.version_spans:
            logits = self._models[span.version](ids).logits[0, len(prompt) - 1 + span.start : len(prompt) - 1 + span.end]
            log_probs = torch.log_softmax(logits.double(), -1)
            tokens = torch.tensor(answer.token_ids[span.start : span.end])
            found = log_probs.gather(1, tokens[:, None])[:, 0]
            is_wrong = (found - torch.tensor(answer.log_probs[span.start : span.end])).abs() > TOLERANCE
            if asked.request.sampling.temperature == 0:
                is_wrong |= log_probs.amax(-1) - found > TOLERANCE
            wrong += int(is_wrong.sum())
        return wrong


async def measure(transfer: Transfer, publications: int, rows: int) -> dict[str, Any]:
    """Start a vLLM, publish, and look at every token that was sampled meanwhile."""
    from asyncrl.rollout.vllm.engine import VLLMEngine
    from asyncrl.rollout.vllm.launch import launch
    from asyncrl.rollout.vllm.settings import VLLMSettings

    tally = Tally()

    async def timed_launch(settings: "VLLMSettings", world: World) -> "Client":
        client: Any = await launch(settings, world)
        client.control = Timed(client.control, tally.parts)
        return client  # type: ignore[no-any-return]

    with tempfile.TemporaryDirectory() as folder:
        build = make_model(Path(folder))
        vocab_size = build(0).config.vocab_size
        settings = VLLMSettings(model=folder, dtype="float32", max_num_seqs=64, context_len=CONTEXT)
        async with RealWorld() as world:
            shelf = Shelf(world=world)
            engine = VLLMEngine(settings, world=world, publisher=Publisher(transfer, folder, shelf), opener=timed_launch)
            await asyncio.wait_for(engine.__aenter__(), START_S)
            try:
                bench = Bench(engine, build, tally, vocab_size)
                await bench.run(publications, rows)
            finally:
                await engine.__aexit__(None, None, None)
                await shelf.close()
    return summary(tally, bench.num_wrong())


def summary(tally: Tally, num_wrong: int) -> dict[str, Any]:
    return {
        "median_ms": round(statistics.median(tally.publish_ms), 1),
        "worst_ms": round(max(tally.publish_ms), 1),
        "lost": tally.num_lost,
        "wrong": num_wrong,
        "requests": len(tally.asked),
        "tokens": sum(len(asked.answer.token_ids) for asked in tally.asked),
        "parts": {name: round(statistics.median(values), 1) for name, values in tally.parts.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfer", nargs="+", choices=["shm", "directory"], default=["shm"])
    parser.add_argument("--publications", type=int, default=20)
    parser.add_argument("--rows", type=int, default=32, help="requests in flight")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    for transfer in args.transfer:
        results[transfer] = result = asyncio.run(measure(transfer, args.publications, args.rows))
        print(
            f"{transfer}: publication {result['median_ms']} ms (worst {result['worst_ms']}), {result['requests']} requests", end=""
        )
        print(f" of {result['tokens']} tokens, {result['lost']} lost, {result['wrong']} tokens wrong")
        print("    " + ", ".join(f"{name} {value}" for name, value in result["parts"].items()))
    if args.json:
        print(json.dumps(results))
    return int(any(result["lost"] or result["wrong"] for result in results.values()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
