"""One worker process as the event loop sees it: start, exchange a request for a reply, end.

Callbacks of asyncio's subprocess transport move a state of two values: the future of the reply that is due, and the future of
the end. Invariant: a worker that is not idle is never asked again; it is killed, with every process that its function started.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE
from typing import IO, cast

from asyncrl.errors import RewardError
from asyncrl.ports import Json
from asyncrl.rewards import frames

_REQUESTS, _REPLIES = 0, 1


class WorkerProcess(asyncio.SubprocessProtocol):
    """Started by `start`. `ended` is done when the process is reaped and its pipes are closed."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._frames = frames.FrameReader()
        self._reply: asyncio.Future[Json] | None = loop.create_future()  # the hello is due
        self._transport: asyncio.SubprocessTransport | None = None
        self._has_exited = False
        self._is_condemned = False
        self.ended: asyncio.Future[None] = loop.create_future()

    @property
    def is_idle(self) -> bool:
        """Alive, and no reply is due: it may be asked."""
        return self._reply is None and not self._is_condemned and not self._has_exited

    async def hello(self) -> Json:
        """The worker's first frame. Raises RewardError when it ends before; the caller bounds the wait."""
        assert self._reply is not None
        return await self._reply

    async def exchange(self, frame: bytes) -> Json:
        """Send a request and wait for its reply; the caller bounds the wait. Raises RewardError when the process ends.

        Whoever stops waiting leaves the worker busy, and must kill it."""
        assert self.is_idle, "a busy worker was asked"
        self._reply = asyncio.get_running_loop().create_future()
        self._pipe(_REQUESTS).write(frame)
        return await self._reply

    def hang_up(self) -> None:
        """Close the request pipe: an idle worker then ends by itself, with its exit handlers."""
        if not self._has_exited:
            self._pipe(_REQUESTS).close()

    def kill(self) -> None:
        """End the process, and what it started in its session, now or as soon as it exists. `ended` follows. Twice is once."""
        if not self._is_condemned:
            self._is_condemned = True
            if self._transport is not None and not self._has_exited:
                self._kill_group()

    def _kill_group(self) -> None:
        assert self._transport is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # none left, or (macOS) only zombies
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def _pipe(self, number: int) -> asyncio.WriteTransport:
        assert self._transport is not None
        return cast("asyncio.WriteTransport", self._transport.get_pipe_transport(number))

    def _settle(self, value: Json = None, error: RewardError | None = None) -> None:
        reply, self._reply = self._reply, None
        if reply is None or reply.done():
            return
        if error is None:
            reply.set_result(value)
        else:
            reply.set_exception(error)

    # --- callbacks of the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        if self._is_condemned:
            self._kill_group()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                value = frames.decode(body)
                if self._reply is None:
                    raise frames.FrameError("a reply to no request")
                self._settle(value)
        except frames.FrameError as error:
            self._settle(error=RewardError(f"the reward worker sent something that is no reply ({error}); it was ended"))
            self.kill()

    def process_exited(self) -> None:
        assert self._transport is not None
        self._has_exited = True
        self._settle(error=RewardError(f"the reward worker {_describe_exit(self._transport.get_returncode())}"))
        self._kill_group()  # children that the function left behind share the group, which keeps its number from being given anew
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}; its output may say why"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was ended by signal {-code} ({name}{', out of memory?' if name == 'SIGKILL' else ''})"


async def start(worker: WorkerProcess, function: str, *, folder: str, log: IO[bytes] | None) -> None:
    """Start the worker's process for `function` in `folder`. log: where its output goes; None: this process's stderr.

    Raises OSError when no process can be made. A session of its own, so that Ctrl-C in the terminal reaches only the trainer,
    and one signal ends what the function started."""
    # -P: the working directory must not shadow our modules; the worker adds it itself once they are loaded.
    command = (sys.executable, "-P", "-m", "asyncrl.rewards.worker", function)
    await asyncio.get_running_loop().subprocess_exec(
        lambda: worker, *command, stdin=PIPE, stdout=PIPE, stderr=log, cwd=folder, start_new_session=True
    )
