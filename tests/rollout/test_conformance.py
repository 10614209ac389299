"""What every rollout engine keeps. Each test runs once an engine kit (see conftest); `model_kit`: those with a model."""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from asyncrl.errors import EngineError, PromptTooLongError
from asyncrl.ports import GenerateRequest, Generation, RolloutEngine, StopReason

GenerateAll = Callable[[RolloutEngine, Sequence[GenerateRequest]], Awaitable[list[Generation]]]
MakeRequest = Callable[..., GenerateRequest]
Kit = Any  # conftest.EngineKit: test folders are no packages, so its type cannot be imported here


def random_prompts(kit: Kit, number: int, longest: int = 20) -> list[list[int]]:
    rng = random.Random(number)
    return [[rng.randrange(kit.vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(number)]


def check_accounts(generation: Generation) -> None:
    """One log-prob and one version a token, and spans that cover all tokens in order."""
    num = len(generation.token_ids)
    assert len(generation.log_probs) == len(generation.token_versions()) == num
    edges = [0] + [span.end for span in generation.version_spans]
    assert [span.start for span in generation.version_spans] == edges[:-1]
    assert edges[-1] == num
    assert all(value <= 0 and value > -1e30 for value in generation.log_probs)


def worst_difference(kit: Kit, request: GenerateRequest, generation: Generation) -> float:
    """Largest distance between the engine's log-probs and those of plain forwards with the weights of each token's version; of an
    engine without a model, nothing."""
    if not kit.has_model:
        return 0.0
    ids = [*request.prompt_ids, *generation.token_ids]
    start = len(request.prompt_ids) - 1
    by_version = {
        version: kit.log_probs(version, ids, request.sampling.temperature) for version in set(generation.token_versions())
    }
    return max(
        abs(float(by_version[version][start + place, token]) - log_prob)
        for place, (token, log_prob, version) in enumerate(
            zip(generation.token_ids, generation.log_probs, generation.token_versions(), strict=True)
        )
    )


async def test_every_token_is_accounted_for(kit: Kit, request_of: MakeRequest, generate_all: GenerateAll) -> None:
    requests = [request_of(prompt, seed=index, max_tokens=1 + index) for index, prompt in enumerate(random_prompts(kit, 30))]
    async with kit.make(max_num_seqs=7) as engine:
        generations = await generate_all(engine, requests)
        stats = engine.stats()
    for request, generation in zip(requests, generations, strict=True):
        check_accounts(generation)
        assert len(generation.token_ids) == request.sampling.max_tokens
        assert generation.stop_reason is StopReason.LENGTH
    assert stats["generated_tokens"] == sum(len(generation.token_ids) for generation in generations)
    assert (stats["running"], stats["waiting"], stats["free_slots"], stats["discarded"]) == (0, 0, 7, 0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
async def test_log_probs_agree_with_a_plain_forward(
    model_kit: Kit, request_of: MakeRequest, generate_all: GenerateAll, temperature: float
) -> None:
    requests = [
        request_of(prompt, seed=index, max_tokens=20 + index, temperature=temperature)
        for index, prompt in enumerate(random_prompts(model_kit, 16, longest=40))
    ]
    async with model_kit.make(max_num_seqs=5) as engine:
        generations = await generate_all(engine, requests)
    assert max(map(worst_difference, [model_kit] * 16, requests, generations)) <= 1e-4


async def test_temperature_zero_takes_the_likeliest_token(model_kit: Kit, request_of: MakeRequest) -> None:
    request = request_of([5, 6, 7], max_tokens=25, temperature=0.0, top_k=2, top_p=0.5)
    async with model_kit.make() as engine:
        generation = await engine.generate(request)
    ids = [5, 6, 7, *generation.token_ids]
    expected = model_kit.log_probs(0, ids, 1.0)[2:]
    assert expected.argmax(-1).tolist() == generation.token_ids
    assert expected.amax(-1).tolist() == pytest.approx(generation.log_probs, abs=1e-4)


async def test_filters_keep_log_probs_finite_and_renormalised(
    model_kit: Kit, request_of: MakeRequest, generate_all: GenerateAll
) -> None:
    requests = [
        request_of(prompt, seed=index, max_tokens=30, top_k=top_k, top_p=top_p, temperature=1.2)
        for prompt in random_prompts(model_kit, 4)
        for index, (top_k, top_p) in enumerate([(5, 1.0), (0, 0.6), (20, 0.8), (1, 1.0), (0, 1e-6), (0, 1.0)])
    ]
    async with model_kit.make() as engine:
        generations = await generate_all(engine, requests)
    for request, generation in zip(requests, generations, strict=True):
        check_accounts(generation)
        check_filtered(model_kit, request, generation)


def check_filtered(kit: Kit, request: GenerateRequest, generation: Generation) -> None:
    """Each token is among those that pass the filters, and its log-prob is that of the renormalised rest."""
    ids = [*request.prompt_ids, *generation.token_ids]
    rows = kit.log_probs(0, ids, request.sampling.temperature)[len(request.prompt_ids) - 1 :]
    for row, token, log_prob in zip(rows, generation.token_ids, generation.log_probs, strict=True):
        likeliest = row.sort(descending=True)
        probs = likeliest.values[: request.sampling.top_k or None].exp()
        probs = probs / probs.sum()
        kept = int((probs.cumsum(-1) - probs < request.sampling.top_p).sum()) or 1
        assert token in likeliest.indices[:kept].tolist()
        mass = row[likeliest.indices[:kept]].exp().sum()
        assert log_prob == pytest.approx(float(row[token] - mass.log()), abs=1e-4)


async def test_same_seed_repeats_and_another_differs(kit: Kit, request_of: MakeRequest) -> None:
    async with kit.make() as engine:
        first, again, other = [
            (await engine.generate(request_of([9, 8], seed=seed, max_tokens=30))).token_ids for seed in (4, 4, 5)
        ]
    assert first == again != other


async def test_stop_token_ends_the_answer_and_belongs_to_it(kit: Kit, request_of: MakeRequest) -> None:
    async with kit.make() as engine:
        whole = (await engine.generate(request_of(seed=1, max_tokens=30))).token_ids
        stop = whole[12]
        generation = await engine.generate(request_of(seed=1, max_tokens=30, stop_token_ids=(stop,)))
    assert generation.stop_reason is StopReason.STOP
    assert generation.token_ids == whole[: whole.index(stop) + 1]
    check_accounts(generation)


async def test_stop_string_ends_with_the_token_that_completes_it(model_kit: Kit, request_of: MakeRequest) -> None:
    def spell(ids: list[int]) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)

    async with model_kit.make(decode=spell) as engine:
        whole = (await engine.generate(request_of(seed=2, max_tokens=30))).token_ids
        stops = (spell(whole[10:13]), "never")
        generation = await engine.generate(request_of(seed=2, max_tokens=30, stop_strings=stops))
    assert generation.stop_reason is StopReason.STOP
    assert generation.token_ids == whole[:13]


async def test_stop_on_the_last_token_of_the_budget_is_a_stop(kit: Kit, request_of: MakeRequest) -> None:
    async with kit.make() as engine:
        whole = (await engine.generate(request_of(seed=3, max_tokens=4))).token_ids
        generation = await engine.generate(request_of(seed=3, max_tokens=whole.index(whole[3]) + 1, stop_token_ids=(whole[3],)))
    assert generation.stop_reason is StopReason.STOP


async def test_context_limit(kit: Kit, request_of: MakeRequest) -> None:
    async with kit.make(context_len=40) as engine:
        one = await engine.generate(request_of([1] * 39, max_tokens=10))
        ten = await engine.generate(request_of([1] * 30, max_tokens=10))
        cut = await engine.generate(request_of([1] * 31, max_tokens=10))
        with pytest.raises(PromptTooLongError, match="40 prompt tokens"):
            await engine.generate(request_of([1] * 40, max_tokens=10))
    assert [len(each.token_ids) for each in (one, ten, cut)] == [1, 10, 9]
    assert [each.stop_reason for each in (one, ten, cut)] == [StopReason.CONTEXT, StopReason.LENGTH, StopReason.CONTEXT]


async def test_empty_generation(kit: Kit, request_of: MakeRequest) -> None:
    async with kit.make() as engine:
        empty = await engine.generate(request_of(max_tokens=0))
        shortest = await engine.generate(request_of(max_tokens=9, stop_token_ids=tuple(range(kit.vocab_size))))
    assert (empty.token_ids, empty.version_spans, empty.stop_reason) == ([], [], StopReason.LENGTH)
    check_accounts(empty)
    assert (len(shortest.token_ids), shortest.stop_reason) == (1, StopReason.STOP)


async def test_two_hundred_requests_at_once(kit: Kit, request_of: MakeRequest, generate_all: GenerateAll) -> None:
    requests = [request_of(prompt, seed=index, max_tokens=1 + index % 9) for index, prompt in enumerate(random_prompts(kit, 200))]
    async with kit.make(max_num_seqs=16) as engine:
        generations = await generate_all(engine, requests)
        assert engine.stats()["free_slots"] == 16
    assert [len(each.token_ids) for each in generations] == [each.sampling.max_tokens for each in requests]
    assert max(map(worst_difference, [kit] * 200, requests, generations)) <= 1e-4


@pytest.mark.parametrize(
    "broken",
    [
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [10**6]},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"max_tokens": -1},
        {"stop_strings": ("",)},
    ],
)
async def test_request_that_makes_no_sense_harms_nobody_else(kit: Kit, request_of: MakeRequest, broken: dict[str, Any]) -> None:
    async with kit.make() as engine:
        with pytest.raises(EngineError, match="request-0"):
            await engine.generate(request_of(**broken))
        assert len((await engine.generate(request_of(max_tokens=3))).token_ids) == 3


