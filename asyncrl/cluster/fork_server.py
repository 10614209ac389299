"""A process that imports the heavy modules once and is forked into ranks: RankGroup -> [fork_server] -> rank_main.

Why not multiprocessing's: that one runs the user's script again in every child (as `__mp_main__`), leaves a stopped child behind
when the controller is killed, and is one for the whole program. This one never sees the script, and ends its children when the
controller is gone, which kills stopped ones as well; should it be killed itself, the kernel ends them (Linux).

    control socket, controller -> server: a frame `{"world": N}` with descriptors (status, listener, rank 0 .. rank N-1)
    status socket of the group, server -> controller: `{"pids": [..]}`, then `{"rank": r, "code": c}` for each that has ended,
    c as subprocess has it: the exit code, or minus the signal
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence

from asyncrl.cluster import wire
from asyncrl.cluster.rank_main import run

OF_THE_CONTROLLER = (signal.SIGINT, signal.SIGTERM)
"""A terminal sends them to all processes of a run, and the controller decides when ranks end."""
END_TIMEOUT_S = 2.0
"""For the server to kill its ranks and end, after its control socket is closed; then it is killed."""
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from asyncrl.cluster.fork_server import serve; serve()"


class ForkServer:
    """Started with what it should import before it forks; a group makes one of its own unless it is given one.

    A module that does not import is left to the ranks, which say so better."""

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _CODE, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), *preload]
            quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}  # a rank that is killed makes others' sockets complain
            # Blocked until `serve` ignores them: importing takes seconds, in which Ctrl-C would end the server with a traceback.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_CONTROLLER)
            try:
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=quiet)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._control = ours
        self._end = weakref.finalize(self, _end, ours, self._process)

    @property
    def pid(self) -> int:
        """Of the server; its children are the ranks."""
        return self._process.pid

    def fork(self, status: socket.socket, listener: socket.socket, ranks: Sequence[socket.socket]) -> None:
        """Ask for a group of ranks. The caller closes its copies. Raises OSError when the server is gone."""
        fds = [each.fileno() for each in (status, listener, *ranks)]
        wire.send_frame(self._control, json.dumps({"world": len(ranks)}).encode(), fds)

    def close(self) -> None:
        """End the server and all its ranks. Twice is once."""
        self._end()


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # stopped, or in an import that does not end
        process.kill()
        process.wait()


def serve() -> None:
    """The server's main. Ends the process when the controller is gone."""
    control = socket.socket(fileno=int(sys.argv[2]))
    for number in OF_THE_CONTROLLER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_CONTROLLER)
    for name in sys.argv[4:]:
        with contextlib.suppress(BaseException):  # a rank imports it again, and reports
            importlib.import_module(name)
    _Server(control, int(sys.argv[3])).run()


class _Server:
    """One thread; waits for requests, for children that end, and for the end of the controller."""

    def __init__(self, control: socket.socket, controller: int) -> None:
        self._control = control
        self._children: dict[int, tuple[socket.socket, int]] = {}
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler the wake-up descriptor is not written to
        signal.set_wakeup_fd(self._wake.fileno())
        # The socket alone would miss the end of a controller that forked a child which keeps a copy of it.
        self._ends = [control.fileno()]
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._ends.append(os.pidfd_open(controller))

    def run(self) -> None:
        try:
            while True:
                ready, _, _ = select.select([*self._ends, self._woken.fileno()], [], [])
                if self._woken.fileno() in ready:
                    self._reap()
                if any(end in ready for end in self._ends[1:]):
                    break
                if self._control.fileno() in ready:
                    self._serve_one()
        except EOFError:
            pass
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)  # taking torch apart in good order would cost a second, for which the end of a run waits

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if found := self._children.pop(pid, None):
                group, rank = found
                _tell(group, {"rank": rank, "code": os.waitstatus_to_exitcode(status)})
                if all(other is not group for other, _ in self._children.values()):
                    group.close()

    def _serve_one(self) -> None:
        _, fds = wire.receive_frame(self._control)
        status, listener, *ranks = [socket.socket(fileno=fd) for fd in fds]
        pids: list[int] = []
        for rank in range(len(ranks)):
            pid = os.fork()
            if pid == 0:
                self._become(rank, listener if rank == 0 else None, ranks, [status, listener])
            self._children[pid] = (status, rank)
            pids.append(pid)
        for each in (listener, *ranks):
            each.close()
        _tell(status, {"pids": pids})

    def _become(self, rank: int, listener: socket.socket | None, ranks: list[socket.socket], others: list[socket.socket]) -> None:
        """The child: let go everything that is not its own, and never return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            groups = {group for group, _ in self._children.values()}
            for each in {self._control, self._woken, self._wake, *groups, *ranks, *others} - {ranks[rank], listener}:
                each.close()
            for fd in self._ends[1:]:
                os.close(fd)
            code = run(ranks[rank], listener)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _tell(group: socket.socket, what: object) -> None:
    with contextlib.suppress(ConnectionError):  # the group was closed in the meantime
        wire.send_frame(group, json.dumps(what).encode())
