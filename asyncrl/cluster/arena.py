"""Columns in shared memory: the controller places them once, ranks open views of them, and write their results beside them.

place -> Placed travels in a call (names, shapes and offsets, no payload) -> rank.arena.open

1. A block belongs to the tensors that were handed out for it; only when the last of them is gone is it used again.
2. Memory lives as long as a tensor on it, also after the arena is closed.
3. What a rank opens holds until its call ends: a view that it keeps longer may show the next call's values.
4. Ranks hear of a dropped block with their next call, and hold its memory until then: where blocks grow, both sizes are needed.
"""

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from mmap import mmap

import torch
from torch import Tensor

from asyncrl import shared_memory
from asyncrl.errors import RankError

ADVICE = "or the batch smaller, and go on with --resume"
"""For the one who has no room for the memory that ranks share."""
ALIGN_BYTES = 64
GROWTH = 1.25
"""A new block is this much larger than what it is for: batches of one run differ by that much in length."""

Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor in a block, row-major and contiguous."""

    block: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where tensors are. Small and plain; sent to every rank. While the controller holds it, its blocks are not used again."""

    entries: Mapping[str, Entry]
    _leases: tuple[memoryview, ...] = field(default=(), repr=False, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        return _placed, (dict(self.entries),)


def _placed(entries: dict[str, Entry]) -> Placed:
    return Placed(entries=entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """number: its name to the ranks, never used twice."""

    number: int
    size: int
    memory: mmap


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What ranks have to be told before their next call. Whoever asked for it sends the descriptors, and closes them."""

    blocks: tuple[tuple[int, int, int], ...]
    """(number, size, descriptor)"""
    dropped: tuple[int, ...]


class Arena:
    """The controller's side. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Block] = []
        self._unsent: dict[int, tuple[int, int]] = {}
        self._dropped: list[int] = []
        self._returned: deque[Block] = deque()  # what ends a lease may run anywhere, inside `_lock` too: an append, no more
        self._numbers = 0

    def place(self, tensors: Mapping[str, Tensor], outputs: Mapping[str, Spec] | None = None) -> tuple[Placed, dict[str, Tensor]]:
        """Copy `tensors` into shared memory, and make room for `outputs` (zeros), whose tensors are returned.

        Inputs and outputs have different names; they lie in blocks of their own, so that a result that is kept does not keep the
        columns that it was made of. Raises RankError when there is no room.
        """
        outputs = outputs or {}
        assert not tensors.keys() & outputs.keys(), "an output has the name of a column"
        inputs_at, inputs, leases = self._lay_out({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()})
        for name, tensor in tensors.items():
            inputs[name].copy_(tensor.detach())
        placed, results = self.new_block(outputs)
        return Placed(entries={**inputs_at, **placed.entries}, _leases=(*leases, *placed._leases)), results

    def new_block(self, outputs: Mapping[str, Spec]) -> tuple[Placed, dict[str, Tensor]]:
        """Room for tensors of these shapes, zeros, in a block of their own that lives as long as they do."""
        entries, tensors, leases = self._lay_out(outputs)
        for tensor in tensors.values():
            tensor.zero_()
        return Placed(entries=entries, _leases=leases), tensors

    def _lay_out(self, specs: Mapping[str, Spec]) -> tuple[dict[str, Entry], dict[str, Tensor], tuple[memoryview, ...]]:
        if not specs:
            return {}, {}, ()
        offsets, size = [], 0
        for shape, dtype in specs.values():
            offsets.append(size)
            size += -(-math.prod(shape) * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        block = self._take(max(size, ALIGN_BYTES))
        entries = {
            name: Entry(block=block.number, offset=offset, shape=tuple(shape), dtype=dtype)
            for (name, (shape, dtype)), offset in zip(specs.items(), offsets, strict=True)
        }
        lease = memoryview(block.memory)
        weakref.finalize(lease, self._returned.append, block).atexit = False
        whole = torch.frombuffer(lease, dtype=torch.uint8)
        return entries, {name: _view(whole, entry) for name, entry in entries.items()}, (lease,)

    def _take(self, size: int) -> Block:
        """A free block, the smallest that fits; else a new one, in place of those that are too small."""
        with self._lock:
            self._collect()
            if fitting := [block for block in self._free if block.size >= size]:
                block = min(fitting, key=lambda each: each.size)
                self._free.remove(block)
                return block
            self._drop_free()
            return self._make(math.ceil(size * GROWTH))

    def _make(self, size: int) -> Block:
        fd = shared_memory.reserve(size, error=RankError, advice=ADVICE)
        self._numbers += 1
        self._unsent[self._numbers] = (size, fd)
        return Block(number=self._numbers, size=size, memory=shared_memory.mapped(fd, size))

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def _drop_free(self) -> None:
        for block in self._free:
            if block.number in self._unsent:
                os.close(self._unsent.pop(block.number)[1])
            else:
                self._dropped.append(block.number)
        self._free.clear()

    def news(self) -> News:
        """What is new since the last time."""
        with self._lock:
            unsent, self._unsent = self._unsent, {}
            dropped, self._dropped = self._dropped, []
        return News(blocks=tuple((number, *rest) for number, rest in unsent.items()), dropped=tuple(dropped))

    def close(self) -> None:
        """Let go what no tensor holds. Tensors stay good as long as they live. Twice is once."""
        with self._lock:
            self._collect()
            self._drop_free()
            for _, fd in self._unsent.values():
                os.close(fd)
            self._unsent.clear()


class RankArena:
    """The rank's side: blocks are mapped when the controller tells of them, and let go when it says so."""

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}

    def add(self, number: int, size: int, fd: int) -> None:
        """Takes the descriptor over."""
        self._blocks[number] = torch.frombuffer(shared_memory.mapped(fd, size), dtype=torch.uint8)
        os.close(fd)

    def drop(self, numbers: Iterable[int]) -> None:
        """Memory goes with the last view of it."""
        for number in numbers:
            del self._blocks[number]

    def open(self, placed: Placed) -> dict[str, Tensor]:
        """Views of all its tensors, inputs and outputs, by name; what is written into them is what the controller sees."""
        return {name: _view(self._blocks[entry.block], entry) for name, entry in placed.entries.items()}


def _view(whole: Tensor, entry: Entry) -> Tensor:
    size = math.prod(entry.shape) * entry.dtype.itemsize
    if size == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return whole[entry.offset : entry.offset + size].view(entry.dtype).view(entry.shape)
