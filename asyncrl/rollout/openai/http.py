"""One server over HTTP: JSON calls, and answers that come as a stream of events. Only this module uses aiohttp.

OpenAIEngine, HTTPControl, probe -> [Http] -> the server

Covered: servers that cannot be reached, break off, hang (connections have a deadline, and so has every call but a stream, whose
caller sees by its events that it goes on), answer something else, or without end; keys in what they say. Redirects are refused,
since they would carry key and prompts elsewhere; proxies of the environment are not used.

What is tried again: a connection that broke before an answer began, where the call changes nothing or may be repeated. Sampling
changes nothing at the server. An answer that broke off in the middle is not asked for again.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from itertools import count

import aiohttp
import msgspec

from asyncrl.config.addresses import read_key
from asyncrl.errors import ConfigError
from asyncrl.ports import Json, World
from asyncrl.rollout.openai.errors import ServerLostError, ServerRefusedError
from asyncrl.rollout.openai.settings import ServerSettings
from asyncrl.waiting import back_off, within
from asyncrl.wording import named_message_of, shown

MAX_TRIES = 3
"""Connections that a server closes just as they are used again, or a moment without a listener; more is a server that is gone."""
FIRST_PAUSE_S = 0.1
"""Before the second try, less up to a half; the next is twice as long."""
KEEP_ALIVE_S = 4.0
"""A second less than uvicorn keeps an idle connection: few are used again just as it closes them."""
MAX_OPENING = 64
"""Streams whose answer has not begun. Hundreds that are sent in one turn of the loop hold it for a third of a second."""
MAX_BYTES = 4 << 20
"""Of one event, or of the answer to a call. An event has some hundred bytes a token, of a few tokens."""
_EXCERPT_BYTES = 4096
_EXCERPT_CHARS = 300


class Http:
    """Made by `open_http`. Its messages name the server, and never hold its key."""

    def __init__(self, session: aiohttp.ClientSession, settings: ServerSettings, key: str, world: World) -> None:
        self._session = session
        self._root = settings.root
        self._control_timeout_s = settings.control_timeout_s
        self._key = key
        self._world = world
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self._num_sent = 0

    async def call(
        self,
        method: str,
        path: str,
        body: Json = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        may_repeat: bool = False,
    ) -> Json:
        """The answer's JSON; None for an empty one. timeout_s: None is that of control calls.

        Raises ServerLostError and ServerRefusedError.
        """
        timeout_s = timeout_s or self._control_timeout_s
        try:
            async with (
                within(timeout_s, lambda: f"no answer to {method} {path} within {timeout_s:g} s"),
                await self._send(method, path, body, params=params, max_tries=MAX_TRIES if may_repeat else 1) as response,
            ):
                return await self._read(response)
        except TimeoutError as error:
            raise ServerLostError(self.told(str(error))) from None

    @asynccontextmanager
    async def stream(self, path: str, body: Json, headers: Mapping[str, str] | None = None) -> AsyncIterator[AsyncIterator[bytes]]:
        """The data of each event of the answer, as it comes. Leaving the block before the end closes the connection.

        Raises ServerLostError and ServerRefusedError, at the start and while it is read.
        """
        async with await self._opened(path, body, headers) as response:
            if response.status != 200:
                raise await self._refusal(response)
            if response.content_type != "text/event-stream":
                words = f"{path} answered with {shown(response.content_type)} in place of a stream of events"
                raise ServerRefusedError(self.told(words), response.status)
            async with aclosing(self._events(response)) as events:
                yield events

    async def _opened(self, path: str, body: Json, headers: Mapping[str, str] | None) -> aiohttp.ClientResponse:
        async with self._opening:
            return await self._send("POST", path, body, headers=headers, max_tries=MAX_TRIES)

    async def _send(
        self,
        method: str,
        path: str,
        body: Json,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        max_tries: int,
    ) -> aiohttp.ClientResponse:
        """The beginning of an answer."""
        data = None if body is None else msgspec.json.encode(body)
        for attempt in count(1):
            try:
                return await self._session.request(
                    method, self._root + path, data=data, params=params, headers=headers, allow_redirects=False
                )
            except aiohttp.ClientConnectionError as error:
                if attempt >= max_tries or isinstance(error, aiohttp.ClientSSLError):
                    raise ServerLostError(self.told(named_message_of(error))) from None  # the cause may hold the key
            except aiohttp.ClientError as error:
                raise ServerLostError(self.told(f"{path}: {named_message_of(error)}"), has_begun=True) from None
            await back_off(self._pause_s(attempt))
        raise AssertionError

    def _pause_s(self, attempt: int) -> float:
        """Drawn, so that calls which failed together do not come back together."""
        self._num_sent += 1
        share = self._world.seed("http pause", self._root, self._num_sent) / 2**63
        return FIRST_PAUSE_S * 2.0 ** (attempt - 1) * (1 - share / 2)

    async def _read(self, response: aiohttp.ClientResponse) -> Json:
        if response.status != 200:
            raise await self._refusal(response)
        body, is_whole = await self._body(response, MAX_BYTES)
        if not is_whole:
            raise ServerRefusedError(self.told(f"{response.url.path} answered with more than {MAX_BYTES} bytes"), response.status)
        if not body:
            return None
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            words = f"{response.url.path} answered with what is no JSON: {shown(body[:_EXCERPT_BYTES].decode(errors='replace'))}"
            raise ServerRefusedError(self.told(words), response.status) from None

    async def _refusal(self, response: aiohttp.ClientResponse) -> ServerRefusedError:
        body, _ = await self._body(response, _EXCERPT_BYTES)
        words = " ".join(said_in(body).split())[:_EXCERPT_CHARS]
        reason = f"{response.url.path} answered {response.status} {response.reason or ''}".rstrip()
        return ServerRefusedError(self.told(f"{reason}{f': {words}' if words else ''}"), response.status)

    async def _body(self, response: aiohttp.ClientResponse, limit: int) -> tuple[bytes, bool]:
        """Up to `limit` bytes, and whether that is all."""
        body = bytearray()
        async for part in self._parts(response):
            body += part
            if len(body) > limit:
                break
        return bytes(body[:limit]), len(body) <= limit

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        left = b""
        async for part in self._parts(response):
            *lines, left = (left + part).split(b"\n")
            if max(map(len, (left, *lines))) > MAX_BYTES:
                raise ServerRefusedError(self.told(f"an event of more than {MAX_BYTES} bytes"), response.status)
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()

    async def _parts(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        try:
            async for part in response.content.iter_any():
                yield part
        except aiohttp.ClientError as error:
            words = f"the answer of {response.url.path} broke off: {named_message_of(error)}"
            raise ServerLostError(self.told(words), has_begun=True) from None

    def told(self, what: str) -> str:
        """`what`, with the server's address before it, once."""
        text = what if what.startswith(self._root) else f"{self._root}: {what}"
        return text.replace(self._key, "***") if self._key else text


class _Words(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    """`{"error": {"message": ...}}`, as OpenAI and vLLM answer; FastAPI's own errors have `detail`."""

    error: _Words | str = ""
    detail: Json = ""


def said_in(body: bytes) -> str:
    """The words in the body of an error."""
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace")
    words = refusal.error if isinstance(refusal.error, str) else refusal.error.message
    return words or str(refusal.detail or body.decode(errors="replace"))


@asynccontextmanager
async def open_http(settings: ServerSettings, *, world: World) -> AsyncIterator[Http]:
    """Nothing is asked yet. Leaving the block closes all connections. Raises ConfigError for a missing key."""
    key = read_key(settings.api_key_env, where="rollout.openai.api_key_env", error=ConfigError)
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),  # the engine limits
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        yield Http(session, settings, key, world)
