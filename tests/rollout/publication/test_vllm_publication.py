"""After a publication a real vLLM says what the trainer's model says: every carrier, tied and untied heads, one and two workers."""

import asyncio
from dataclasses import replace

import pytest
import torch

from asyncrl.config.rollout import Transfer
from asyncrl.errors import EngineError
from asyncrl.rollout.publication import Shelf
from asyncrl.rollout.publication.placed import Placed, Tensors
from asyncrl.rollout.vllm.engine import VLLMEngine
from asyncrl.waiting import back_off
from tests.rollout.publication.kit import Snapshot, Vllm, request

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

TOLERANCE = 1e-4
PROMPT = list(range(5, 105))


@pytest.fixture(params=["tied", "untied"])
def vllm(request: pytest.FixtureRequest, tied: Vllm, untied: Vllm) -> Vllm:
    return tied if request.param == "tied" else untied


@pytest.mark.parametrize("transfer", ["shm", "directory"])
async def test_the_engine_says_what_the_model_says(vllm: Vllm, transfer: Transfer) -> None:
    async with vllm.engine(transfer) as engine:
        for version in (1, 2):
            await engine.publish(version, vllm.snapshot(version))
            greedy = await engine.generate(request(PROMPT, 24, temperature=0))
            assert greedy.token_ids == vllm.greedy(version, PROMPT, 24)
            assert greedy.token_versions() == [version] * 24
            assert vllm.worst_error(PROMPT, greedy) <= TOLERANCE
            sampled = await engine.generate(request(PROMPT[:30], 60, temperature=0.7))
            assert vllm.worst_error(PROMPT[:30], sampled, 0.7) <= TOLERANCE


async def test_the_prefix_cache_is_not_of_older_weights(vllm: Vllm) -> None:
    async with vllm.engine() as engine:
        for version in (1, 2, 3):
            await engine.publish(version, vllm.snapshot(version))
            first = await engine.generate(request(PROMPT, 8, temperature=0))
            cached = engine.stats()["cached_prompt_tokens"]
            again = await engine.generate(request(PROMPT, 8, temperature=0))
            assert engine.stats()["cached_prompt_tokens"] >= cached + 64  # it is on: the test would see nothing without it
            for answer in (first, again):
                assert answer.token_ids == vllm.greedy(version, PROMPT, 8)
                assert vllm.worst_error(PROMPT, answer) <= TOLERANCE


async def reach(engine: VLLMEngine, num_tokens: float) -> None:
    """No event tells of single steps."""
    async with asyncio.timeout(60):
        while engine.stats()["generated_tokens"] < num_tokens:
            await back_off(0.002)


async def test_a_long_request_lives_through_updates(vllm: Vllm) -> None:
    prompt = PROMPT[:20]
    async with vllm.engine() as engine:
        await engine.publish(1, vllm.snapshot(1))
        before = engine.stats()["generated_tokens"]
        task = asyncio.create_task(engine.generate(request(prompt, 120)))
        for version in (2, 3, 4):
            await reach(engine, before + 20 * (version - 1))
            await engine.publish(version, vllm.snapshot(version))
        answer = await task
    assert len(answer.token_ids) == 120
    assert [span.version for span in answer.version_spans] == [1, 2, 3, 4]
    assert vllm.worst_error(prompt, answer) <= TOLERANCE


async def test_many_publications_under_load_lose_no_request(tied: Vllm) -> None:
    prompts = [[3 + index, *PROMPT[: 5 + index]] for index in range(32)]
    async with tied.engine() as engine:
        await engine.publish(1, tied.snapshot(1))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(request(each, 200, seed=index))) for index, each in enumerate(prompts)]
            for version in range(2, 22):
                await engine.publish(version, tied.snapshot(version % 4))
                await asyncio.sleep(0.02)
    for prompt, task in zip(prompts, tasks, strict=True):
        answer = task.result()
        assert len(answer.token_ids) == 200
        assert answer.token_versions() == sorted(answer.token_versions())
        spans = [replace(span, version=span.version % 4) for span in answer.version_spans]
        assert tied.worst_error(prompt, replace(answer, version_spans=spans)) <= TOLERANCE


async def test_a_paused_engine_takes_weights_and_stays_paused(tied: Vllm) -> None:
    async with tied.engine() as engine:
        await engine.publish(1, tied.snapshot(1))
        await engine.pause()
        task = asyncio.create_task(engine.generate(request(PROMPT, 8, temperature=0)))
        await engine.publish(2, tied.snapshot(2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.3)
        await engine.resume()
        assert (await task).token_ids == tied.greedy(2, PROMPT, 8)


async def test_weights_of_another_dtype_are_cast(tied: Vllm) -> None:
    rounded = tied.models[900] = tied.build(5)
    for parameter in rounded.parameters():  # but no buffer: those of rotary embeddings are not published
        parameter.data = parameter.data.bfloat16().float()
    async with tied.engine() as engine:
        await engine.publish(900, tied.snapshot(900, torch.bfloat16))
        answer = await engine.generate(request(PROMPT, 50))
    assert tied.worst_error(PROMPT, answer) <= TOLERANCE


async def test_what_does_not_fit_changes_nothing(untied: Vllm) -> None:
    async with untied.engine() as engine:
        await engine.publish(1, untied.snapshot(1))
        other = dict(untied.snapshot(2).tensors)
        del other["lm_head.weight"]
        with pytest.raises(EngineError, match=r"lacks parameters of the engine's model: 'lm_head\.weight'"):
            await engine.publish(2, Snapshot(tensors=other))
        assert (engine.version, engine.failure) == (1, None)
        answer = await engine.generate(request(PROMPT, 8, temperature=0))
    assert answer.token_ids == untied.greedy(1, PROMPT, 8)


class Elsewhere(Shelf):
    """Its memory is not where it says."""

    async def place(self, tensors: Tensors) -> Placed:
        placed = await super().place(tensors)
        return Placed(where=replace(placed.where, mark="00" * 16))


async def test_a_publication_that_fails_is_the_engines_death(tied: Vllm) -> None:
    shelf = Elsewhere(world=tied.world)
    async with tied.engine(shelf=shelf) as engine:
        task = asyncio.create_task(engine.generate(request(PROMPT, 400)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match=r"version 1 failed, .* not whole: .*is not the memory that was spoken of"):
            await engine.publish(1, tied.snapshot(1))
        with pytest.raises(EngineError, match="publication of version 1 failed"):
            await task
        with pytest.raises(EngineError, match="publication of version 1 failed"):
            await engine.generate(request(PROMPT, 1))
        assert "version 1 failed" in str(engine.failure)
    # No run would go on with this vLLM, but the other tests do: one worker alone is whole again after the next publication.
    await tied.client.control.resume()
    async with tied.engine() as engine:
        await engine.publish(1, tied.snapshot(1))
        assert (await engine.generate(request(PROMPT, 8, temperature=0))).token_ids == tied.greedy(1, PROMPT, 8)
