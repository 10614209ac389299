"""A server that speaks as vLLM's does, over a model that is a formula: ids in and out, log-probs, versions, pause, new weights.

OpenAIEngine -> HTTP -> [FakeServer]. Several live behind one port, each below a path of its own. What a test wants answered wrongly
it changes on the server: `spoil` sees each event, `refusals` and `handlers` each path.
"""

import asyncio
import json
import math
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

from aiohttp import web

from asyncrl.rollout.publication.placed import Where, opened

VOCAB = 40
CONTEXT = 4096
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Event = dict[str, Any]


@cache
def logits(version: int, last: int) -> list[float]:
    """Of the next token: they depend on the version and the last id."""
    rng = random.Random(version * 1_000_003 + last)
    return [rng.gauss(0, 2) for _ in range(VOCAB)]


def log_softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    total = top + math.log(sum(math.exp(value - top) for value in values))
    return [value - total for value in values]


@cache
def distribution(version: int, last: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """Log-probs after temperature and filters; those of a greedy token are of the plain softmax."""
    row = log_softmax([value / (temperature or 1.0) for value in logits(version, last)])
    if not temperature:
        return row
    kept = sorted(range(VOCAB), key=lambda token: -row[token])[: top_k or VOCAB]
    total, mass, nucleus = sum(math.exp(row[token]) for token in kept), 0.0, list[int]()
    for token in kept:
        if mass >= top_p and nucleus:
            break
        nucleus.append(token)
        mass += math.exp(row[token]) / total
    shares = dict(zip(nucleus, log_softmax([row[token] for token in nucleus]), strict=True))
    return [shares.get(token, -math.inf) for token in range(VOCAB)]


def draw(row: Sequence[float], params: Event, place: int) -> int:
    if not params["temperature"]:
        return max(range(VOCAB), key=row.__getitem__)
    weights = [math.exp(value) for value in row]
    return random.Random(params["seed"] * 7919 + place).choices(range(VOCAB), weights)[0]


class FakeServer:
    """One server. `version` is its weights', by which the formula is chosen."""

    def __init__(self) -> None:
        self.model = "toy"
        self.max_model_len: int | None = CONTEXT
        self.version = 0
        self.told_version = "default"
        self.is_healthy = True
        self.has_gone = ""
        self.vocab_size = VOCAB
        self.is_raw = False
        self.keeps_cache = False
        self.spoil: Callable[[Event], Event | bytes | None] = lambda event: event
        self.refusals: dict[str, tuple[int, str]] = {}
        self.handlers: dict[str, Handler] = {}
        self.bodies: list[Event] = []
        self.calls: list[str] = []
        self.num_running = 0
        self.most_running = 0
        self.num_unfinished = 0
        self.aborted: set[str] = set()
        self.is_paused = False
        self.is_updating = False
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._update: Event = {}

    async def handle(self, request: web.Request, path: str) -> web.StreamResponse:
        self.calls.append(path)
        if path in self.refusals:
            status, text = self.refusals[path]
            return web.Response(status=status, text=text)
        if path in self.handlers:
            return await self.handlers[path](request)
        return await self.answer(request, path)

    async def answer(self, request: web.Request, path: str) -> web.StreamResponse:
        """As it does when nobody has changed it."""
        body = json.loads(text) if (text := await request.text()) else {}
        if path in (GENERATE, COMPLETIONS):
            self.bodies.append(body)
            return await self._generate(request, path, body)
        command = getattr(self, f"_{path.strip('/').replace('/', '_')}", None)
        return web.Response(status=404) if command is None else await self._obey(command, request, body)

    async def _obey(self, command: Callable[..., Any], request: web.Request, body: Event) -> web.Response:
        answer = command(request, body)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    def pause(self) -> None:
        """As another client would; on the servers' loop."""
        self.is_paused = True
        self._may_run.clear()

    def go_on(self) -> None:
        self.is_paused = False
        self._may_run.set()

    # --- what is asked

    def _health(self, request: web.Request, body: Event) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    def _v1_models(self, request: web.Request, body: Event) -> Event:
        return {"data": [{"id": self.model, "max_model_len": self.max_model_len}]}

    def _is_paused(self, request: web.Request, body: Event) -> Event:
        return {"is_paused": self.is_paused}

    def _pause(self, request: web.Request, body: Event) -> Event:
        assert request.query["mode"] == "keep"
        self.pause()
        return {}

    def _resume(self, request: web.Request, body: Event) -> Event:
        self.go_on()
        return {}

    def _collective_rpc(self, request: web.Request, body: Event) -> Event:
        assert body["method"] == "asyncrl_version"
        return {"results": [{"transfer": "asyncrl_shm", "vocab_size": self.vocab_size, "is_updating": self.is_updating}]}

    def _init_weight_transfer_engine(self, request: web.Request, body: Event) -> Event:
        return {}

    def _update_weight_version(self, request: web.Request, body: Event) -> Event:
        self.told_version = body["new_version"]
        return {}

    def _start_weight_update(self, request: web.Request, body: Event) -> Event:
        assert self.is_paused
        self.is_updating = True
        return {}

    def _update_weights(self, request: web.Request, body: Event) -> Event:
        self._update = body["update_info"]
        return {}

    def _finish_weight_update(self, request: web.Request, body: Event) -> Event:
        self.is_updating = False
        if self._update:
            self.version = int(opened(Where(**self._update["where"]))["version"].item())
        self.told_version = body["weight_version"]
        return {}

    def _reset_prefix_cache(self, request: web.Request, body: Event) -> Event:
        assert request.query["reset_running_requests"] == "true"
        return {"success": not self.keeps_cache}

    def _inference_v1_abort_requests(self, request: web.Request, body: Event) -> web.Response:
        self.aborted.update(body["request_ids"])
        return web.Response()

    # --- an answer

    async def _generate(self, request: web.Request, path: str, body: Event) -> web.StreamResponse:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.num_unfinished += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            await self._stream(response, path, body)
        finally:
            self.num_running -= 1
        self.num_unfinished -= 1
        return response

    async def _stream(self, response: web.StreamResponse, path: str, body: Event) -> None:
        params = body["sampling_params"] if path == GENERATE else body
        ids = list(body["token_ids"] if path == GENERATE else body["prompt"])
        num_prompt, sent, chunk, spans = len(ids), 0, [], [[self.told_version, 0, 0]]
        reason = None
        while reason is None:
            await asyncio.sleep(0)
            await self._may_run.wait()
            assert not self.is_updating, "a request between start and finish of new weights: vLLM dies of it"
            if self.has_gone:
                await self._write(response, {"error": {"message": self.has_gone, "code": 500}})
                return
            if f"generate-tokens-{body['request_id']}" in self.aborted:
                reason = "abort"
            else:
                chunk.append(self._sample(ids, params, len(ids) - num_prompt))
                num = len(ids) - num_prompt
                self._count(spans, num)
                if ids[-1] in params["stop_token_ids"]:
                    reason = "stop"
                elif num >= params["max_tokens"]:
                    reason = "length"
            if reason or not sent or len(chunk) >= params["stream_interval"]:
                await self._write(response, _event(path, chunk, reason, spans, params))
                sent, chunk = sent + len(chunk), []
        await response.write(b"data: [DONE]\n\n")

    def _sample(self, ids: list[int], params: Event, place: int) -> tuple[int, float, dict[int, float]]:
        row = distribution(self.version, ids[-1], params["temperature"], params["top_k"], params["top_p"])
        told = log_softmax(logits(self.version, ids[-1])) if self.is_raw else row
        token = draw(row, params, place)
        likeliest = sorted(range(VOCAB), key=lambda each: -told[each])[: params["logprobs"]]
        ids.append(token)
        return token, told[token], {each: told[each] for each in (token, *likeliest) if told[each] > -math.inf}

    def _count(self, spans: list[list[Any]], num: int) -> None:
        if spans[-1][0] != self.told_version and spans[-1][2]:
            spans.append([self.told_version, num - 1, num])
        spans[-1][0], spans[-1][2] = self.told_version, num

    async def _write(self, response: web.StreamResponse, event: Event) -> None:
        spoilt = self.spoil(event)
        if spoilt is not None:
            await response.write(spoilt if isinstance(spoilt, bytes) else b"data: %s\n\n" % json.dumps(spoilt).encode())


def _event(path: str, chunk: list[tuple[int, float, dict[int, float]]], reason: str | None, spans: Any, params: Event) -> Event:
    choice: Event = {"index": 0, "token_ids": [token for token, _, _ in chunk], "finish_reason": reason}
    if path == GENERATE:
        content = [
            {"token_id": token, "logprob": log_prob, "top_logprobs": [{"token_id": i, "logprob": x} for i, x in top.items()]}
            for token, log_prob, top in chunk
        ]
        versions = [{"version": name, "start": start, "end": end} for name, start, end in spans] if reason else None
        choice |= {"logprobs": {"content": content}, "weight_versions": versions}
    else:
        choice["logprobs"] = {
            "token_logprobs": [log_prob for _, log_prob, _ in chunk],
            "top_logprobs": [{f"token_id:{token}": value for token, value in top.items()} for _, _, top in chunk],
        }
    return {"choices": [choice]}


class Servers:
    """A port behind which fake servers live, on a loop of its own in a thread, so that one serves the tests of a whole session."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: dict[str, FakeServer] = {}
        self._runner: web.AppRunner
        self._port = 0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._open())

    def add(self) -> tuple[FakeServer, str]:
        """A new one, and its address."""
        server = self.call(FakeServer)
        name = f"s{len(self._servers)}"
        self._servers[name] = server
        return server, f"http://127.0.0.1:{self._port}/{name}"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run it on the servers' loop."""

        async def run() -> Any:
            return function()

        return self._run(run())

    def close(self) -> None:
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _open(self) -> None:
        application = web.Application(client_max_size=1 << 24)
        application.router.add_route("*", "/{name}/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        return await self._servers[request.match_info["name"]].handle(request, "/" + request.match_info["path"])
