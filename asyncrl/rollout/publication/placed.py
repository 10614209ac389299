"""Tensors in nameless memory, laid out by one process and opened by others of this machine, which are told where to look.

Shelf -> [place] -> Placed.info -> Control -> a worker -> [opened] -> its model
"""

import math
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncrl import shared_memory
from asyncrl.errors import EngineError
from asyncrl.ports import Json

ADVICE = 'or publish through a directory, with rollout.weight_transfer = "directory"'
ALIGN_BYTES = 64
MARK_BYTES = 16
"""Random, at the beginning of the memory: who opens /proc/PID/fd/N in another container finds another file, or none."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where tensors are: memory of `size` bytes that process `pid` holds open as `fd`, with `mark` (hexadecimal) at its beginning.

    tensors: [name, dtype, shape, offset in bytes], row-major, one after another.
    """

    pid: int
    fd: int
    size: int
    mark: str
    tensors: list[list[Json]]


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Placed:
    """Tensors in shared memory, for as long as this object lives, and longer where a process has opened it."""

    where: Where


def place(tensors: Tensors) -> Placed:
    """Copy them. Raises EngineError when there is no room."""
    entries: list[list[Json]] = []
    size = MARK_BYTES
    for name, tensor in tensors.items():
        size = -(-size // ALIGN_BYTES) * ALIGN_BYTES
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size])
        size += tensor.numel() * tensor.dtype.itemsize
    mark = secrets.token_bytes(MARK_BYTES)
    fd = shared_memory.reserve(size, error=EngineError, advice=ADVICE)
    where = Where(pid=os.getpid(), fd=fd, size=size, mark=mark.hex(), tensors=entries)
    try:
        memory = shared_memory.mapped(fd, size)
        memory[:MARK_BYTES] = mark
        _copy(tensors, _views(memory, where))
    except BaseException:
        os.close(fd)
        raise
    placed = Placed(where=where)
    weakref.finalize(placed, os.close, fd).atexit = False
    return placed


@torch.inference_mode()
def _copy(sources: Tensors, targets: Tensors) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])


def opened(where: Where) -> dict[str, torch.Tensor]:
    """The tensors, which keep the memory alive; what is written to them here stays here. Raises EngineError for other memory."""
    path = f"/proc/{where.pid}/fd/{where.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"weights in memory cannot be opened (another machine, container or user?): {error}") from error
    try:
        if os.fstat(fd).st_size < where.size:
            raise _stranger(path)
        memory = mmap.mmap(fd, where.size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    if memory[:MARK_BYTES].hex() != where.mark:
        raise _stranger(path)
    return _views(memory, where)


def _stranger(path: str) -> EngineError:
    return EngineError(f"{path} is not the memory that was spoken of (another machine or container?)")


def _views(memory: mmap.mmap, where: Where) -> dict[str, torch.Tensor]:
    return {name: _view(memory, getattr(torch, dtype), shape, offset) for name, dtype, shape, offset in where.tensors}


def _view(memory: mmap.mmap, dtype: torch.dtype, shape: list[int], offset: int) -> torch.Tensor:
    if not (count := math.prod(shape)):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
