"""The engine against a server that answers wrongly, breaks off, dies or forgets: who is failed, who goes on, and what is told."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation, VersionSpan
from asyncrl.rollout.openai import engine as engine_module
from asyncrl.rollout.openai.engine import OpenAIEngine
from asyncrl.rollout.openai.http import MAX_OPENING
from tests.rollout.openai.fake_server import COMPLETIONS as COMPLETIONS_PATH
from tests.rollout.openai.fake_server import GENERATE, Event
from tests.rollout.openai.kits import Fakes, fake_snapshot, spell, until

RequestMaker = Callable[..., GenerateRequest]


def choice_of(event: Event) -> Event:
    choice: Event = event["choices"][0]
    return choice


def on_last(change: Callable[[Event], Any]) -> Callable[[Event], Event]:
    """Change the event that ends an answer."""

    def spoil(event: Event) -> Event:
        if choice_of(event)["finish_reason"]:
            change(choice_of(event))
        return event

    return spoil


def one_more(choice: Event) -> None:
    choice["token_ids"].append(1)
    choice["logprobs"]["content"].append({"token_id": 1, "logprob": -1.0})


def token(number: int) -> Callable[[Event], Any]:
    def change(choice: Event) -> None:
        choice["token_ids"][-1] = choice["logprobs"]["content"][-1]["token_id"] = number

    return change


def spans(*told: tuple[str, int, int]) -> Callable[[Event], Any]:
    each = [{"version": version, "start": start, "end": end} for version, start, end in told]
    return lambda choice: choice.update(weight_versions=each)


WRONG: dict[str, tuple[Callable[[Event], Any], str]] = {
    "aborted": (lambda choice: choice.update(finish_reason="abort", token_ids=[], logprobs=None), "gave up .*'abort'"),
    "without end": (lambda choice: choice.update(finish_reason=None, token_ids=[], logprobs=None), "gave up .*the stream ended"),
    "a token too many": (one_more, "went on after the token that ends the answer"),
    "unknown token": (token(40), "sampled token 40; ids are 0..39"),
    "negative token": (token(-1), "sampled token -1"),
    "no versions": (lambda choice: choice.update(weight_versions=None), "did not tell the weight versions"),
    "foreign version": (spans(("default", 0, 40)), "from weights 'default', which this run did not publish"),
    "gap": (spans(("0", 0, 10), ("1", 11, 40)), "do not follow each other"),
    "overlap": (spans(("0", 0, 10), ("1", 9, 40)), "do not follow each other"),
    "empty span": (spans(("0", 0, 0), ("1", 0, 40)), "do not follow each other"),
    "too short": (spans(("0", 0, 39)), "do not cover 40 tokens"),
    "no log-probs": (lambda choice: choice.update(logprobs=None), "token ids and 0 log-probs"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_answer_fails_its_request_alone(fakes: Fakes, request_of: RequestMaker, case: str) -> None:
    change, words = WRONG[case]
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        server.spoil = on_last(change)
        with pytest.raises(EngineError, match=words):
            await engine.generate(request_of(max_tokens=40))
        server.spoil = lambda event: event
        assert len((await engine.generate(request_of(max_tokens=40))).token_ids) == 40
        assert engine.stats()["free_slots"] == 8
        assert engine.failure is None


async def test_a_log_prob_of_rounding_above_zero_is_zero(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        server.spoil = on_last(lambda choice: choice["logprobs"]["content"][0].update(logprob=1e-6))
        assert (await engine.generate(request_of(max_tokens=1))).log_probs == [0.0]


async def test_neighbouring_spans_of_one_version_are_one(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        server.spoil = on_last(spans(("3", 0, 5), ("3", 5, 9), ("4", 9, 60)))
        generation = await engine.generate(request_of(max_tokens=40))
    assert generation.version_spans == [VersionSpan(start=0, end=9, version=3), VersionSpan(start=9, end=40, version=4)]


# --- what breaks off --------------------------------------------------------------------------------------------------------------


def breaking(times: int, *, after_start: bool) -> Callable[[web.Request], Any]:
    """Break the connection of the first requests; `left` counts."""
    left = [times]

    async def handle(request: web.Request) -> web.StreamResponse:
        left[0] -= 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if after_start:
            await response.prepare(request)
            await response.write(b'data: {"choices": []}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    handle.left = left  # type: ignore[attr-defined]
    return handle


async def test_an_answer_that_breaks_off_fails_one_request_of_a_healthy_server(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        other = asyncio.create_task(engine.generate(request_of(seed=1, max_tokens=100)))
        fakes.servers.call(server.pause)
        await until(lambda: server.num_running == 1)
        handler = breaking(1, after_start=True)
        server.handlers[GENERATE] = handler
        with pytest.raises(EngineError, match=r"request 'request-2': .* broke off"):
            await engine.generate(request_of(seed=2, max_tokens=5))
        assert handler.left == [0]  # type: ignore[attr-defined] # it was not asked again
        fakes.servers.call(server.go_on)
        assert len((await other).token_ids) == 100
        assert (engine.failure, engine.stats()["lost"]) == (None, 1)


async def test_a_connection_that_breaks_before_the_answer_is_tried_again(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        expected = await engine.generate(request_of(max_tokens=20))
        handler = breaking(2, after_start=False)

        async def handle(request: web.Request) -> web.StreamResponse:
            if handler.left == [1]:  # type: ignore[attr-defined]
                del server.handlers[GENERATE]
            return await handler(request)  # type: ignore[no-any-return]

        server.handlers[GENERATE] = handle
        assert await engine.generate(request_of(max_tokens=20)) == expected
        assert engine.stats()["lost"] == 0


async def test_a_server_that_is_gone_ends_the_engine_and_fails_everyone(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url, max_num_seqs=2) as engine:
        tasks = [asyncio.create_task(engine.generate(request_of(seed=seed, max_tokens=100))) for seed in range(4)]
        fakes.servers.call(server.pause)
        await until(lambda: server.num_running == 2)
        server.is_healthy = False
        server.handlers[GENERATE] = breaking(9, after_start=False)
        tasks[0].cancel()  # its place goes to one that finds nobody
        for task in tasks[1:]:
            with pytest.raises(EngineError, match=r"the server is gone: .*ServerDisconnectedError"):
                await task
        assert tasks[0].cancelled()
        assert "the server is gone" in str(engine.failure)
        with pytest.raises(EngineError, match="the server is gone"):
            await engine.publish(1, fake_snapshot(1))


@pytest.mark.parametrize(("status", "is_looked_after"), [(400, False), (404, False), (500, True), (503, True)])
async def test_a_refused_request_is_its_callers_trouble(
    fakes: Fakes, request_of: RequestMaker, status: int, is_looked_after: bool
) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        server.refusals[GENERATE] = (status, '{"detail": "no room"}')
        server.calls.clear()
        with pytest.raises(EngineError, match=f"request 'request-0': .* answered {status} .*: no room"):
            await engine.generate(request_of())
        assert ("/health" in server.calls) == is_looked_after
        assert engine.failure is None


async def test_a_cancelled_request_ends_at_the_server(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        task = asyncio.create_task(engine.generate(request_of(max_tokens=100)))
        fakes.servers.call(server.pause)
        await until(lambda: server.num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.num_running == 0)
        assert engine.stats()["cancelled"] == 1


async def test_no_more_than_max_num_seqs_are_sent_at_once(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url, max_num_seqs=3) as engine, asyncio.TaskGroup() as group:
        server.most_running = 0
        for seed in range(20):
            group.create_task(engine.generate(request_of(seed=seed, max_tokens=9)))
    assert server.most_running == 3


async def test_a_burst_of_requests_is_opened_in_small_lots(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    opening, most = 0, 0

    async def count(request: web.Request) -> web.StreamResponse:
        nonlocal opening, most
        opening += 1
        most = max(most, opening)
        await asyncio.sleep(0.02)
        opening -= 1
        return await server.answer(request, GENERATE)

    async with fakes.engine(url, max_num_seqs=200) as engine, asyncio.TaskGroup() as group:
        server.handlers[GENERATE] = count
        for seed in range(200):
            group.create_task(engine.generate(request_of(seed=seed, max_tokens=2)))
    assert most == MAX_OPENING


async def test_what_is_sent(fakes: Fakes, request_of: RequestMaker) -> None:
    """The budget is what the context leaves; a greedy request has no filters; a session is named to who routes by it."""
    server, url = fakes.servers.add()
    seen = []

    async def look(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("X-Session-ID"))
        del server.handlers[GENERATE]
        return await server.handle(request, GENERATE)

    async with fakes.engine(url, context_len=30) as engine:
        server.bodies.clear()
        server.handlers[GENERATE] = look
        request = request_of([1] * 20, seed=2**62, max_tokens=99, temperature=0.0, top_k=3, top_p=0.5, stop_token_ids=(39,))
        await engine.generate(GenerateRequest(**{**as_dict(request), "session": "a_0"}))
    params = server.bodies[0]["sampling_params"]
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids", "ignore_eos", "detokenize", "stream_interval")
    assert [params[name] for name in names] == [10, 0.0, 0, 1.0, 2**62, [39], True, False, 32]
    assert seen == ["a_0"]


def as_dict(request: GenerateRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("request_id", "prompt_ids", "sampling", "seed")}


async def test_after_a_stop_string_the_server_is_told_and_the_rest_is_dropped(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url, context_len=3000) as engine:
        whole = await engine.generate(request_of(max_tokens=2000))
        before = engine.stats()["generated_tokens"]
        stop = next(spell(whole.token_ids[place : place + 3]) for place in range(9, 99))
        cut = await engine.generate(request_of(max_tokens=2000, stop_strings=(stop,)))
        num = len(cut.token_ids)
        assert cut.token_ids == whole.token_ids[:num]
        assert spell(cut.token_ids).endswith(stop)
        assert spell(cut.token_ids).count(stop) == 1
        assert (cut.log_probs, cut.version_spans) == (whole.log_probs[:num], [VersionSpan(start=0, end=num, version=0)])
        assert len(server.aborted) == 1
        assert (engine.stats()["cut"], engine.stats()["generated_tokens"]) == (1, before + num)


async def test_a_request_that_does_not_end_when_told_has_a_deadline(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url, control_timeout_s=0.2, context_len=3000) as engine:
        whole = await engine.generate(request_of(max_tokens=20))

        async def freeze(request: web.Request) -> web.Response:
            server.pause()
            return web.Response()

        server.handlers["/inference/v1/abort_requests"] = freeze
        with pytest.raises(EngineError, match=r"a request that was to end had not ended after 0\.2 s"):
            await engine.generate(request_of(max_tokens=2000, stop_strings=(spell(whole.token_ids[9:12]),)))
        assert engine.failure is None


# --- both routes, and the end -----------------------------------------------------------------------------------------------------


async def test_the_answer_is_the_same_by_both_routes(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()

    async def ask(engine: OpenAIEngine) -> list[Generation]:
        requests = [request_of(seed=seed, max_tokens=40, temperature=seed / 3, top_k=seed * 5) for seed in range(4)]
        return [await engine.generate(request) for request in requests]

    async with fakes.engine(url) as engine:
        one = await ask(engine)
    server.refusals[GENERATE] = (404, "")
    async with fakes.engine(url) as engine:
        assert await ask(engine) == one
    assert COMPLETIONS_PATH in server.calls


async def test_closing_has_a_deadline(fakes: Fakes, request_of: RequestMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CLOSE_TIMEOUT_S", 0.05)
    _, url = fakes.servers.add()
    engine = fakes.engine(url)
    await engine.__aenter__()
    begun, stubborn = asyncio.Event(), asyncio.Event()

    async def stay() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await stubborn.wait()

    waiting = asyncio.create_task(engine._until_the_end(stay()))
    await begun.wait()
    await engine.__aexit__(None, None, None)
    stubborn.set()
    await waiting
