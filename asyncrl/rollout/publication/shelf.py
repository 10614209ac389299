"""Shelf: one copy of a snapshot for all engines of this process, in nameless memory or in a directory.

snapshot -> [Shelf] -> Placed (memory) or Written (directory) -> carrier -> Control

A snapshot is known by its tensors, so a second engine and one that was restarted find the copy there. The newest copy of each kind
stands on the shelf; an older one lives as long as a publication that uses it.

Invariants:
1. A copy is never written to again once `place` or `write` has returned it.
2. Nothing of the memory is left when the process ends, however it ends. Directories are left by `kill -9` alone; the next run with
   the same folder removes them.
"""

import asyncio
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from asyncrl.ports import World
from asyncrl.rollout.publication.placed import Placed, Tensors, place
from asyncrl.rollout.publication.written import Directories, Written

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Shelf:
    """One a process. folder: where directories are written, this run's alone; None: a temporary one, made when it is needed."""

    def __init__(self, *, world: World, folder: Path | None = None) -> None:
        self.world = world
        self._directories = Directories(folder)
        self._placed = _Newest(world, place)
        self._written = _Newest(world, self._directories.write)

    async def place(self, tensors: Tensors) -> Placed:
        """The tensors in shared memory. Raises EngineError when there is no room for them."""
        return await self._placed.get(tensors)

    async def write(self, tensors: Tensors) -> Written:
        """The tensors in a directory. Raises EngineError when it cannot be written."""
        return await self._written.get(tensors)

    async def close(self) -> None:
        """Let go of all copies; twice is once."""
        self._placed.forget()
        self._written.forget()
        await self.world.offload(self._directories.close)


class _Newest(Generic[T]):
    """The copy that was made last, and of which tensors it is. One is made at a time: who asks meanwhile waits, and finds it."""

    def __init__(self, world: World, make: Callable[[Tensors], T]) -> None:
        self._world = world
        self._make = make
        self._lock = asyncio.Lock()
        self._known: tuple[_Known, ...] = ()
        self._copy: T | None = None

    async def get(self, tensors: Tensors) -> T:
        async with self._lock:
            if self._copy is None or not self._is_of(tensors):
                self.forget()  # before the next is made: two at a time are memory enough
                self._copy = await self._world.offload(self._make, tensors)
                self._known = tuple(_Known(name, tensor) for name, tensor in tensors.items())
            return self._copy

    def _is_of(self, tensors: Tensors) -> bool:
        """The same tensors, not merely equal ones, in whatever mapping."""
        return len(self._known) == len(tensors) and all(known.is_in(tensors) for known in self._known)

    def forget(self) -> None:
        self._copy, self._known = None, ()


class _Known:
    """A tensor that was copied, and how often it had been written to by then: a snapshot is not, but who trusts in that trains on
    tokens of unknown weights. Weak: a copy keeps no snapshot alive."""

    __slots__ = ("_name", "_tensor", "_writes")

    def __init__(self, name: str, tensor: "torch.Tensor") -> None:
        self._name = name
        self._tensor = weakref.ref(tensor)
        self._writes = _num_writes(tensor)

    def is_in(self, tensors: Tensors) -> bool:
        tensor = self._tensor()
        return tensor is not None and tensor is tensors.get(self._name) and _num_writes(tensor) == self._writes


def _num_writes(tensor: "torch.Tensor") -> int:
    """Inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
