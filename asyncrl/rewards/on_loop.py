"""`async def` reward functions: awaited on the event loop, where they can share connections, under the same deadline.

They are guests of the loop: one that computes for long, or holds on when cancelled, delays everybody. Such work belongs in a plain
function, which gets a process.
"""

import asyncio

from asyncrl.errors import DeadlineError, RewardError
from asyncrl.ports import Json, RewardRequest, copied
from asyncrl.rewards import frames
from asyncrl.rewards.spec import RewardFunction
from asyncrl.waiting import is_asked_to_end, within
from asyncrl.wording import describe_error


class LoopFunction:
    """Calls one async function; its value goes through JSON as a worker's does, so both kinds may return the same."""

    def __init__(self, name: str, function: RewardFunction, *, timeout_s: float) -> None:
        self._name = name
        self._function = function
        self._timeout_s = timeout_s

    async def __call__(self, request: RewardRequest) -> Json:
        """Raises DeadlineError or RewardError."""
        value = await self._value(request)
        try:
            return frames.decode(frames.encode(value)[frames.LENGTH_BYTES :])
        except frames.FrameError as error:
            raise RewardError(
                f"reward function {self._name!r} returned {type(value).__name__} that cannot be kept: {error}"
            ) from error

    async def _value(self, request: RewardRequest) -> Json:
        try:
            async with within(self._timeout_s, self._late):
                value = await self._function(
                    data_source=request.data_source,
                    solution_str=request.solution_str,
                    # Copies: what the function changes, the other sessions of the row must not see.
                    ground_truth=copied(request.ground_truth),
                    extra_info=copied(request.extra_info),
                )
        except DeadlineError:
            raise
        except asyncio.CancelledError as error:
            if is_asked_to_end():
                raise
            # A cancelled future inside the function: passed on, it would end the session's task without a word.
            raise RewardError(f"reward function {self._name!r} raised {describe_error(error)}") from error
        except (Exception, SystemExit) as error:
            raise RewardError(f"reward function {self._name!r} raised {describe_error(error)}") from error
        return value

    def _late(self) -> str:
        return f"reward function {self._name!r} took longer than reward.timeout_s = {self._timeout_s:g}"
