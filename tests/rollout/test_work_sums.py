"""The sums that a fit of the engine's speed is made of."""

import asyncio
import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.ports import GenerateRequest, SamplingParams
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.rollout.work_sums import WorkSums


def test_sums_are_those_of_a_least_squares_fit() -> None:
    sums = WorkSums()
    for size, seconds in ((2, 0.5), (4, 0.75), (4, 0.25)):
        sums.add(size, seconds)
    assert sums.stats("decode", "steps", "rows") == {
        "decode_steps": 3,
        "decode_rows": 10,
        "decode_rows_sq": 36,
        "decode_s": 1.5,
        "decode_rows_s": 5.0,
    }


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )


async def generate(engine: TorchEngine, prompts: list[list[int]], max_tokens: list[int]) -> None:
    requests = [
        GenerateRequest(request_id=str(number), prompt_ids=prompt, sampling=SamplingParams(max_tokens=limit), seed=number)
        for number, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True))
    ]
    await engine.pause()
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await engine.resume()
    await asyncio.gather(*tasks)


async def test_engine_counts_rows_of_steps_and_tokens_that_a_prefill_computes() -> None:
    async with TorchEngine(make_model(), max_num_seqs=4, context_len=32) as engine:
        # Two equal prompts of 5, one of 3: one forward of two prompts, padded to 5. Rows: 3, 3, 2 (the third is done), 2.
        await generate(engine, [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [7, 8, 9]], [5, 5, 3])
        stats = engine.stats()
    assert (stats["prefill_calls"], stats["prefill_tokens"], stats["prefill_tokens_sq"]) == (1, 10, 100)
    assert (stats["decode_steps"], stats["decode_rows"], stats["decode_rows_sq"]) == (4, 10, 26)
    assert 0 < stats["decode_s"] < stats["decode_rows_s"]
    assert stats["prefill_tokens_s"] == pytest.approx(10 * stats["prefill_s"])


async def test_deterministic_steps_count_the_slots_they_compute() -> None:
    async with TorchEngine(make_model(), max_num_seqs=3, context_len=32, deterministic=True) as engine:
        await generate(engine, [[1, 2, 3]], [3])
        stats = engine.stats()
    assert (stats["decode_steps"], stats["decode_rows"]) == (2, 16)


async def test_sums_only_grow() -> None:
    async with TorchEngine(make_model(), max_num_seqs=2, context_len=32) as engine:
        seen = []
        for _ in range(3):
            seen.append(engine.stats())
            await generate(engine, [[1, 2], [3, 4, 5]], [4, 2])
        seen.append(engine.stats())
    names = [name for name in seen[0] if name.startswith(("decode_", "prefill_"))]
    assert len(names) == 10
    for before, after in itertools.pairwise(seen):
        assert all(before[name] < after[name] for name in names)
