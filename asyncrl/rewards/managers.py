"""Reward managers: how the sessions of a run are scored, given a way to call the user's function.

A manager is a RewardScorer. `naive` is verl's name for the plain one. Another manager is a class here and a line in MANAGERS.
"""

from collections.abc import Awaitable, Callable, Mapping

from asyncrl.ports import Json, RewardRequest, RewardResult, RewardScorer
from asyncrl.rewards.results import to_result

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


MANAGERS: Mapping[str, Callable[[str, CallFunction], RewardScorer]] = {"naive": NaiveManager}
"""Managers by the name that `reward.manager` gives them."""
