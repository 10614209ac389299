"""The controller's end of a group's processes: their sockets, their ends, their beats, and how to be rid of them.

rank_group -> exchange -> [team] -> fork_server, rank_main
"""

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asyncrl import shared_memory
from asyncrl.cluster import beats, wire
from asyncrl.cluster.arena import ADVICE
from asyncrl.cluster.beats import Board
from asyncrl.cluster.fork_server import ForkServer
from asyncrl.cluster.rank_main import DUMP_SIGNAL
from asyncrl.errors import RankDiedError, RankError
from asyncrl.wording import message_of

DUMP_S = 0.5
"""For ranks to write their stacks, before they are killed."""
REAP_TIMEOUT_S = 30.0
"""For killed processes to be gone. More than ever needed, but for one that hangs in the kernel, which nothing ends."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One rank. pid: 0 until the server has told it. code: of its end, as subprocess has it; None while it lives.
    gone_at: when its socket was found closed, which is a little before its code is known."""

    rank: int
    channel: wire.Channel
    pid: int = 0
    code: int | None = None
    gone_at: float | None = None


class Team:
    """Made by `fork`; used by one thread at a time, but for `break_off`."""

    def __init__(self, status: socket.socket, ranks: Sequence[socket.socket], board: Board) -> None:
        self.board = board
        self.members = [Member(rank=rank, channel=wire.Channel(sock)) for rank, sock in enumerate(ranks)]
        self.server_is_gone = False
        self._status = wire.Channel(status)
        self._selector = selectors.DefaultSelector()
        self._selector.register(status, selectors.EVENT_READ, None)
        for member in self.members:
            self._selector.register(member.channel.sock, selectors.EVENT_READ, member)

    def put(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame for every rank."""
        for member in self.members:
            self.put_one(member, data, fds)

    def put_one(self, member: Member, data: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame for one rank."""
        if member.gone_at is None:
            member.channel.put(data, fds)
            self._selector.modify(member.channel.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, member)

    def wait(self, timeout_s: float) -> list[tuple[Member, bytes]]:
        """Send, and see what comes within `timeout_s`: frames of ranks. Ends that come are noted in their members."""
        found: list[tuple[Member, bytes]] = []
        for key, _ in self._selector.select(max(timeout_s, 0.0)):
            if key.data is None:
                self._read_status()
            else:
                found += [(key.data, frame) for frame in self._exchange(key.data)]
        return found

    def _exchange(self, member: Member) -> list[bytes]:
        try:
            frames = member.channel.take()
            member.channel.pump()
        except (EOFError, ConnectionError):
            member.gone_at = time.monotonic()
            self._selector.unregister(member.channel.sock)
            return []
        if not member.channel.has_to_send:
            self._selector.modify(member.channel.sock, selectors.EVENT_READ, member)
        return frames

    def _read_status(self) -> None:
        try:
            frames = self._status.take()
        except EOFError:
            self.server_is_gone = True
            self._selector.unregister(self._status.sock)
            return
        for frame in frames:
            told: dict[str, Any] = json.loads(frame)
            for member, pid in zip(self.members, told.get("pids", ()), strict=False):
                member.pid = pid
            if "rank" in told:
                self.members[told["rank"]].code = told["code"]

    def break_off(self) -> None:
        """From any thread: end the ranks; whoever waits for them sees it at once."""
        for member in self.members:  # those that the server has not forked yet end by it, too
            with suppress(OSError):
                member.channel.sock.shutdown(socket.SHUT_RDWR)
        self._signal(signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Let each write to stderr where it is; a stopped one cannot."""
        self._signal(DUMP_SIGNAL)
        self.wait(DUMP_S)

    def _signal(self, number: int) -> None:
        for member in self.members:
            if member.pid and member.code is None:
                with suppress(ProcessLookupError):
                    os.kill(member.pid, number)

    def close(self) -> None:
        """Kill, wait until the server has reaped them, and close the sockets."""
        self.break_off()
        until = time.monotonic() + REAP_TIMEOUT_S
        while any(member.pid and member.code is None for member in self.members) and not self.server_is_gone:
            if (left := until - time.monotonic()) <= 0:
                break
            self.wait(left)
        self._selector.close()
        for channel in (self._status, *(member.channel for member in self.members)):
            channel.close()


def fork(server: ForkServer, num_ranks: int) -> tuple[Team, int, tuple[str, int]]:
    """New ranks, which wait for their first frame. Returns the team, the descriptor of their beats (the caller's to close), and
    the address at which rank 0 will hold the store. Raises RankDiedError when the server is gone, RankError without memory."""
    size = beats.SLOT_BYTES * num_ranks
    fd = shared_memory.reserve(size, error=RankError, advice=ADVICE)
    board = Board(shared_memory.mapped(fd, size), num_ranks)
    pairs = [socket.socketpair() for _ in range(num_ranks + 1)]
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    team = Team(ours[0], ours[1:], board)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            server.fork(theirs[0], listener, theirs[1:])
    except OSError as error:
        team.close()
        os.close(fd)
        raise RankDiedError(f"the ranks cannot be started, as the fork server is gone: {message_of(error)}") from error
    finally:
        for each in theirs:
            each.close()
    return team, fd, address
