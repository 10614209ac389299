"""Tokens per process CPU second of the embedded engine against Hugging Face `generate`, alternating in one process.

The model, prompts and lengths are those of `benchmarks/grpo_step.py`: Qwen2 of 4 layers, hidden 256, vocabulary 4096, tied; 64 rows
(8 prompts x 8 samples) of about 29 prompt tokens, 128 new tokens each, fp32, temperature 1.

    python benchmarks/generate.py [--threads 1] [--repeats 5] [--distinct] [--json]
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.ports import GenerateRequest, SamplingParams
from asyncrl.rollout.torch_engine import TorchEngine

NUM_PROMPTS, NUM_SAMPLES, MAX_NEW = 8, 8, 128


def make_model() -> PreTrainedModel:
    """The benchmark model with random weights; the same ones at every call."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


def make_prompts(*, distinct: bool = False) -> list[list[int]]:
    """64 prompts of 27-31 random ids; groups of 8 equal ones unless `distinct`."""
    rng = random.Random(1)
    num = NUM_PROMPTS * NUM_SAMPLES if distinct else NUM_PROMPTS
    prompts = [[rng.randrange(3, 4096) for _ in range(rng.randint(27, 31))] for _ in range(num)]
    return [prompt for prompt in prompts for _ in range(NUM_PROMPTS * NUM_SAMPLES // num)]


async def run_engine(engine: TorchEngine, prompts: list[list[int]], *, seed: int) -> int:
    """Generate for all prompts at once. Returns the number of new tokens."""
    sampling = SamplingParams(max_tokens=MAX_NEW)
    requests = [
        GenerateRequest(request_id=str(index), prompt_ids=prompt, sampling=sampling, seed=seed * 1000 + index)
        for index, prompt in enumerate(prompts)
    ]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(request)) for request in requests]
    return sum(len(task.result().token_ids) for task in tasks)


def run_hf(model: PreTrainedModel, prompts: list[list[int]]) -> int:
    """The same with `generate`, left-padded, sampling without filters. Returns the number of new tokens."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW, pad_token_id=0, eos_token_id=None
    )
    with torch.inference_mode():
        out = cast("Any", model).generate(ids, attention_mask=mask, generation_config=config)
    return int(out.shape[0] * (out.shape[1] - longest))


def tokens_per_cpu_s(run: Callable[[], int]) -> float:
    """Rate of one run by process CPU time, all threads together."""
    start = time.process_time()
    return run() / (time.process_time() - start)


def measure(*, threads: int = 1, repeats: int = 5, distinct: bool = False) -> dict[str, float]:
    """Medians over `repeats` rounds of engine, `generate`, deterministic engine; one round before them is not counted."""
    torch.set_num_threads(threads)
    prompts = make_prompts(distinct=distinct)
    rates: dict[str, list[float]] = {"generate": [], "hf": [], "deterministic": []}
    asyncio.run(_rounds(rates, prompts, repeats + 1))
    medians = {name: statistics.median(values[1:]) for name, values in rates.items()}
    return {
        "generate_tokens_per_cpu_s": round(medians["generate"], 1),
        "hf_tokens_per_cpu_s": round(medians["hf"], 1),
        "ratio": round(statistics.median(a / b for a, b in zip(rates["generate"][1:], rates["hf"][1:], strict=True)), 3),
        "deterministic_tokens_per_cpu_s": round(medians["deterministic"], 1),
    }


async def _rounds(rates: dict[str, list[float]], prompts: list[list[int]], num_rounds: int) -> None:
    hf, context_len = make_model(), max(map(len, prompts)) + MAX_NEW
    rows = len(prompts)
    async with (
        TorchEngine(make_model(), max_num_seqs=rows, context_len=context_len) as engine,
        TorchEngine(make_model(), max_num_seqs=rows, context_len=context_len, deterministic=True) as deterministic,
    ):
        for number in range(num_rounds):
            for name, each in (("generate", engine), ("deterministic", deterministic)):
                start = time.process_time()
                tokens = await run_engine(each, prompts, seed=number)
                rates[name].append(tokens / (time.process_time() - start))
            rates["hf"].append(tokens_per_cpu_s(lambda: run_hf(hf, prompts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--distinct", action="store_true", help="64 different prompts instead of 8 groups of 8")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    result = measure(threads=args.threads, repeats=args.repeats, distinct=args.distinct)
    for name, value in result.items():
        print(f"{name:34s} {value:10.3f}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
