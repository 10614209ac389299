"""A server that cannot serve is refused when the engine is opened, in one line that says what is wrong with it."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from asyncrl.errors import ConfigError, EngineError
from asyncrl.rollout.openai import http
from asyncrl.rollout.openai.errors import ServerMisfitError
from asyncrl.rollout.openai.routes import COMPLETIONS, TOKENS
from tests.rollout.openai.fake_server import COMPLETIONS as COMPLETIONS_PATH
from tests.rollout.openai.fake_server import GENERATE, Event, FakeServer
from tests.rollout.openai.kits import Fakes

Change = Callable[[FakeServer], Any]


def choice_of(event: Event) -> Event:
    choice: Event = event["choices"][0]
    return choice


def spoilt(change: Callable[[Event], Any]) -> Change:
    """Every choice is changed by `change`."""

    def spoil(event: Event) -> Event:
        change(choice_of(event))
        return event

    return lambda server: setattr(server, "spoil", spoil)


def event_of(data: bytes) -> Change:
    return lambda server: setattr(server, "spoil", lambda event: data)


def refused(path: str, status: int, text: str = "") -> Change:
    return lambda server: server.refusals.update({path: (status, text)})


def answered(path: str, **keys: Any) -> Change:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(**keys)

    return lambda server: server.handlers.update({path: handle})


def only_completions(change: Change) -> Change:
    def both(server: FakeServer) -> None:
        refused(GENERATE, 403, "Scale-out endpoints are disabled")(server)
        change(server)

    return both


def log_prob_of(value: Any) -> Change:
    return spoilt(lambda choice: choice["logprobs"]["content"][0].update(logprob=value))


async def broken_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"choices": [')
    assert request.transport is not None
    request.transport.abort()
    return response


def swap_for_another(choice: Event) -> None:
    """Neither of the two likeliest tokens."""
    place = choice["logprobs"]["content"][0]
    if place["top_logprobs"]:
        other = next(token for token in range(40) if token not in {each["token_id"] for each in place["top_logprobs"]})
        choice["token_ids"][0] = place["token_id"] = other


REFUSED: dict[str, tuple[Change, str]] = {
    "unhealthy": (lambda server: setattr(server, "is_healthy", False), "answered 503 .*not healthy"),
    "asks for a key": (refused("/v1/models", 401, "Unauthorized"), "401 Unauthorized.*rollout.openai.api_key_env"),
    "models are no JSON": (answered("/v1/models", text="<html>"), "no JSON: '<html>'"),
    "models are no list": (answered("/v1/models", text='{"data": 7}', content_type="application/json"), "names no model"),
    "models are empty": (answered("/v1/models", body=b""), "names no model"),
    "elsewhere": (answered("/v1/models", status=302, headers={"Location": "http://other"}), "answered 302"),
    "huge": (answered("/v1/models", body=b" " * (http.MAX_BYTES + 1)), "more than 4194304 bytes"),
    "short context": (lambda server: setattr(server, "max_model_len", 100), "context is of 100 tokens, and the run's of 128"),
    "another model": (lambda server: setattr(server, "vocab_size", 50), "model has 50 token ids, and the run's 40"),
    "no routes for weights": (refused("/is_paused", 404), "no routes for new weights; start vLLM with"),
    "no extension": (
        refused("/collective_rpc", 500, "no asyncrl_version"),
        "cannot be given weights: .*no asyncrl_version",
    ),
    "no route for ids": (only_completions(refused(COMPLETIONS_PATH, 404)), "no route returns token ids .*403.*disabled.*404"),
    "generate fails": (
        refused(GENERATE, 500, '{"error": {"message": "no kernel"}}'),
        "answered 500 Internal Server Error: no kernel",
    ),
    "no stream": (answered(GENERATE, text="{}", content_type="application/json"), "'application/json' in place of a stream"),
    "breaks off": (lambda server: server.handlers.update({GENERATE: broken_off}), "the answer of .* broke off"),
    "no ids": (spoilt(lambda choice: choice.update(token_ids=None, finish_reason=None)), "no token ids"),
    "ids are text": (spoilt(lambda choice: choice.update(token_ids="abc")), "cannot be read: Expected `array.*token_ids"),
    "no log-probs": (spoilt(lambda choice: choice.update(logprobs=None)), "1 token ids and 0 log-probs"),
    "too many log-probs": (
        spoilt(lambda choice: choice["logprobs"]["content"].append({"token_id": 1, "logprob": -1})),
        "1 token .* 2 log",
    ),
    "log-probs of others": (
        spoilt(lambda choice: choice["token_ids"].__setitem__(0, 39 - choice["token_ids"][0])),
        "of other tokens",
    ),
    "log-prob is null": (log_prob_of(None), "cannot be read: Expected `float`, got `null`"),
    "log-prob is NaN": (log_prob_of(float("nan")), "cannot be read: JSON is malformed"),
    "log-prob is infinite": (log_prob_of(float("-inf")), "cannot be read: JSON is malformed"),
    "log-prob is clamped": (log_prob_of(-9999.0), "log-prob -9999, which is none"),
    "log-prob is positive": (log_prob_of(0.1), "log-prob 0.1, which is none"),
    "raw log-probs": (
        lambda server: setattr(server, "is_raw", True),
        "not of the distribution.*--logprobs-mode processed_logprobs",
    ),
    "no alternatives": (spoilt(lambda choice: choice["logprobs"]["content"][0].update(top_logprobs=[])), "of the likeliest tokens"),
    "ignores top_k": (spoilt(swap_for_another), "does not keep to top_k"),
    "two tokens": (
        spoilt(
            lambda choice: (choice["token_ids"].append(1), choice["logprobs"]["content"].append({"token_id": 1, "logprob": -1}))
        ),
        "asked for one token, and answered with 2",
    ),
    "no token": (spoilt(lambda choice: choice.update(token_ids=[], logprobs=None)), "one token, and answered with 0"),
    "no choice": (event_of(b'data: {"choices": []}\n\n'), "one token, and answered with 0"),
    "no event": (event_of(b""), "one token, and answered with 0"),
    "event is no JSON": (event_of(b"data: {'choices'\n\n"), "cannot be read"),
    "event is no text": (event_of(b'data: {"choices": "\xff\xfe"}\n\n'), "cannot be read"),
    "endless event": (event_of(b"data: " + b"x" * (http.MAX_BYTES + 1)), "an event of more than 4194304 bytes"),
    "says an error": (
        event_of(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'),
        "ended the answer: out of memory",
    ),
    "completions without ids": (only_completions(spoilt(lambda choice: choice.pop("token_ids"))), "1 log-probs|no token ids"),
    "completions without log-probs": (only_completions(spoilt(lambda choice: choice.update(logprobs=None))), "1 token ids and 0"),
    "completions with raw ones": (only_completions(lambda server: setattr(server, "is_raw", True)), "not of the distribution"),
    "completions with texts": (
        only_completions(spoilt(lambda choice: choice["logprobs"].update(top_logprobs=[{" the": -1.0}]))),
        "names the tokens of its log-probs by their text",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_server_that_cannot_serve_is_refused_in_one_line(fakes: Fakes, case: str) -> None:
    change, words = REFUSED[case]
    server, url = fakes.servers.add()
    change(server)
    engine = fakes.engine(url)
    with pytest.raises(ServerMisfitError, match=words) as caught:
        await engine.__aenter__()
    message = str(caught.value)
    assert message.startswith(url)
    assert "\n" not in message
    assert len(message) < 700
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(EngineError, match="has not been started"):
        await engine.pause()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("other", "no model 'other'; it has 'toy'"),
        ("", "more than one model, .*rollout.openai.model says of none; it has 'a', 'b'"),
    ],
)
async def test_the_model_must_be_there_and_be_one(fakes: Fakes, asked: str, words: str) -> None:
    server, url = fakes.servers.add()
    if not asked:
        models = '{"data": [{"id": "a"}, {"id": "b"}]}'
        answered("/v1/models", text=models, content_type="application/json")(server)
    with pytest.raises(ServerMisfitError, match=words):
        await fakes.engine(url, model=asked).__aenter__()


async def test_a_server_that_is_not_there(fakes: Fakes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ServerMisfitError, match=f"127.0.0.1:{port}.*no server answers there"):
        await fakes.engine(f"http://127.0.0.1:{port}/v1/").__aenter__()


async def test_a_server_that_still_loads_is_waited_for(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses connections until then."""
    monkeypatch.setattr("asyncrl.rollout.openai.probe.LOOK_AGAIN_S", 0.01)
    _, url = fakes.servers.add()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    engine = fakes.engine(f"http://127.0.0.1:{port}/{url.rsplit('/', 1)[1]}", wait_s=20.0)
    opening = asyncio.create_task(engine.__aenter__())
    await asyncio.wait({opening}, timeout=0.05)
    assert not opening.done()
    async with await asyncio.start_server(forward, "127.0.0.1", port):
        await opening
        assert engine.failure is None
        await engine.__aexit__(None, None, None)


