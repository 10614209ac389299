"""Reward managers: how the sessions of a run are scored, given a way to call the user's function or the judge.

A manager is a RewardScorer. The names are verl's, but for `judge`. `rate_limited` and `judge` score as `naive` does: what is
special about them is the call (`limits.py`, `judge.py`).
"""

from collections.abc import Awaitable, Callable, Sequence

from asyncrl.config import RewardConfig
from asyncrl.errors import RewardError
from asyncrl.ports import Json, RewardRequest, RewardResult, RewardScorer
from asyncrl.rewards.results import finite_number, to_result
from asyncrl.wording import names_shown, shown

CallFunction = Callable[[RewardRequest], Awaitable[Json]]
"""Calls the user's function, wherever it runs, and gives back its value as JSON. Raises RewardError or DeadlineError."""


class NaiveManager:
    """Scores each session on its own with one function."""

    def __init__(self, name: str, call: CallFunction) -> None:
        self._name = name
        self._call = call

    async def score(self, request: RewardRequest) -> RewardResult:
        """Raises RewardError or DeadlineError; never invents a number."""
        return to_result(await self._call(request), self._name)


def overlong_penalty(response_len: int, *, max_response_length: int, buffer_len: int, factor: float) -> float:
    """What is added to the score of a long session: 0 up to max_response_length - buffer_len tokens, from there on a straight line
    to -factor at max_response_length, and -factor beyond. Lengths in tokens; 0 < buffer_len <= max_response_length.

    Example: 18,432 tokens of at most 20,480 with a buffer of 4,096 and factor 1 are 2,048 too many: -0.5.
    Source: DAPO, arXiv 2503.14476, eq. 13 (its factor is 1). Differences from verl 0.9.1: (1) the line ends at -factor, as in the
    paper, where verl's goes on: sessions of several rows may have more tokens than a row may; (2) the length is that of all rows
    of a session, not of its last.
    """
    too_many = response_len - (max_response_length - buffer_len)
    return -factor * min(too_many / buffer_len, 1.0) if too_many > 0 else 0.0


class DapoManager:
    """The score of another manager, less the penalty of a long session.

    `extra` gets `overlong_reward` (the penalty, at most 0) and `overlong` (is there one), in place of what the function calls so.
    """

    def __init__(self, inner: RewardScorer, *, max_response_length: int, buffer_len: int, factor: float) -> None:
        assert 0 < buffer_len <= max_response_length
        self._inner = inner
        self._max_response_length = max_response_length
        self._buffer_len = buffer_len
        self._factor = factor

    async def score(self, request: RewardRequest) -> RewardResult:
        """Raises what the other manager raises."""
        result = await self._inner.score(request)
        penalty = overlong_penalty(
            request.response_len,
            max_response_length=self._max_response_length,
            buffer_len=self._buffer_len,
            factor=self._factor,
        )
        told = {**result.extra, "overlong_reward": penalty, "overlong": penalty < 0}
        return RewardResult(score=result.score + penalty, extra=told)


class GdpoManager:
    """The score of another manager, with components of which each session must have every one. name: of the function, for messages.

    `extra` keeps the components, as finite floats; `score` may be one of them. GDPO (arXiv 2601.05242) normalises each on its own.
    """

    def __init__(self, inner: RewardScorer, name: str, components: Sequence[str]) -> None:
        assert components
        self._inner = inner
        self._name = name
        self._components = components

    async def score(self, request: RewardRequest) -> RewardResult:
        """Raises RewardError, also for a component that is missing or no finite number: 0 would be a reward that nobody gave."""
        result = await self._inner.score(request)
        told = {**result.extra, "score": result.score}
        found = {name: self._component(name, told) for name in self._components}
        return RewardResult(score=result.score, extra={**result.extra, **found})

    def _component(self, name: str, told: dict[str, Json]) -> float:
        if name not in told:
            raise RewardError(
                f"reward function {self._name!r} returned no component {name!r} (algorithm.gdpo_reward_keys); it returned "
                f"{names_shown(told)}"
            )
        number = finite_number(told[name])
        if number is None:
            raise RewardError(f"reward function {self._name!r} returned {name!r}: {shown(told[name])}; it must be a finite number")
        return number


def manager_of(
    config: RewardConfig, name: str, call: CallFunction, *, max_response_length: int, components: Sequence[str]
) -> RewardScorer:
    """The manager that `reward.manager` names.

    name: of what `call` calls, for messages; components: what each session must have (`algorithm.gdpo_reward_keys`).
    """
    scorer: RewardScorer = NaiveManager(name, call)
    if config.manager == "dapo":
        scorer = DapoManager(
            scorer,
            max_response_length=max_response_length,
            buffer_len=config.overlong_buffer_len,
            factor=config.overlong_penalty_factor,
        )
    # Whatever the manager: a session that lacks a component fails alone, and not the step that it is in.
    return GdpoManager(scorer, name, components) if components else scorer
