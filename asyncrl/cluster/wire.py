"""Frames between the controller and its own ranks: a length, then bytes; file descriptors may travel with them.

Objects are pickled here, and here alone: both ends are processes of one program that hold the two ends of a socket pair without a
name, so nobody else can write to it, and nothing that goes over it is ever stored.
"""

import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence

_HEAD = struct.Struct("!Q")
MAX_FDS = 253
"""Descriptors that a frame may carry: what Linux takes."""
READ_BYTES = 1 << 18


def encode(value: object) -> bytes:
    """Raises what the value's own reduction raises, TypeError and PicklingError most often."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def decode(data: bytes) -> object:
    return pickle.loads(data)


def send_frame(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Blocking. The descriptors go with the head, so that they arrive before what is said about them."""
    head = _HEAD.pack(len(data))
    if fds:
        assert socket.send_fds(sock, [head], list(fds)) == len(head), "eight bytes always fit into an empty socket buffer"
    else:
        sock.sendall(head)
    sock.sendall(data)


def receive_frame(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Blocking. Raises EOFError when the other end is closed."""
    head, fds = _exactly(sock, _HEAD.size)
    data, more = _exactly(sock, _HEAD.unpack(head)[0])
    return data, fds + more


def _exactly(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    parts: list[bytes] = []
    fds: list[int] = []
    while size > 0:
        try:
            part, got, _, _ = socket.recv_fds(sock, min(size, READ_BYTES), MAX_FDS)
        except ConnectionError as error:
            raise EOFError("the other end is gone") from error
        if not part:
            raise EOFError("the other end is closed")
        parts.append(part)
        fds += got
        size -= len(part)
    return b"".join(parts), fds


class Channel:
    """The controller's end: never blocks, so that a rank that does not read cannot hold the controller up."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._in = bytearray()

    @property
    def has_to_send(self) -> bool:
        return bool(self._out)

    def put(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame; `pump` sends it. The descriptors are copied: the caller may close its own."""
        self._out.append((memoryview(_HEAD.pack(len(data)) + data), tuple(os.dup(fd) for fd in fds)))

    def pump(self) -> None:
        """Send what fits now. Raises ConnectionError when the other end is gone."""
        while self._out:
            view, fds = self._out[0]
            try:
                sent = socket.send_fds(self.sock, [view], list(fds)) if fds else self.sock.send(view)
            except BlockingIOError:
                return
            _close(fds)
            if sent == len(view):
                self._out.popleft()
            else:
                self._out[0] = (view[sent:], ())

    def take(self) -> list[bytes]:
        """The whole frames that have come. Raises EOFError when the other end is gone; frames before its end come first."""
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError as error:
            raise EOFError("the other end is gone") from error
        if not data:
            raise EOFError("the other end is closed")
        self._in += data
        return list(self._frames())

    def _frames(self) -> "list[bytes]":
        found: list[bytes] = []
        while len(self._in) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._in)[0]
            if len(self._in) < end:
                break
            found.append(bytes(self._in[_HEAD.size : end]))
            del self._in[:end]
        return found

    def close(self) -> None:
        for _, fds in self._out:
            _close(fds)
        self._out.clear()
        self.sock.close()


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
