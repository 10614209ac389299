"""The engine against vLLM's server, beyond what all engines keep: hundreds of requests, publications among them, OpenAI's route."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from asyncrl.ports import GenerateRequest, Generation, RolloutEngine
from asyncrl.rollout.openai.errors import ServerMisfitError
from asyncrl.rollout.openai.routes import COMPLETIONS
from asyncrl.rollout.publication.publisher import Publisher
from tests.rollout.openai.kits import LIVE_VOCAB, LiveServer, spell

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

RequestMaker = Callable[..., GenerateRequest]
GenerateAll = Callable[[RolloutEngine, Sequence[GenerateRequest]], Awaitable[list[Generation]]]


def worst_difference(live: LiveServer, request: GenerateRequest, generation: Generation) -> float:
    """Of log-probs, each against a plain forward with the weights of its token's version."""
    ids, start = [*request.prompt_ids, *generation.token_ids], len(request.prompt_ids) - 1
    worst = 0.0
    for span in generation.version_spans:
        rows = live.log_probs(span.version, ids, request.sampling.temperature)[start:]
        for place in range(span.start, span.end):
            worst = max(worst, abs(float(rows[place, generation.token_ids[place]]) - generation.log_probs[place]))
    return worst


def varied(request_of: RequestMaker, number: int) -> list[GenerateRequest]:
    """Prompts of one to forty tokens, three temperatures."""
    return [
        request_of(
            [(seed * 7 + place * 3) % LIVE_VOCAB for place in range(1 + seed % 40)],
            seed=seed,
            max_tokens=1 + seed % 50,
            temperature=(0.7, 1.0, 1.3)[seed % 3],
        )
        for seed in range(number)
    ]


async def test_five_hundred_requests_at_once(live: LiveServer, request_of: RequestMaker, generate_all: GenerateAll) -> None:
    requests = varied(request_of, 500)
    async with live.engine(max_num_seqs=500) as engine:
        generations = await generate_all(engine, requests)
        stats = engine.stats()
    assert [len(each.token_ids) for each in generations] == [each.sampling.max_tokens for each in requests]
    assert (stats["free_slots"], stats["lost"]) == (500, 0)
    assert max(map(worst_difference, [live] * 100, requests, generations)) <= 1e-4


async def test_publications_under_load_lose_no_request(
    live: LiveServer, request_of: RequestMaker, generate_all: GenerateAll
) -> None:
    requests = [request_of([seed + 1, 5], seed=seed, max_tokens=900) for seed in range(24)]
    snapshots = [live.snapshot(number) for number in range(4)]
    async with live.engine(max_num_seqs=25, context_len=1024) as engine:
        answers = asyncio.ensure_future(generate_all(engine, requests))
        for version in range(1, 9):
            await engine.generate(request_of([version], seed=version, max_tokens=5))
            await engine.publish(version, snapshots[version % 4])
        generations = await answers
    assert [len(each.token_ids) for each in generations] == [900] * 24
    for request, generation in zip(requests[:8], generations, strict=False):
        assert len(generation.version_spans) >= 2
        by_weights = [replace(span, version=span.version % 4) for span in generation.version_spans]
        assert worst_difference(live, request, replace(generation, version_spans=by_weights)) <= 1e-4


async def test_openai_s_route_samples_the_same_and_is_drained_for_new_weights(
    live: LiveServer, request_of: RequestMaker, generate_all: GenerateAll
) -> None:
    requests = varied(request_of, 40)
    async with live.engine(context_len=600) as engine:
        expected = await generate_all(engine, requests)
        engine._server = replace(engine._server, route=COMPLETIONS, tells_versions=False)
        generations = await generate_all(engine, requests)
        assert max(map(worst_difference, [live] * 40, requests, generations)) <= 1e-4
        assert [each.token_ids for each in generations] == [each.token_ids for each in expected]
        old = asyncio.create_task(engine.generate(request_of([1, 2], max_tokens=300)))
        await engine.generate(request_of([1, 2], max_tokens=3))
        await engine.publish(1, live.snapshot(1))
        assert old.done()
        new = await engine.generate(request_of([1, 2], max_tokens=30))
        assert worst_difference(live, request_of([1, 2]), new) <= 1e-4
        assert ({*old.result().token_versions()}, {*new.token_versions()}) == ({0}, {1})
        stop = spell(old.result().token_ids[9:12])
        cut = await engine.generate(request_of([3, 4], max_tokens=500, stop_strings=(stop, spell(new.token_ids[2:3]))))
        assert len(cut.token_ids) < 500


async def test_weights_by_a_directory(live: LiveServer, request_of: RequestMaker) -> None:
    async with live.engine() as engine:
        engine._publisher = publisher = Publisher("directory", live.folder, live.shelf)
        await publisher.open(engine._control, 0)
        await engine.publish(1, live.snapshot(1))
        generation = await engine.generate(request_of([1, 2], max_tokens=30))
        assert set(generation.token_versions()) == {1}
        assert worst_difference(live, request_of([1, 2]), generation) <= 1e-4
        await publisher.close()


async def test_a_server_left_in_the_middle_of_new_weights_serves_again(live: LiveServer, request_of: RequestMaker) -> None:
    async with live.engine() as engine:
        await engine._control.pause()
        await engine._control.start_weight_update()
    async with live.engine() as engine:
        await engine.publish(1, live.snapshot(1))
        generation = await engine.generate(request_of([1, 2], max_tokens=30))
        assert worst_difference(live, request_of([1, 2]), generation) <= 1e-4
        await engine.publish(2, live.snapshot(0))


async def test_a_model_of_another_size_is_refused(live: LiveServer) -> None:
    with pytest.raises(ServerMisfitError, match=f"model has {LIVE_VOCAB} token ids, and the run's {LIVE_VOCAB + 1}"):
        await live.engine(vocab_size=LIVE_VOCAB + 1).__aenter__()
    with pytest.raises(ServerMisfitError, match="context is of 1024 tokens, and the run's of 2048"):
        await live.engine(context_len=2048).__aenter__()
    async with live.engine() as engine:
        assert engine.failure is None
