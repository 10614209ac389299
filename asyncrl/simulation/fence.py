"""The fence round a simulation: while a virtual loop runs, its thread may not leave it.

controller, tools, edges -> [fence] -> OutsideError that names who tried

Threads, sockets, subprocesses and real sleeps are refused, each where it begins: by an audit hook where Python has an event for it,
else by a stand-in for the function, put in place while a loop runs and taken out after it. Other threads of the process are left
alone. Not covered: blocking C code, and reading and writing files, which edges do by intent.
"""

import _thread
import asyncio
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from asyncrl.simulation.errors import OutsideError

_EVENTS = {
    "socket.__new__": "a socket",
    "socket.getaddrinfo": "a host name is looked up",
    "socket.gethostbyname": "a host name is looked up",
    "subprocess.Popen": "a subprocess",
    "os.fork": "a subprocess",
    "os.forkpty": "a subprocess",
    "os.posix_spawn": "a subprocess",
    "os.spawn": "a subprocess",
    "os.system": "a subprocess",
    "os.exec": "another program takes over the process",
    "_thread.start_new_thread": "a thread",
    "_thread.start_joinable_thread": "a thread",
}
"""Audit event -> what leaves the loop."""

_INSTEAD = {
    "a thread": "blocking work goes through world.offload",
    "a real sleep": "asyncio.sleep takes virtual time",
    "a wait for another thread": "there is none: asyncio has events, queues and futures",
}

LOOP_DOORS = (
    *("create_connection", "create_server", "create_unix_connection", "create_unix_server", "create_datagram_endpoint"),
    *("connect_accepted_socket", "start_tls", "sendfile", "getaddrinfo", "getnameinfo"),
    *("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into", "sock_sendall", "sock_sendto", "sock_connect"),
    *("sock_accept", "sock_sendfile", "add_reader", "remove_reader", "add_writer", "remove_writer"),
    *("connect_read_pipe", "connect_write_pipe", "subprocess_exec", "subprocess_shell"),
    *("add_signal_handler", "remove_signal_handler"),
)
"""Methods of an event loop that lead outside."""

_fenced: dict[int, Callable[[BaseException], None]] = {}
"""Thread in which a virtual loop runs -> whom to tell of what it tried."""
_lock = threading.Lock()


class FencedLoop(asyncio.BaseEventLoop):
    """Base of a loop in which each door that leads outside raises OutsideError."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        refuse("a thread", f"run_in_executor({_name_of(func)})")

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> NoReturn:  # type: ignore[override]
        refuse("a call from another thread", f"call_soon_threadsafe({_name_of(callback)})")


def _door(name: str) -> Callable[..., NoReturn]:
    def door(self: object, *args: object, **kwargs: object) -> NoReturn:
        refuse("a door of the event loop", f"{name} is not simulated")

    door.__name__, door.__qualname__ = name, f"FencedLoop.{name}"
    return door


for _name in LOOP_DOORS:
    setattr(FencedLoop, _name, _door(_name))


@contextmanager
def fenced(tell: Callable[[BaseException], None]) -> Iterator[None]:
    """Inside this block the thread that entered it cannot leave the loop. `tell` gets each error too: who tried may swallow it."""
    thread = threading.get_ident()
    _hear_audit_events()
    with _lock:
        before = _fenced.get(thread)
        if not _fenced:
            _put_up()
        _fenced[thread] = tell
    try:
        yield
    finally:
        with _lock:
            del _fenced[thread]
            if before is not None:
                _fenced[thread] = before
            if not _fenced:
                _take_down()


def refuse(what: str, how: str) -> NoReturn:
    """Raise OutsideError for the code that is running, and tell the loop that it runs in."""
    instead = f"; {_INSTEAD[what]}" if what in _INSTEAD else ""
    error = OutsideError(f"{what} leaves the simulation ({how}), by {_caller()}{instead}")
    tell = _fenced.get(threading.get_ident())
    if tell is not None:
        tell(error)
    raise error


# --- audit events


@cache
def _hear_audit_events() -> None:
    """Once a process: a hook cannot be taken away."""
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[object, ...]) -> None:
    if _fenced and event in _EVENTS and threading.get_ident() in _fenced:
        refuse(_EVENTS[event], event)


# --- stand-ins


def _stand_in(original: Callable[..., Any], what: str, how: str) -> Callable[..., Any]:
    """Outside of a fenced thread it is the original: a module that is imported meanwhile may keep it."""

    @wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in _fenced:
            refuse(what, how)
        return original(*args, **kwargs)

    return stand_in


_METHODS = (
    (threading.Thread, "start", _stand_in(threading.Thread.start, "a thread", "Thread.start")),
    (threading.Condition, "wait", _stand_in(threading.Condition.wait, "a wait for another thread", "Condition.wait")),
)
_SLEEP, _START = time.sleep, _thread.start_new_thread
_FUNCTIONS = {
    id(_SLEEP): _stand_in(_SLEEP, "a real sleep", "time.sleep"),
    id(_START): _stand_in(_START, "a thread", "start_new_thread"),
}
"""By identity of the original: a module may have its own name for it."""
_ORIGINALS = {id(stand_in): stand_in.__wrapped__ for stand_in in _FUNCTIONS.values()}  # type: ignore[attr-defined]

_names: list[tuple[dict[str, Any], str]] = []
"""Every place in a module that holds one of the originals."""
_searched: set[str] = set()
_taken: list[tuple[Any, str, Any]] = []
"""Methods that were replaced: (class, name, original)."""


def _put_up() -> None:
    _find_names()
    for holder, name, stand_in in _METHODS:
        _taken.append((holder, name, holder.__dict__[name]))
        setattr(holder, name, stand_in)
    for names, name in _names:
        original = names.get(name)
        if id(original) in _FUNCTIONS:
            names[name] = _FUNCTIONS[id(original)]


def _take_down() -> None:
    _find_names()
    for holder, name, original in _taken:
        setattr(holder, name, original)
    _taken.clear()
    for names, name in _names:
        stand_in = names.get(name)
        if id(stand_in) in _ORIGINALS:
            names[name] = _ORIGINALS[id(stand_in)]


def _find_names() -> None:
    """Modules imported since the last time are searched for names of the originals or stand-ins: `from time import sleep`."""
    if len(sys.modules) == len(_searched):
        return
    for module_name in sorted(sys.modules.keys() - _searched):
        _searched.add(module_name)
        module = sys.modules[module_name]
        if isinstance(module, ModuleType) and module.__name__ != __name__:
            names = vars(module)
            found = [name for name, value in list(names.items()) if id(value) in _FUNCTIONS or id(value) in _ORIGINALS]
            _names.extend((names, name) for name in found)


# --- who tried


def _caller() -> str:
    """file:line and function of the innermost code that is neither Python's own library nor this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "the event loop itself"
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_qualname}"


@cache
def _is_library(file: str) -> bool:
    if file in (__file__, "<string>") or file.startswith("<frozen"):
        return True
    return file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file


def _name_of(function: Any) -> str:
    """Of what asyncio.to_thread makes, the function inside."""
    inner = getattr(function, "args", None)
    if inner and callable(inner[0]):
        return _name_of(inner[0])
    return getattr(function, "__qualname__", None) or repr(function)
