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

from asyncrl.agents.tool_calls import ToolCall
from asyncrl.config import AgentConfig
from asyncrl.errors import AsyncRLError, DeadlineError
from asyncrl.ports import Json, World
from asyncrl.tools import Tool, ToolArgumentError

_CLOSE_TIMEOUT_S = 1.0
"""Seconds that cancelled async tools get to end when the runner is closed."""
_MESSAGE_CHARS = 500
"""Characters of an exception's message that the model is shown; a traceback in a message helps nobody."""


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
        self._tasks: set[asyncio.Task[str | _Raised]] = set()
        self._abandoned: set[asyncio.Task[str | _Raised]] = set()
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
        hanging = self._abandoned_tasks if tool.is_async else self._world.abandoned("tools")
        if hanging >= self._config.max_abandoned_tools:
            return ToolAnswer(text=f"error: {tool.name} is not available: too many calls hang", outcome=Outcome.REFUSED)
        timeout_s = self._config.tool_timeout_s
        try:
            if tool.is_async:
                result = await self._in_task(tool, arguments, tools_kwargs, timeout_s)
            else:
                result = await self._world.offload(_call_sync, tool, arguments, tools_kwargs, pool="tools", timeout_s=timeout_s)
        except DeadlineError:
            return ToolAnswer(text=f"error: {tool.name} took longer than {timeout_s:g} s", outcome=Outcome.TIMEOUT)
        if isinstance(result, _Raised):
            return _error_answer(result.error)
        return ToolAnswer(text=result, outcome=Outcome.OK)

    async def _in_task(
        self, tool: Tool, arguments: dict[str, Json], tools_kwargs: dict[str, Json], timeout_s: float
    ) -> str | _Raised:
        # Not a TaskGroup: a tool that swallows its cancellation must not hold its session beyond the deadline.
        task = asyncio.create_task(_call_async(tool, arguments, tools_kwargs), name=f"tool {tool.name}")
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            if not task.done():
                self._abandoned.add(task)
                task.cancel()
        if not task.done():
            raise DeadlineError(f"tool {tool.name!r} took longer than {timeout_s:g} s")
        return task.result()

    def _forget(self, task: asyncio.Task[str | _Raised]) -> None:
        self._tasks.discard(task)
        self._abandoned.discard(task)

    @property
    def num_abandoned(self) -> int:
        """Calls whose deadline has passed and that still run, in threads or tasks."""
        return self._world.abandoned("tools") + self._abandoned_tasks

    @property
    def _abandoned_tasks(self) -> int:
        return sum(not task.done() for task in self._abandoned)

    def stats(self) -> dict[str, float]:
        """`tools/<outcome>` counts, and `tools/abandoned`."""
        counts = {f"tools/{outcome}": float(self._outcomes[outcome]) for outcome in Outcome}
        return counts | {"tools/abandoned": float(self.num_abandoned)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        left = set(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CLOSE_TIMEOUT_S)


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
    message = " ".join(str(error).split())[:_MESSAGE_CHARS]
    return ToolAnswer(text=f"error: {type(error).__name__}: {message}".removesuffix(": "), outcome=Outcome.ERROR)
