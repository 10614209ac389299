"""Where tasks wait: the chain of coroutines that each is in the middle of, outermost first, and what the innermost waits for.

loop -> [stacks] -> DeadlockError, EndlessError

A wrapper that a task runs in place of its coroutine shows that coroutine's `cr_frame` and `cr_await` as its own.
"""

import asyncio
import gc
from collections.abc import Iterable, Iterator
from types import AsyncGeneratorType, CoroutineType, FrameType
from typing import Any

MAX_NAMES = 8
"""Tasks named of those that wait in the same place."""


def waiting_frames(coro: Any) -> Iterator[FrameType]:
    """Frames of a suspended coroutine and of all that it awaits, outermost first."""
    seen: set[int] = set()
    while coro is not None and id(coro) not in seen:
        seen.add(id(coro))
        frame = _first(coro, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            yield frame
        coro = _first(coro, "cr_await", "gi_yieldfrom", "ag_await") or _inside(coro)


def describe_tasks(tasks: Iterable["asyncio.Task[Any]"]) -> str:
    """Every task, by name, with file, line and function of each frame it waits in; those that wait alike are told together."""
    names: dict[str, list[str]] = {}
    for task in tasks:
        names.setdefault(_where(task), []).append(task.get_name())
    return "\n".join(f"  {_listed(of_place)}\n{where}" for where, of_place in names.items()) or "  (no task is left)"


def _first(thing: Any, *attributes: str) -> Any:
    return next((value for name in attributes if (value := getattr(thing, name, None)) is not None), None)


def _inside(thing: Any) -> Any:
    """A step of an async generator, and what `coroutine.__await__` gives, do not say what they run; the collector knows."""
    if hasattr(thing, "cr_frame") or hasattr(thing, "gi_frame") or hasattr(thing, "ag_frame") or asyncio.isfuture(thing):
        return None
    return next((held for held in gc.get_referents(thing) if isinstance(held, AsyncGeneratorType | CoroutineType)), None)


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:MAX_NAMES]))
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"task {shown} waits" if len(names) == 1 else f"{len(names)} tasks {shown}{more} wait"


def _where(task: "asyncio.Task[Any]") -> str:
    places = [f"    in {_place(frame)}" for frame in waiting_frames(task.get_coro())]
    waiter = getattr(task, "_fut_waiter", None)
    if waiter is None:
        places.append("    for its turn")
    elif isinstance(waiter, asyncio.Task):
        places.append(f"    for task {waiter.get_name()!r}")
    else:
        places.append(f"    for a {type(waiter).__name__.removeprefix('Sim').lstrip('_').lower()}")
    return "\n".join(places)


def _place(frame: FrameType) -> str:
    folder, _, file = frame.f_code.co_filename.rpartition("/")
    return f"{folder.rpartition('/')[2]}/{file}:{frame.f_lineno} {frame.f_code.co_qualname}"
