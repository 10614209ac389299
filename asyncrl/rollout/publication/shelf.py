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
import math
import os
import secrets
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors.torch import save_file

from asyncrl import shared_memory
from asyncrl.errors import EngineError
from asyncrl.ports import Json, World

ADVICE = 'or publish through a directory, with rollout.weight_transfer = "directory"'
ALIGN_BYTES = 64
MARK_BYTES = 16
"""At the beginning of the memory: who opens /proc/PID/fd/N in another PID namespace finds another file, or none."""

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Placed:
    """Tensors in shared memory, for as long as this object lives. `info` says to a process of this machine where they are."""

    info: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Written:
    """Tensors in `path`/model.safetensors, for as long as this object lives."""

    path: Path


class Shelf:
    """One a process. folder: where directories are written, this run's alone; None: a temporary one, made when it is needed."""

    def __init__(self, *, world: World, folder: Path | None = None) -> None:
        self.world = world
        self._placed = _Newest(world, _place)
        self._directories = _Directories(folder)
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
        self._names: tuple[tuple[str, weakref.ref[torch.Tensor]], ...] = ()
        self._copy: T | None = None

    async def get(self, tensors: Tensors) -> T:
        async with self._lock:
            if self._copy is None or not self._is_of(tensors):
                self.forget()  # before the next is made: two at a time are memory enough
                self._copy = await self._world.offload(self._make, tensors)
                self._names = tuple((name, weakref.ref(tensor)) for name, tensor in tensors.items())
            return self._copy

    def _is_of(self, tensors: Tensors) -> bool:
        """The same tensors, not merely equal ones, in whatever mapping. Weak: a copy keeps no snapshot alive."""
        return len(self._names) == len(tensors) and all(ref() is tensors.get(name) for name, ref in self._names)

    def forget(self) -> None:
        self._copy, self._names = None, ()


def _place(tensors: Tensors) -> Placed:
    entries: list[Json] = []
    size = MARK_BYTES
    for name, tensor in tensors.items():
        size = -(-size // ALIGN_BYTES) * ALIGN_BYTES
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size])
        size += tensor.numel() * tensor.dtype.itemsize
    fd = shared_memory.reserve(size, error=EngineError, advice=ADVICE)
    try:
        mark = secrets.token_bytes(MARK_BYTES)
        _fill(fd, size, mark, entries, tensors)
    except BaseException:
        os.close(fd)
        raise
    placed = Placed(info={"pid": os.getpid(), "fd": fd, "size": size, "mark": mark.hex(), "tensors": entries})
    weakref.finalize(placed, os.close, fd).atexit = False
    return placed


@torch.inference_mode()
def _fill(fd: int, size: int, mark: bytes, entries: list[Json], tensors: Tensors) -> None:
    memory = shared_memory.mapped(fd, size)
    memory[:MARK_BYTES] = mark
    for name, _, shape, offset in entries:
        if count := math.prod(shape):
            target = torch.frombuffer(memory, dtype=tensors[name].dtype, count=count, offset=offset)
            target.view(shape).copy_(tensors[name])


class _Directories:
    """Directories of weights, each written whole under another name first. Those that nobody uses go with the next one."""

    def __init__(self, folder: Path | None) -> None:
        self._given = folder
        self._folder: Path | None = None
        self._number = 0
        self._unused: deque[Path] = deque()

    def write(self, tensors: Tensors) -> Written:
        try:
            folder = self._folder or self._open()
            self._remove_unused()
            self._number += 1
            path = folder / f"weights-{self._number:06d}"
            unfinished = folder / f"{path.name}.tmp"
            unfinished.mkdir()
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, unfinished / "model.safetensors")
            unfinished.rename(path)
        except OSError as error:
            raise EngineError(f"weights cannot be written for the engines: {error}") from error
        written = Written(path=path)
        weakref.finalize(written, self._unused.append, path).atexit = False
        return written

    def _open(self) -> Path:
        if self._given is None:
            self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-weights-"))
        else:
            self._given.mkdir(parents=True, exist_ok=True)
            self._folder = self._given.resolve()
            self._unused.extend(self._folder.glob("weights-*"))  # of a process that was killed
        return self._folder

    def _remove_unused(self) -> None:
        while self._unused:
            shutil.rmtree(self._unused.popleft(), ignore_errors=True)

    def close(self) -> None:
        self._remove_unused()
        if self._folder is not None and self._given is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