async def test_a_server_that_hangs_has_a_deadline(fakes: Fakes) -> None:
    server, url = fakes.servers.add()
    fakes.servers.call(server.pause)
    with pytest.raises(ServerMisfitError, match="no answer to a request of one token; has somebody paused it"):
        await fakes.engine(url, trains=False, control_timeout_s=0.05).__aenter__()


async def test_a_server_left_paused_is_resumed_by_who_trains(fakes: Fakes) -> None:
    server, url = fakes.servers.add()
    fakes.servers.call(server.pause)
    async with fakes.engine(url):
        assert not server.is_paused


async def test_a_server_left_in_the_middle_of_new_weights_samples_no_token_of_them(fakes: Fakes) -> None:
    server, url = fakes.servers.add()
    fakes.servers.call(server.pause)
    server.is_updating = True
    async with fakes.engine(url):
        assert not server.is_updating
        assert not server.is_paused
    assert server.calls.index("/finish_weight_update") < server.calls.index("/resume")


async def test_the_route_for_tokens_is_preferred(fakes: Fakes) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        assert (engine._server.route, engine._server.tells_versions) == (TOKENS, True)
    refused(GENERATE, 403)(server)
    async with fakes.engine(url) as engine:
        assert (engine._server.route, engine._server.tells_versions) == (COMPLETIONS, False)


