"""What the interpreter does at moments of its own choosing, taken into hand: garbage collection, and the end of suspended code.

loop -> [garbage] -> gc

A collection calls finalizers, and when it comes by itself depends on everything the process did before: so it comes by turns of
the loop instead. A suspended generator or coroutine that is freed runs its `finally` blocks: after a crash it must not.
"""

import ctypes
import gc
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

Suspended = Generator[Any, Any, Any] | Coroutine[Any, Any, Any] | AsyncGenerator[Any, Any]

_KINDS = frozenset((GeneratorType, CoroutineType, AsyncGeneratorType))
_COMPLETED, _CLEARED = 1, 4
"""States of a frame that has ended: it still holds its variables, or no more. Below 0: not begun, and one more: suspended. So in
CPython 3.11 to 3.13."""


FULL_COLLECTION_AT = 400_000
"""Objects that outlived a run, and may be garbage by now, at which the whole process is searched for garbage: about 100 lives of
the reference scenario and 70 MiB, for a quarter of a second."""


class _State:
    """Of the process. `survivors`: objects that have outlived runs since the last full collection."""

    survivors = 0
    is_taken = False


@contextmanager
def collecting_by_hand() -> Iterator[None]:
    """Inside this block the collector runs only when it is called, and only over what was made inside it. Raises RuntimeError
    when another thread is in such a block: what was made inside would be that of both.
    """
    if _State.is_taken:
        raise RuntimeError("one virtual loop at a time can run in a process")
    _State.is_taken = True
    was_enabled = gc.isenabled()
    gc.disable()
    _collect_what_earlier_runs_left()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _State.is_taken = False
        if was_enabled:
            gc.enable()


def _collect_what_earlier_runs_left() -> None:
    """`freeze` and `unfreeze` make all of it old without counting it, so that the collector by itself would never look at it. A
    collection of young objects would not do: what a run was begun with is old by now, and holds the rest.
    """
    _State.survivors += len(gc.get_objects(0)) + len(gc.get_objects(1))
    if _State.survivors > FULL_COLLECTION_AT:
        gc.collect()
        _State.survivors = 0


def suspended() -> list[Suspended]:
    """Every generator and coroutine that waits in the middle of its code, or has not begun; made inside `collecting_by_hand`."""
    offset = _state_offset()
    return [thing for thing in gc.get_objects() if type(thing) in _KINDS and _state(thing, offset).value < 0]


def suspended_in(coro: object) -> list[Suspended]:
    """What a task runs: a coroutine, or a wrapper that holds one."""
    held: list[Any] = [coro] if type(coro) in _KINDS else gc.get_referents(coro, *gc.get_referents(coro))
    return [thing for thing in held if type(thing) in _KINDS]


def discard(things: Iterable[Suspended]) -> None:
    """They have ended, without running any more of their code; what they hold is freed with them. Nobody may wait for them."""
    offset = _state_offset()
    for thing in things:
        state = _state(thing, offset)
        if state.value < 0:
            state.value = _COMPLETED


def _state(thing: object, offset: int) -> ctypes.c_int8:
    return ctypes.c_int8.from_address(id(thing) + offset)


@cache
def _state_offset() -> int:
    """Where a generator keeps the state of its frame. Found by watching one go through its life: the place has moved between
    versions of CPython. Raises RuntimeError for an interpreter in which it is not to be found.

    There is no other way to let go of a suspended frame: closing it runs its code, and keeping it for ever is a leak.
    """
    thing = (number for number in range(2))
    created = _bytes_of(thing)
    next(thing)
    waiting = _bytes_of(thing)
    tuple(thing)
    ended = _bytes_of(thing)
    places = [
        place
        for place, states in enumerate(zip(created, waiting, ended, strict=True))
        if states[0] > 128 and states[1] == states[0] + 1 and states[2] == _CLEARED
    ]
    if len(places) != 1:
        raise RuntimeError("crashes cannot be simulated with this Python: how it keeps suspended code is not known")
    return places[0]


def _bytes_of(thing: object) -> bytes:
    return ctypes.string_at(id(thing), type(thing).__basicsize__)
