"""What a rank runs: joins the process group, makes what it serves, and answers call after call until the controller is gone.

fork_server -> [rank_main] -> the target's function -> its methods

A thread reads the socket all the time, so that the end of the controller is seen in the middle of a collective as well.
"""

import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

from asyncrl import shared_memory
from asyncrl.cluster import beats, wire
from asyncrl.cluster.arena import RankArena
from asyncrl.cluster.remote_errors import pack
from asyncrl.errors import RankError

PR_SET_PDEATHSIG = 1
COLLECTIVE_FACTOR = 10
"""Collectives give up after this many `timeout_s`. The controller, who sees the beats and can name the rank that is behind, is to
be first; and a rank may wait longer than `timeout_s` for one that shows signs of life (it writes a checkpoint, say)."""
DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of its threads to stderr, whatever it is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What the target's function is told beside its payload. beat: a sign of life, as `asyncrl.cluster.beat`."""

    rank: int
    world: int
    beat: Callable[[str], None]
    arena: RankArena


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first frame to a rank; the beats' memory comes with it."""

    rank: int
    world: int
    target: str
    payload: bytes
    """Encoded: what the target's own classes are made of is on `path`."""
    timeout_s: float
    num_threads: int
    path: tuple[str, ...]
    folder: str
    store: tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBlock:
    """A block of the arena; its descriptor comes with the frame."""

    number: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Blocks of the arena that no tensor of the controller holds any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One method of what is served. arguments: (args, kwargs), encoded: what does not decode is an error of the call."""

    method: str
    arguments: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A reply."""

    value: object


def run(sock: socket.socket, listener: socket.socket | None) -> int:
    """The life of a rank. Ends with the process, as soon as the controller closes the socket."""
    _die_with_parent()
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    arena, inbox = RankArena(), SimpleQueue[Any]()
    threading.Thread(target=_read, args=(sock, arena, inbox), name="controller", daemon=True).start()
    hello: Hello = inbox.get()
    served = _answer(sock, partial(_start, hello, arena, listener), is_told=False)
    while True:
        _answer(sock, partial(_serve, served, inbox.get()), is_told=True)


def _die_with_parent() -> None:
    """The fork server's end is ours, also where nobody closes the socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(sock: socket.socket, arena: RankArena, inbox: "SimpleQueue[Any]") -> None:
    try:
        while True:
            data, fds = wire.receive_frame(sock)
            message = wire.decode(data)
            if isinstance(message, NewBlock):
                arena.add(message.number, message.size, fds[0])
            elif isinstance(message, Dropped):
                arena.drop(message.numbers)
            elif isinstance(message, Hello):
                memory = shared_memory.mapped(fds[0], beats.SLOT_BYTES * message.world)
                os.close(fds[0])
                beats.listen(partial(beats.Board(memory, message.world).write, message.rank))
                inbox.put(message)
            else:
                inbox.put(message)
    except EOFError:
        os._exit(0)
    except BaseException:  # without its reader a rank would seem to hang
        traceback.print_exc()
        os._exit(1)


def _answer(sock: socket.socket, work: Callable[[], object], *, is_told: bool) -> object:
    """Do it and say how it ended. Returns what it returned; the controller is told that only if `is_told`."""
    try:
        value = work()
        frame = wire.encode(Returned(value=value if is_told else None))
    except BaseException as error:  # whatever it raised is the controller's to judge
        value, frame = None, wire.encode(pack(error))
    sys.stdout.flush()  # a rank ends by a signal, which flushes nothing
    try:
        wire.send_frame(sock, frame)
    except ConnectionError:
        os._exit(0)
    return value


def _serve(served: object, call: Call) -> object:
    beats.beat(f"{call.method}: begun")
    method = getattr(served, call.method, None)
    if method is None:
        raise RankError(f"a rank serves no method {call.method!r}; what it serves is a {type(served).__name__}")
    args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", wire.decode(call.arguments))
    value = method(*args, **kwargs)
    beats.beat(f"{call.method}: done")
    return value


def _start(hello: Hello, arena: RankArena, listener: socket.socket | None) -> object:
    import torch

    sys.path[:] = hello.path
    os.chdir(hello.folder)
    beats.beat("start: importing")
    torch.set_num_threads(hello.num_threads)
    module, _, name = hello.target.partition(":")
    function = getattr(importlib.import_module(module), name)
    beats.beat("start: joining the other ranks")
    _join(hello, listener)
    beats.beat("start: making what is served")
    rank = Rank(rank=hello.rank, world=hello.world, beat=beats.beat, arena=arena)
    served: object = function(rank, wire.decode(hello.payload))
    beats.beat("start: done")
    return served


def _join(hello: Hello, listener: socket.socket | None) -> None:
    """The default process group: gloo over loopback, and NCCL for tensors on the GPU where each rank has one of its own."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    timeout = timedelta(seconds=COLLECTIVE_FACTOR * hello.timeout_s)
    own: dict[str, Any] = {"master_listen_fd": listener.detach()} if listener is not None else {}
    host, port = hello.store
    store = TCPStore(host, port, hello.world, listener is not None, timeout, wait_for_workers=False, **own)
    has_devices = torch.cuda.device_count() >= hello.world and dist.is_nccl_available()
    if has_devices:
        torch.cuda.set_device(hello.rank)
    backend = "cpu:gloo,cuda:nccl" if has_devices else "gloo"
    dist.init_process_group(backend, store=store, rank=hello.rank, world_size=hello.world, timeout=timeout)