async def test_without_versions_the_route_for_tokens_does(fakes: Fakes) -> None:
    server, url = fakes.servers.add()
    spoilt(lambda choice: choice.update(weight_versions=None))(server)
    async with fakes.engine(url) as engine:
        assert (engine._server.route, engine._server.tells_versions) == (TOKENS, False)


async def test_a_server_of_fixed_weights_needs_no_routes_for_new_ones(fakes: Fakes) -> None:
    server, url = fakes.servers.add()
    for path in ("/is_paused", "/collective_rpc", "/resume"):
        refused(path, 404)(server)
    async with fakes.engine(url, trains=False) as engine:
        assert engine.failure is None


async def test_no_id_outside_of_the_vocabulary_is_sent(fakes: Fakes) -> None:
    """vLLM dies of one."""
    server, url = fakes.servers.add()
    server.vocab_size = 5
    async with fakes.engine(url, vocab_size=5):
        pass
    assert server.bodies
    assert max(max(body["token_ids"]) for body in server.bodies) < 5


# --- keys -------------------------------------------------------------------------------------------------------------------------

KEY = "sk-secret-0123456789"


async def test_a_key_is_sent_and_never_shown(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    server, url = fakes.servers.add()
    seen = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.Response(status=500, text=f"you said {request.headers['Authorization']}")

    server.handlers["/v1/models"] = handle
    with pytest.raises(ServerMisfitError, match=r"you said Bearer \*\*\*") as caught:
        await fakes.engine(url, api_key_env="SERVER_KEY").__aenter__()
    assert seen == [f"Bearer {KEY}"]
    assert KEY not in repr(caught.value)


@pytest.mark.parametrize(("value", "words"), [(None, "no such environment variable"), ("a b", "is no key"), ("k\n", "is no key")])
async def test_a_key_that_is_none_is_refused(fakes: Fakes, monkeypatch: pytest.MonkeyPatch, value: str | None, words: str) -> None:
    if value is not None:
        monkeypatch.setenv("SERVER_KEY", value)
    with pytest.raises(ConfigError, match=f"rollout.openai.api_key_env = 'SERVER_KEY': .*{words}"):
        await fakes.engine("http://127.0.0.1:1", api_key_env="SERVER_KEY").__aenter__()
