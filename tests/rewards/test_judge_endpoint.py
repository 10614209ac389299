"""The judge against a real server on this machine: whatever it does, a score or an error of one session, within the deadline."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web

from asyncrl.config import JudgeConfig, LimitsConfig
from asyncrl.errors import DeadlineError, RewardError
from asyncrl.ports import RewardRequest
from asyncrl.rewards.judge import Again, Answer
from asyncrl.rewards.judge_endpoint import MAX_BODY_BYTES, open_endpoint
from asyncrl.rewards.scoring import Scorer
from asyncrl.world import RealWorld

Ask = Callable[..., RewardRequest]
Opened = Callable[..., AbstractAsyncContextManager[Scorer]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
KEY = "sk-secret-0123456789"


def completion(content: object, finish_reason: str = "stop", **more: object) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return {"object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 42}, **more}


def saying(**kwargs: Any) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(**kwargs)

    return handle


def json_of(value: object) -> Handler:
    return saying(text=json.dumps(value), content_type="application/json")


@asynccontextmanager
async def serving(*handlers: Handler) -> AsyncIterator[str]:
    """The base address of a server whose n-th request is handled by the n-th handler, the last ones by the last."""
    left = list(handlers)

    async def handle(request: web.Request) -> web.StreamResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(request)

    application = web.Application()
    application.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_server(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A server that speaks no more HTTP than `serve` does; it gets the connection after the request's head."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


async def ask_once(url: str, *, timeout_s: float = 20.0, **keys: Any) -> Answer | Again:
    async with RealWorld() as world, open_endpoint(JudgeConfig(base_url=url, model="m", **keys), world=world) as endpoint:
        async with asyncio.timeout(timeout_s):
            return await endpoint.ask("grade this")


def judge_keys(url: str, **keys: Any) -> dict[str, Any]:
    return {"manager": "judge", "judge": JudgeConfig(base_url=url, model="m", **keys)}


# --- good verdicts ----------------------------------------------------------------------------------------------------------------


async def test_a_good_verdict_and_what_is_sent(opened: Opened, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append((await request.json(), request.headers))
        return web.json_response(completion('{"score": 0.75, "reason": "close"}'))

    monkeypatch.setenv("JUDGE_KEY", KEY)
    async with serving(handle) as url, opened(**judge_keys(url, max_tokens=99, api_key_env="JUDGE_KEY")) as scorer:
        result = await scorer.score(ask("my \ud800 answer", "truth"))
        stats = scorer.stats()
    assert (result.score, result.extra) == (0.75, {"reason": "close", "judge_tokens": 42, "judge_attempts": 1})
    ((body, headers),) = seen
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 99, 0.0)
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert "my \ud800 answer" in body["messages"][0]["content"]
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert (stats["scored"], stats["calls"], stats["attempts"]) == (1, 1, 1)


async def test_sessions_ask_at_once_within_the_limits(opened: Opened, ask: Ask) -> None:
    running = most = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1
        return web.json_response(completion("score: 1"))

    async with serving(handle) as url, opened(**judge_keys(url), limits=LimitsConfig(max_concurrent=4)) as scorer:
        results = await asyncio.gather(*(scorer.score(ask()) for _ in range(30)))
    assert [result.score for result in results] == [1.0] * 30
    assert most == 4


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_refusal_that_may_pass_is_tried_again(opened: Opened, ask: Ask, status: int) -> None:
    refusing = saying(status=status, text="busy", headers={"Retry-After": "0"})
    async with serving(refusing, json_of(completion("score: 1"))) as url, opened(**judge_keys(url)) as scorer:
        result = await scorer.score(ask())
    assert (result.score, result.extra["judge_attempts"]) == (1.0, 2)


# --- one try: what may pass -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["7", " 7 ", "date"])
async def test_retry_after_is_honoured_as_seconds_and_as_a_date(header: str) -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=7), usegmt=True)
    async with serving(saying(status=429, headers={"Retry-After": when if header == "date" else header})) as url:
        answer = await ask_once(url)
    assert isinstance(answer, Again)
    assert answer.after_s == (pytest.approx(6, abs=1.01) if header == "date" else 7.0)
    assert answer.reason.startswith(f"judge 'm' at {url}/chat/completions: it answered 429 Too Many Requests")


@pytest.mark.parametrize(
    "header", ["", "soon", "-5", "Wed, 21 Oct 2015 07:28:00 GMT", "Mon, 99999999999999999999 Jan 2020 00:00:00 GMT", "٣"]
)
async def test_a_strange_retry_after_asks_for_nothing(header: str) -> None:
    async with serving(saying(status=503, headers={"Retry-After": header})) as url:
        answer = await ask_once(url)
    assert isinstance(answer, Again)
    assert answer.after_s == 0.0


async def test_a_refused_connection_may_pass_and_fails_the_session_in_the_end(opened: Opened, ask: Ask) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        assert isinstance(await ask_once(url), Again)
        async with opened(**judge_keys(url, max_attempts=2)) as scorer:
            with pytest.raises(RewardError, match=r"the judge gave no answer in 2 attempts; the last: .*ClientConnectorError"):
                await scorer.score(ask())
            assert scorer.stats()["failed"] == 1


async def test_a_connection_that_ends_before_the_answer_may_pass() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        return

    async with raw_server(hang_up) as url:
        answer = await ask_once(url)
    assert isinstance(answer, Again)
    assert "ServerDisconnectedError" in answer.reason or "ClientOSError" in answer.reason


# --- one try: what would not pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (saying(status=400, text="no such model"), "it answered 400 Bad Request: no such model"),
        (saying(status=401), "it answered 401 Unauthorized"),
        (saying(status=404, text="x" * 10_000), "it answered 404 Not Found: " + "x" * 200),
        (saying(status=302, headers={"Location": "http://127.0.0.1:1/"}), "it answered 302 Found"),
        (saying(status=204), "it answered 204 No Content"),
        (saying(text="<html>", content_type="text/html"), "it answered with 'text/html' in place of JSON"),
        (saying(body=b"\xff\xfe", content_type="application/json"), "its answer is not JSON: "),
        (saying(text="[" * 100_000, content_type="application/json"), "its answer is not JSON: "),
        (saying(text="", content_type="application/json"), "its answer is not JSON: ''"),
        (json_of({"choices": []}), "its answer has no choices[0].message.content: "),
        (json_of({"choices": 3}), "its answer has no choices[0].message.content: "),
        (json_of([]), "its answer has no choices[0].message.content: "),
        (json_of(completion(None)), "its answer has no choices[0].message.content: "),
        (json_of(completion("score: 0", finish_reason="length")), "the verdict was cut off at reward.judge.max_tokens = 512"),
        (saying(body=b" " * (MAX_BODY_BYTES + 1), content_type="application/json"), f"more than {MAX_BODY_BYTES} bytes"),
    ],
)
async def test_another_answer_is_an_error_at_once(handler: Handler, message: str) -> None:
    async with serving(handler) as url:
        with pytest.raises(RewardError) as caught:
            await ask_once(url)
    assert str(caught.value).startswith(f"judge 'm' at {url}/chat/completions: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


async def test_a_body_without_end_is_cut_off_and_its_connection_closed() -> None:
    closed = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b" " * (1 << 20))
        except ConnectionError:
            closed.set()
            raise

    async with serving(handle) as url:
        with pytest.raises(RewardError, match="more than"):
            await ask_once(url)
        async with asyncio.timeout(20):
            await closed.wait()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{", "ClientPayloadError"),
        (b"HTTP/1.1 400 Bad\r\nContent-Length: 99\r\n\r\n{", "it answered 400 Bad: its words broke off"),
        (b"no http at all\r\n\r\n", ""),
    ],
)
async def test_an_answer_that_breaks_off_is_an_error(answer: bytes, message: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    async with raw_server(serve) as url:
        with pytest.raises(RewardError) as caught:
            await ask_once(url)
    assert message in str(caught.value)


async def test_a_key_is_in_no_message_whatever_the_server_says(monkeypatch: pytest.MonkeyPatch, opened: Opened, ask: Ask) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def echo(status: int, content_type: str) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            said = f"{'x' * 180} {request.headers['Authorization']}"
            return web.Response(status=status, reason=KEY, text=said, content_type=content_type)

        return handle

    def verdict(text: str) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(completion(text))

        return handle

    handlers = [echo(400, "text/plain"), echo(200, "text/plain"), echo(200, "application/json"), verdict(f"no {KEY}")]
    for handler in (*handlers, echo(500, "text/plain")):
        async with serving(handler) as url, opened(**judge_keys(url, api_key_env="JUDGE_KEY", max_attempts=1)) as scorer:
            with pytest.raises(RewardError) as caught:
                await scorer.score(ask())
        told: BaseException | None = caught.value
        while told is not None:
            assert KEY[:8] not in f"{told!r} {told}", "the key, or the beginning of it"
            told = told.__cause__ or told.__context__
    told_back = verdict(json.dumps({"score": 1, "said": KEY}))
    async with serving(told_back) as url, opened(**judge_keys(url, api_key_env="JUDGE_KEY")) as scorer:
        assert (await scorer.score(ask())).extra["said"] == "***"


# --- deadlines, cancellation, the end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["head", "body", "refusal"])
async def test_a_hanging_server_meets_the_deadline_and_loses_its_connection(opened: Opened, ask: Ask, part: str) -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status = b"503 Busy" if part == "refusal" else b"200 OK"
        if part != "head":
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
        await reader.read()  # what is left of the request, and then the end
        closed.set()

    async with raw_server(serve) as url, opened(**judge_keys(url), timeout_s=0.2) as scorer:
        with pytest.raises(DeadlineError, match=r"the judge took longer than reward\.timeout_s = 0\.2"):
            await scorer.score(ask())
        async with asyncio.timeout(20):
            await closed.wait()
        assert scorer.stats()["timed_out"] == 1


async def test_a_cancelled_call_leaves_no_connection(opened: Opened, ask: Ask) -> None:
    here, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here.set()
        await reader.read()
        closed.set()

    async with raw_server(serve) as url, opened(**judge_keys(url)) as scorer:
        task = asyncio.create_task(scorer.score(ask()))
        async with asyncio.timeout(20):
            await here.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await closed.wait()
        assert (scorer.stats()["running"], scorer.stats()["failed"], scorer.stats()["timed_out"]) == (0, 0, 0)


async def test_closing_the_scorer_ends_calls_and_connections(opened: Opened, ask: Ask) -> None:
    here = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here.set()
        await reader.read()

    before = os.listdir("/proc/self/fd")
    async with raw_server(serve) as url:
        async with opened(**judge_keys(url)) as scorer:
            task = asyncio.create_task(scorer.score(ask()))
            await asyncio.wait_for(here.wait(), 20)
        with pytest.raises(RewardError, match="the scorer was closed"):
            await asyncio.wait_for(task, 20)
        with pytest.raises(RewardError, match="the scorer was closed"):
            await scorer.score(ask())
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= len(before)
