"""Frames on the pipes between the scorer and its worker processes: four bytes of length, then JSON.

Standard JSON functions on purpose: they carry whatever a dataset row or a reward function may hold (integers beyond 64 bits, lone
surrogates, NaN), which faster libraries refuse or change.
"""

import json
import struct
from collections.abc import Iterator

from asyncrl.ports import Json

MAX_FRAME_BYTES = 64 << 20
"""A longer frame is an error: no reward result is that large, so it is a broken or hostile worker."""

_LENGTH = struct.Struct("!I")
LENGTH_BYTES = _LENGTH.size


class FrameError(ValueError):
    """Bytes or a value that cannot be a frame."""


def encode(value: Json) -> bytes:
    """One frame. Numbers of numpy and one-element tensors become plain numbers. Raises FrameError for what JSON cannot hold."""
    try:
        body = json.dumps(value, default=_plain, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(str(error)) from error
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"{len(body)} bytes are more than the {MAX_FRAME_BYTES} allowed")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Json:
    """The value of a frame's body. Raises FrameError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from error


def body_length(header: bytes) -> int:
    """Bytes of the body that follows. Raises FrameError when it is too long to be true."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes")
    return int(length)


def _plain(value: object) -> Json:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


class FrameReader:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies that `data` completes, in order. Raises FrameError."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + body_length(bytes(self._buffer[:LENGTH_BYTES]))
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield body
