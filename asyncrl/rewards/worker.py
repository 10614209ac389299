"""The process that runs a sync reward function: `python -P -m asyncrl.rewards.worker module:function`.

One request at a time, on the main thread, so that a function may use signals for its own time limits. It loads no torch of its own.
The user's code meets an ordinary process: its stdout (of C code and child processes, too) goes to the log, its stdin is empty,
and the pipes to the scorer are private descriptors that no other program inherits.

Covered: printing, closing or replacing sys.stdout, reading stdin, forking, sys.exit, any exception, endless recursion in
Python. What ends the process (os._exit, a crash, memory) or never returns is the parent's to see. Not covered: code that looks
for the private descriptors in order to forge a score, or that hides a child in a session of its own; reward functions are
trusted code.
"""

import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import sys

from asyncrl.errors import RewardSpecError
from asyncrl.ports import Json
from asyncrl.rewards import frames
from asyncrl.rewards.spec import RewardFunction, is_async, load_function
from asyncrl.wording import describe_error


class Channel:
    """The two pipes to the scorer, moved off the standard descriptors."""

    def __init__(self) -> None:
        self._requests, self._replies = os.dup(0), os.dup(1)
        _point_standard_streams_away()

    def read(self) -> Json:
        """The next request. Raises EOFError when the scorer has closed its end."""
        return frames.decode(self._exactly(frames.body_length(self._exactly(frames.LENGTH_BYTES))))

    def write(self, frame: bytes) -> None:
        rest = memoryview(frame)
        while rest:
            rest = rest[os.write(self._replies, rest) :]

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = os.read(self._requests, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _point_standard_streams_away() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def answer(function: RewardFunction, request: list[Json]) -> bytes:
    """The reply frame: `{"value": ...}`, or `{"error": text}` when the function raised or returned what cannot be sent."""
    data_source, solution_str, ground_truth, extra_info = request
    try:
        value = function(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
    except BaseException as error:  # whatever it is, sys.exit included, it is this session's failure and not the worker's end
        return frames.encode({"error": f"raised {describe_error(error)}"})
    try:
        return frames.encode({"value": value})
    except frames.FrameError as error:
        return frames.encode({"error": f"returned {type(value).__name__} that cannot be sent: {error}"})


def _serve(function: RewardFunction, channel: Channel) -> None:
    process = os.getpid()
    while True:
        reply = answer(function, channel.read())
        if os.getpid() != process:
            os._exit(0)  # a forked child that came back from the function; the answer is its parent's to give
        channel.write(reply)


def _die_with_parent() -> None:
    """A hanging function must not outlive a trainer that was killed. Linux only; elsewhere an idle worker still sees its pipe
    close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def main() -> None:
    """Say hello with what the function is, then answer requests until the scorer closes the pipe."""
    _die_with_parent()
    faulthandler.enable()
    channel = Channel()
    sys.path.insert(0, os.getcwd())
    try:
        function = load_function(sys.argv[1])
    except RewardSpecError as error:
        channel.write(frames.encode({"refused": str(error)}))
        channel.read()  # nothing to serve; the scorer hangs up when it has read the reason
        return
    channel.write(frames.encode({"is_async": is_async(function)}))
    _serve(function, channel)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # the scorer hung up
        main()