async def test_stop_strings_without_decode_are_refused(kit: Kit, request_of: MakeRequest) -> None:
    async with kit.make(decode=None) as engine:
        with pytest.raises(EngineError, match="decode"):
            await engine.generate(request_of(stop_strings=("x",)))


async def test_cancellation_leaves_no_slot_behind(kit: Kit, request_of: MakeRequest) -> None:
    async with kit.make(max_num_seqs=4, context_len=512) as engine:
        endless = [asyncio.create_task(engine.generate(request_of(seed=seed, max_tokens=500))) for seed in range(6)]
        await asyncio.sleep(0)
        for task in (endless[0], endless[2], endless[5]):  # two in slots, one waiting
            task.cancel()
        short = await engine.generate(request_of(seed=50, max_tokens=2))
        for task in endless:
            task.cancel()
        results = await asyncio.gather(*endless, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in results)
        await engine.pause()
        assert (engine.stats()["free_slots"], engine.stats()["waiting"]) == (4, 0)
        await engine.resume()
        again = await engine.generate(request_of(seed=50, max_tokens=2))
    assert short.token_ids == again.token_ids


async def test_publish_under_load_never_mixes_versions(kit: Kit, request_of: MakeRequest) -> None:
    """Answers go on over three weight changes; each token's log-prob is that of the weights whose version it carries."""
    requests = [request_of([seed + 1] * (seed + 2), seed=seed, max_tokens=480 - seed) for seed in range(6)]
    async with kit.make(max_num_seqs=8, context_len=512) as engine, asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(request)) for request in requests]
        for version in (1, 2, 3):
            await engine.generate(request_of(seed=version, max_tokens=10))  # the others are under way when it returns
            await engine.publish(version, kit.snapshot(version))
            assert engine.version == version
    for request, task in zip(requests, tasks, strict=True):
        generation = task.result()
        check_accounts(generation)
        versions = [span.version for span in generation.version_spans]
        assert versions == sorted(set(versions))
        assert len(versions) >= 2
        assert worst_difference(kit, request, generation) <= 1e-4


