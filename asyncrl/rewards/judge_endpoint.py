"""One try at an OpenAI-compatible chat endpoint. The only module that loads aiohttp, and only when a judge is used.

judge -> [ChatEndpoint.ask] -> POST base_url/chat/completions

It sends model, one user message, max_tokens and temperature 0. Covered: servers that hang (the caller's deadline), break off,
answer something else, or without end; keys in what they say. Redirects are refused, since they would carry key and row elsewhere;
proxies of the environment are not used.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime

import aiohttp

from asyncrl.config import JudgeConfig
from asyncrl.config.addresses import read_key
from asyncrl.errors import RewardError, RewardSpecError
from asyncrl.ports import Json, World
from asyncrl.rewards.judge import Again, Answer
from asyncrl.wording import named_message_of, shown

CONNECT_TIMEOUT_S = 10.0
"""A server that is there accepts within milliseconds; one try must not spend the whole deadline on one that is not."""
MAX_BODY_BYTES = 4 << 20
"""A longer answer is an error: verdicts have hundreds of bytes."""
EXCERPT_BYTES = 4096
"""Read of an error's body; the first words of it are shown."""
_EXCERPT_CHARS = 200


class ChatEndpoint:
    """Made by `open_endpoint`. Its messages never hold the key, whatever the server says."""

    def __init__(self, session: aiohttp.ClientSession, config: JudgeConfig, key: str, world: World) -> None:
        self._session = session
        self._config = config
        self._url = f"{config.base_url}/chat/completions"
        self._key = key
        self._world = world

    async def ask(self, message: str) -> Answer | Again:
        """One try. The caller bounds the wait; a cancellation closes the connection. Raises RewardError."""
        if self._session.closed:
            raise RewardError("the judge cannot be asked: the scorer was closed")
        has_begun = False
        try:
            async with self._session.post(self._url, data=self._body(message), allow_redirects=False) as response:
                has_begun = True
                return await self._read(response)
        except aiohttp.ClientError as error:
            reason = self._told(named_message_of(error))
            if has_begun or isinstance(error, aiohttp.ClientSSLError) or not isinstance(error, aiohttp.ClientConnectionError):
                raise RewardError(reason) from None  # without its cause, which may hold the key
            return Again(reason=reason)

    def _body(self, message: str) -> bytes:
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": message}],
            "max_tokens": self._config.max_tokens,
            "temperature": 0.0,
        }
        return json.dumps(body).encode("ascii")

    async def _read(self, response: aiohttp.ClientResponse) -> Answer | Again:
        if response.status == 429 or response.status >= 500:
            reason = await self._refusal(response)
            return Again(reason=reason, after_s=self._asked_pause_s(response.headers.get("Retry-After", "")))
        if response.status != 200:
            raise RewardError(await self._refusal(response))
        if response.content_type != "application/json":
            raise RewardError(self._told(f"it answered with {shown(self._without_key(response.content_type))} in place of JSON"))
        text, is_whole = await self._text(response, MAX_BODY_BYTES)
        if not is_whole:
            raise RewardError(self._told(f"its answer has more than {MAX_BODY_BYTES} bytes"))
        return self._answer_in(text)

    async def _refusal(self, response: aiohttp.ClientResponse) -> str:
        try:
            text, _ = await self._text(response, EXCERPT_BYTES)
        except aiohttp.ClientError:
            text = "its words broke off"
        reason, words = (" ".join(said.split())[:_EXCERPT_CHARS] for said in (self._without_key(response.reason or ""), text))
        return self._told(f"it answered {response.status} {reason}{f': {words}' if words else ''}")

    async def _text(self, response: aiohttp.ClientResponse, limit: int) -> tuple[str, bool]:
        """Up to `limit` bytes of the body, without the key, and whether that is all of it."""
        body = bytearray()
        async for part in response.content.iter_chunked(1 << 16):
            body += part
            if len(body) > limit:
                break
        return self._without_key(body[:limit].decode(errors="replace")), len(body) <= limit

    def _answer_in(self, text: str) -> Answer:
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            raise RewardError(self._told(f"its answer is not JSON: {shown(text)}")) from None
        choice = _at(body, "choices", 0)
        content = _at(choice, "message", "content")
        if not isinstance(content, str):
            raise RewardError(self._told(f"its answer has no choices[0].message.content: {shown(text)}"))
        if _at(choice, "finish_reason") == "length":
            raise RewardError(self._told(f"the verdict was cut off at reward.judge.max_tokens = {self._config.max_tokens}"))
        tokens = _at(body, "usage", "total_tokens")
        return Answer(text=content, tokens=tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None)

    def _asked_pause_s(self, header: str) -> float:
        """Seconds of a Retry-After header, a number or a date; 0 without one, or with one that is neither."""
        if header.isascii() and header.strip().isdecimal():
            return float(header.strip()[:9])
        try:
            date = parsedate_to_datetime(header)
        except (ValueError, OverflowError):
            return 0.0
        return max(0.0, date.replace(tzinfo=date.tzinfo or UTC).timestamp() - self._world.wall_time())

    def _told(self, what: str) -> str:
        return self._without_key(f"judge {self._config.model!r} at {self._url}: {what}")

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _at(value: Json, *path: str | int) -> Json:
    """What lies at a path of keys and positions, or None."""
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


@asynccontextmanager
async def open_endpoint(config: JudgeConfig, *, world: World) -> AsyncIterator[ChatEndpoint]:
    """The endpoint; nothing is asked yet. Leaving the block closes its connections. Raises RewardSpecError for a missing key."""
    key = read_key(config.api_key_env, where="reward.judge.api_key_env", error=RewardSpecError)
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # `reward.limits` limits
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        yield ChatEndpoint(session, config, key, world)
