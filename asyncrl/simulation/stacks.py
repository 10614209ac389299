"""Where tasks wait: the chain of coroutines that each is in the middle of, outermost first."""

import asyncio
from collections.abc import Iterator
from types import FrameType
from typing import Any


def waiting_frames(coro: Any) -> Iterator[FrameType]:
    """Frames of a suspended coroutine and of all that it awaits, outermost first."""
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None) or getattr(coro, "ag_frame", None)
        if frame is not None:
            yield frame
        awaited = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None) or getattr(coro, "ag_await", None)
        coro = awaited


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Every task that is not done, by name, with file, line and function of each frame it waits in."""
    tasks = sorted((task for task in asyncio.all_tasks(loop)), key=lambda task: task.get_name())
    return "\n".join(_describe(task) for task in tasks) or "(no task is left)"


def _describe(task: "asyncio.Task[Any]") -> str:
    places = [f"    {_place(frame)}" for frame in waiting_frames(task.get_coro())]
    return "\n".join([f"  task {task.get_name()!r} waits in", *places])


def _place(frame: FrameType) -> str:
    name = frame.f_code.co_filename.rpartition("/")
    folder = name[0].rpartition("/")[2]
    return f"{folder}/{name[2]}:{frame.f_lineno} {frame.f_code.co_qualname}"
