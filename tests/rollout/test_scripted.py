"""The scripted engine keeps an engine's rules for stops, budgets and versions."""

import asyncio
from collections.abc import Sequence

import pytest

from asyncrl.errors import EngineError, PromptTooLongError
from asyncrl.ports import GenerateRequest, SamplingParams, StopReason, VersionSpan, WeightSnapshot
from asyncrl.rollout.scripted import ScriptedEngine


def request(prompt_len: int = 2, **sampling: object) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_ids=[0] * prompt_len, sampling=SamplingParams(**sampling), seed=0)  # type: ignore[arg-type]


async def test_stops_budgets_and_context_cut_the_answer() -> None:
    engine = ScriptedEngine(lambda _: [1, 2, 3, 4, 5], context_len=6, version=3, decode=lambda ids: "".join(map(str, ids)))
    cases = [
        (request(), [1, 2, 3, 4], StopReason.CONTEXT),
        (request(1), [1, 2, 3, 4, 5], StopReason.CONTEXT),
        (request(max_tokens=3), [1, 2, 3], StopReason.LENGTH),
        (request(stop_token_ids=(2,)), [1, 2], StopReason.STOP),
        (request(stop_strings=("23",)), [1, 2, 3], StopReason.STOP),
        (request(max_tokens=2, stop_token_ids=(3,)), [1, 2], StopReason.LENGTH),
    ]
    for asked, ids, reason in cases:
        generation = await engine.generate(asked)
        assert (generation.token_ids, generation.stop_reason) == (ids, reason)
        assert generation.version_spans == [VersionSpan(start=0, end=len(ids), version=3)]
        assert len(generation.log_probs) == len(ids)


async def test_an_empty_answer_has_no_spans() -> None:
    generation = await ScriptedEngine(lambda _: []).generate(request())
    assert (generation.token_ids, generation.version_spans, generation.stop_reason) == ([], [], StopReason.STOP)


async def test_a_full_context_and_stop_strings_without_decoding_are_errors() -> None:
    with pytest.raises(PromptTooLongError):
        await ScriptedEngine(lambda _: [1], context_len=2).generate(request())
    with pytest.raises(EngineError, match="stop strings"):
        await ScriptedEngine(lambda _: [1]).generate(request(stop_strings=("x",)))


async def test_a_paused_engine_starts_nothing_and_a_published_version_stamps_the_tokens() -> None:
    class Weights(WeightSnapshot):
        tensors = {}  # noqa: RUF012

    async def answer(_: GenerateRequest) -> Sequence[int]:
        return [1]

    async with ScriptedEngine(answer) as engine:
        await engine.pause()
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.wait({task}, timeout=0)
        assert not task.done()
        await engine.publish(1, Weights())
        await engine.resume()
        assert (await task).token_versions() == [1]
        assert engine.stats() == {"generated_tokens": 1.0, "running": 0.0}
