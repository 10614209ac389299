"""What a rank runs: joins the process group, makes what it serves, and answers call after call until the controller is gone.

fork_server -> [rank_main] -> the target's function -> its methods

A thread reads the socket all the time, so that the end of the controller is seen in the middle of a collective as well.
"""

import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

from asyncrl.cluster import beats, shared_memory, wire
from asyncrl.cluster.arena import RankArena
from asyncrl.cluster.remote_errors import pack
from asyncrl.errors import RankError

PR_SET_PDEATHSIG = 1
MARGIN_S = 30.0
"""Collectives give up this long after `timeout_s`: the controller, who can name the rank that is behind, is to be first."""


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
    payload: object
    timeout_s: float
    num_threads: int
    path: tuple[str, ...]
    folder: str
    store: tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of the arena that are new, a descriptor each, and those that are gone."""

    new: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One method of what is served."""

    method: str
    args: tuple[object, ...]
    kwargs: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A reply."""

    value: object


def run(sock: socket.socket, listener: socket.socket | None) -> int:
    """The life of a rank. Ends with the process, as soon as the controller closes the socket."""
    _die_with_parent()
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
            if isinstance(message, Blocks):
                for number in message.dropped:
                    arena.drop(number)
                for (number, size), fd in zip(message.new, fds, strict=True):
                    arena.add(number, size, fd)
            elif isinstance(message, Hello):
                memory = shared_memory.mapped(fds[0], beats.SLOT_BYTES * message.world)
                os.close(fds[0])
                beats.listen(partial(beats.Board(memory, message.world).write, message.rank))
                inbox.put(message)
            else:
                inbox.put(message)
    except EOFError:
        os._exit(0)


def _answer(sock: socket.socket, work: Callable[[], object], *, is_told: bool) -> object:
    """Do it and say how it ended. Returns what it returned; the controller is told that only if `is_told`."""
    try:
        value = work()
        frame = wire.encode(Returned(value=value if is_told else None))
    except BaseException as error:  # whatever it raised is the controller's to judge
        value, frame = None, wire.encode(pack(error))
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
    value = method(*call.args, **call.kwargs)
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
    served = function(rank, hello.payload)
    beats.beat("start: done")
    return served


def _join(hello: Hello, listener: socket.socket | None) -> None:
    """The default process group: gloo over loopback, and NCCL for tensors on the GPU where each rank has one of its own."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    timeout = timedelta(seconds=hello.timeout_s + MARGIN_S)
    own: dict[str, Any] = {"master_listen_fd": listener.detach()} if listener is not None else {}
    host, port = hello.store
    store = TCPStore(host, port, hello.world, listener is not None, timeout, wait_for_workers=False, **own)
    has_devices = torch.cuda.device_count() >= hello.world and dist.is_nccl_available()
    if has_devices:
        torch.cuda.set_device(hello.rank)
    backend = "cpu:gloo,cuda:nccl" if has_devices else "gloo"
    dist.init_process_group(backend, store=store, rank=hello.rank, world_size=hello.world, timeout=timeout)
