"""The deterministic setting: a session's tokens, and the bits of its log-probs, are its own."""

import asyncio
import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from asyncrl.ports import GenerateRequest, Generation
from asyncrl.rollout.torch_engine import TorchEngine

MakeRequest = Callable[..., GenerateRequest]
TinyModel = Callable[..., PreTrainedModel]


def sessions(request_of: MakeRequest) -> list[GenerateRequest]:
    rng = random.Random(3)
    return [
        request_of(
            [rng.randrange(150) for _ in range(rng.randint(1, 70))],
            seed=seed,
            max_tokens=rng.randint(2, 50),
            temperature=rng.choice([0.7, 1.0, 1.3]),
        )
        for seed in range(20)
    ]


async def run(model: PreTrainedModel, requests: list[GenerateRequest], *, slots: int, order: int) -> list[Generation]:
    """Results in the order of `requests`, which arrive in another one and in two waves."""
    arrival = list(range(len(requests)))
    random.Random(order).shuffle(arrival)
    async with TorchEngine(model, max_num_seqs=slots, context_len=128, deterministic=True) as engine, asyncio.TaskGroup() as group:
        first = {index: group.create_task(engine.generate(requests[index])) for index in arrival[:12]}
        await first[arrival[0]]
        tasks = first | {index: group.create_task(engine.generate(requests[index])) for index in arrival[12:]}
    return [tasks[index].result() for index in range(len(requests))]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
async def test_arrival_order_and_slot_count_change_no_bit(kind: str, request_of: MakeRequest, tiny_model: TinyModel) -> None:
    requests = sessions(request_of)
    expected = await run(tiny_model(kind, 1), requests, slots=8, order=0)
    for slots, order in [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (1, 0)]:
        assert await run(tiny_model(kind, 1), requests, slots=slots, order=order) == expected