async def test_new_requests_sample_from_the_published_weights(model_kit: Kit, request_of: MakeRequest) -> None:
    request = request_of(max_tokens=12)
    async with model_kit.make(version=0) as engine:
        before = await engine.generate(request)
        await engine.publish(7, model_kit.snapshot(7))
        after = await engine.generate(request)
    assert (set(before.token_versions()), set(after.token_versions())) == ({0}, {7})
    assert worst_difference(model_kit, request, after) <= 1e-4
    assert before.token_ids != after.token_ids


async def test_paused_engine_samples_nothing(kit: Kit, request_of: MakeRequest) -> None:
    async with kit.make(context_len=512) as engine:
        task = asyncio.create_task(engine.generate(request_of(max_tokens=400)))
        await engine.generate(request_of(max_tokens=2))
        await engine.pause()
        before = engine.stats()["generated_tokens"]
        await engine.publish(1, kit.snapshot(1))  # its answer comes after anything else that the engine had to do
        assert engine.stats()["generated_tokens"] == before
        assert not task.done()
        await engine.resume()
        assert len((await task).token_ids) == 400


async def test_death_reaches_everyone(model_kit: Kit, request_of: MakeRequest) -> None:
    async with model_kit.make(max_num_seqs=2, context_len=512) as engine:
        tasks = [asyncio.create_task(engine.generate(request_of(seed=seed, max_tokens=500))) for seed in range(4)]
        await asyncio.sleep(0)
        assert engine.failure is None
        words = re.escape(model_kit.kill(engine))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert re.search(words, str(result))
        for call in (engine.generate(request_of()), engine.publish(1, model_kit.snapshot(1)), engine.pause(), engine.resume()):
            with pytest.raises(EngineError, match=words):
                await call
        assert re.search(words, str(engine.failure))


