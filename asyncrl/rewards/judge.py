"""The judge: a session is scored by a model behind an OpenAI-compatible endpoint.

request -> [JudgePrompt] -> message -> [Limits -> endpoint, and again] -> what it said -> [read_verdict] -> a score, or an error.

A scoring changes nothing at the endpoint, so it may be tried again: after a connection that was lost before an answer began, and
after the answers 429 and 5xx. Each try waits in line anew, so that limits hold for what the endpoint sees. All tries and the pauses
between them, the line aside, take at most `reward.timeout_s`. Why no library for it: docs/decisions/judge_retries.md.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from asyncrl.config import RewardConfig
from asyncrl.errors import RewardError
from asyncrl.ports import Json, RewardRequest, World
from asyncrl.rewards.judge_prompt import JudgePrompt
from asyncrl.rewards.judge_verdict import read_verdict
from asyncrl.rewards.limits import Limits
from asyncrl.waiting import within

FIRST_PAUSE_S = 0.5
"""Before the second try, less up to a half; each further pause is twice as long. A server that sheds load needs about that."""
LONGEST_PAUSE_S = 30.0
"""Longer pauses find no server that shorter ones would not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the judge said, and the tokens that it took, where the endpoint tells."""

    text: str
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """This try came to nothing for a reason that may pass. after_s: seconds that the endpoint asks to wait."""

    reason: str
    after_s: float = 0.0


class Endpoint(Protocol):
    """One try. Raises RewardError for what another try would not mend. The caller bounds the wait."""

    async def ask(self, message: str) -> Answer | Again: ...


class Judge:
    """Scores by asking; a CallFunction. Its value is the verdict, and `judge_tokens` and `judge_attempts` beside it."""

    def __init__(self, endpoint: Endpoint, prompt: JudgePrompt, limits: Limits, config: RewardConfig, world: World) -> None:
        self._endpoint = endpoint
        self._prompt = prompt
        self._limits = limits
        self._timeout_s = config.timeout_s
        self._max_attempts = config.judge.max_attempts
        self._world = world
        self._counts = {"calls": 0, "attempts": 0}

    async def __call__(self, request: RewardRequest) -> Json:
        """Raises RewardError or DeadlineError."""
        self._counts["calls"] += 1
        answer, attempts = await self._answer(self._prompt.message(request), self._counts["calls"])
        tokens = {} if answer.tokens is None else {"judge_tokens": answer.tokens}
        return {**read_verdict(answer.text), **tokens, "judge_attempts": attempts}

    async def _answer(self, message: str, call: int) -> tuple[Answer, int]:
        """What the judge said, and at which try."""
        clock, left_s = asyncio.get_running_loop().time, self._timeout_s
        for attempt in count(1):
            async with self._limits.place():
                began_s = clock()
                self._counts["attempts"] += 1
                async with within(left_s, self._late):
                    answer = await self._endpoint.ask(message)
                left_s -= clock() - began_s
            if isinstance(answer, Answer):
                return answer, attempt
            pause_s = self._pause_s(answer, attempt, call, left_s)
            left_s -= pause_s
            await _wait(pause_s)
        raise AssertionError

    def _pause_s(self, answer: Again, attempt: int, call: int, left_s: float) -> float:
        """Seconds until the next try: what the endpoint asks for, and a pause that doubles, drawn so that sessions which failed
        together do not come back together. Raises RewardError when there is no next try."""
        if attempt >= self._max_attempts:
            raise RewardError(f"the judge gave no answer in {attempt} attempts; the last: {answer.reason}")
        share = self._world.seed("judge pause", call, attempt) / 2**63
        pause_s = answer.after_s + min(FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 10), LONGEST_PAUSE_S) * (1 - share / 2)
        if pause_s >= left_s:
            raise RewardError(
                f"the judge gave no answer in {attempt} attempts, and a pause of {pause_s:.3g} s is more than is left of "
                f"reward.timeout_s = {self._timeout_s:g}; the last: {answer.reason}"
            )
        return pause_s

    def _late(self) -> str:
        return f"the judge took longer than reward.timeout_s = {self._timeout_s:g}"

    def stats(self) -> dict[str, float]:
        """Calls and tries, and what the limits count."""
        return {name: float(number) for name, number in self._counts.items()} | self._limits.stats()


async def _wait(seconds: float) -> None:
    """Nothing else is waited for, so there is nothing to be woken by but the time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_future()
