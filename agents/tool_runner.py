"""ToolRunner: runs tool calls with a deadline each, and turns whatever happens into a text for the model.

Place: tool_agent -> [tool_runner] -> asyncrl.tools. One for all sessions of a run, so that limits hold over all of them.

Invariants:
1. Every call ends: at its result, its error or its deadline. What still runs then is left behind and counted.
2. What the model or the tool does wrong is an answer; only infrastructure (`is_infrastructure`) and cancellation are raised.
3. Sync tools never run on the loop; an async tool runs in a task of its own, so that it cannot cancel or hold its session.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

from asyncrl.agents.guests import Guests
from asyncrl.agents.tool_calls import ToolCall
from asyncrl.config import AgentConfig
from asyncrl.errors import AsyncRLError, DeadlineError
from asyncrl.ports import Json, World
from asyncrl.tools import Tool, ToolArgumentError
from asyncrl.wording import named_message_of


class Outcome(StrEnum):
    """How a call ended."""

    OK = "ok"
    ERROR = "error"  # the tool raised
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"  # no such tool
    INVALID = "invalid"  # arguments that do not fit the schema
    REFUSED = "refused"  # too many earlier calls of its kind (threads, or tasks) still hang


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """Text for the model, and how the call ended."""

    text: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception as a value: some (StopIteration) cannot travel through a future."""

    error: BaseException


def is_infrastructure(error: BaseException) -> bool:
    """Errors that say nothing about the call: the session fails instead of telling the model. Other OSErrors, such as a file that
    is not there, are the tool's answer."""
    return isinstance(error, (MemoryError, ConnectionError, AsyncRLError))


class ToolRunner:
    """An async context manager. Closing cancels async tools that still run."""

    def __init__(self, tools: Mapping[str, Tool], config: AgentConfig, world: World) -> None:
        self.tools = dict(tools)
        self._config = config
        self._world = world
        self._places = {name: asyncio.Semaphore(config.max_concurrent_tools) for name in tools}
        self._guests = Guests()
        self._outcomes: Counter[str] = Counter()

    async def run(self, call: ToolCall, tools_kwargs: Mapping[str, Json]) -> ToolAnswer:
        """Answer one call. `tools_kwargs`: the dataset row's, by tool name. Raises infrastructure errors and cancellation only."""
        answer = await self._answer(call, tools_kwargs)
        self._outcomes[answer.outcome] += 1
        return answer

    async def _answer(self, call: ToolCall, tools_kwargs: Mapping[str, Json]) -> ToolAnswer:
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return ToolAnswer(text=f"error: there is no tool {call.name[:80]!r}; tools: {known}", outcome=Outcome.UNKNOWN)
        try:
            arguments = tool.check(call.arguments)
        except ToolArgumentError as error:
            return ToolAnswer(text=f"error: {error}", outcome=Outcome.INVALID)
        async with self._places[call.name]:  # bounded: each holder has a deadline
            return await self._call(tool, arguments, tools_kwargs.get(call.name) or {})

    async def _call(self, tool: Tool, arguments: dict[str, Json], tools_kwargs: dict[str, Json]) -> ToolAnswer:
        hanging = self._guests.num_late if tool.is_async else self._world.abandoned("tools")
        if hanging >= self._config.max_abandoned_tools:
            return ToolAnswer(text=f"error: {tool.name} is not available: too many calls hang", outcome=Outcome.REFUSED)
        timeout_s = self._config.tool_timeout_s
        try:
            if tool.is_async:
                call = _call_async(tool, arguments, tools_kwargs)
                result = await self._guests.run(call, name=f"tool {tool.name}", timeout_s=timeout_s, limit="agent.tool_timeout_s")
            else:
                result = await self._world.offload(_call_sync, tool, arguments, tools_kwargs, pool="tools", timeout_s=timeout_s)
        except DeadlineError:
            return ToolAnswer(text=f"error: {tool.name} took longer than {timeout_s:g} s", outcome=Outcome.TIMEOUT)
        if isinstance(result, _Raised):
            return _error_answer(result.error)
        return ToolAnswer(text=result, outcome=Outcome.OK)

    @property
    def num_abandoned(self) -> int:
        """Calls whose deadline has passed and that still run, in threads or tasks."""
        return self._world.abandoned("tools") + self._guests.num_late

    def stats(self) -> dict[str, float]:
        """Calls so far by outcome, and those `abandoned` now."""
        return {str(outcome): float(self._outcomes[outcome]) for outcome in Outcome} | {"abandoned": float(self.num_abandoned)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._guests.close()


def _call_sync(tool: Tool, arguments: dict[str, Json], tools_kwargs: dict[str, Json]) -> str | _Raised:
    """In a thread. Every exception comes back as a value, SystemExit too: a tool does not end the run."""
    try:
        return _checked_text(tool, tool.call(arguments, tools_kwargs))
    except BaseException as error:  # it is answered or raised on the loop
        return _Raised(error)


async def _call_async(tool: Tool, arguments: dict[str, Json], tools_kwargs: dict[str, Json]) -> str | _Raised:
    try:
        result = tool.call(arguments, tools_kwargs)
        return _checked_text(tool, await result if isinstance(result, Awaitable) else result)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # it is answered or raised by the caller
        return _Raised(error)


def _checked_text(tool: Tool, result: object) -> str:
    if isinstance(result, str):
        return result
    raise TypeError(f"{tool.name} returned {type(result).__name__}, not text")


def _error_answer(error: BaseException) -> ToolAnswer:
    if is_infrastructure(error) or not isinstance(error, (Exception, SystemExit)):
        raise error
    return ToolAnswer(text=f"error: {named_message_of(error)}", outcome=Outcome.ERROR)