async def test_closing_fails_what_is_in_flight(kit: Kit, request_of: MakeRequest) -> None:
    async with kit.make(max_num_seqs=2, context_len=512) as engine:
        tasks = [asyncio.create_task(engine.generate(request_of(seed=seed, max_tokens=500))) for seed in range(4)]
        await asyncio.sleep(0)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert "closed" in str(result)
    assert "closed" in str(engine.failure)
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(request_of())


async def test_nothing_blocks_the_loop(kit: Kit, request_of: MakeRequest) -> None:
    engine = kit.make()
    with blockbuster_ctx("asyncrl"):
        async with engine:
            task = asyncio.create_task(engine.generate(request_of(max_tokens=100)))
            await engine.generate(request_of(max_tokens=2))
            await engine.publish(1, kit.snapshot(1))
            await engine.pause()
            await engine.resume()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_that_was_not_started_says_so(kit: Kit, request_of: MakeRequest) -> None:
    with pytest.raises(EngineError, match="async with"):
        await kit.make().generate(request_of())


# --- beats ------------------------------------------------------------------------------------------------------------------------


async def test_an_engine_beats_while_it_works_and_only_then(kit: Kit, request_of: MakeRequest) -> None:
    async with kit.make() as engine:
        idle = engine.beats
        await asyncio.sleep(0.01)
        assert engine.beats == idle
        task = asyncio.create_task(engine.generate(request_of(max_tokens=100)))
        seen = {idle}
        while not task.done():
            await asyncio.wait({task}, timeout=1e-3)
            seen.add(engine.beats)
        assert max(seen) > idle
        assert min(seen) == idle
        after = engine.beats
        await asyncio.sleep(0.01)
        assert engine.beats == after
        await engine.pause()
        paused = asyncio.create_task(engine.generate(request_of(max_tokens=3)))
        await asyncio.wait({paused}, timeout=0.01)
        assert engine.beats == after
        await engine.resume()
        await paused
        assert engine.beats > after
