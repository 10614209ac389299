"""The door to time, randomness, ids and blocking work."""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class World(Protocol):
    """The only door to time, randomness, ids and blocking work. One a run; the simulator has its own."""

    def now(self) -> float:
        """Seconds on the running loop's clock; only differences mean anything."""
        ...

    def wall_time(self) -> float:
        """Seconds since 1970, for logs only."""
        ...

    def seed(self, *parts: str | int) -> int:
        """A 63-bit number that is a pure function of the run's seed and `parts`, on every machine and Python."""
        ...

    def uid(self, number: int) -> str:
        """The uid of the `number`-th prompt of this run, the same after a restart: 16 hex digits."""
        ...

    async def offload(self, function: Callable[..., T], *args: object, pool: str = "files", timeout_s: float | None = None) -> T:
        """Run blocking work off the loop, in the named pool: `files`, `model` (one thread) or `tools` (many).

        Raises DeadlineError after `timeout_s`, time in the pool's queue included. Work that already runs cannot be stopped: its
        thread is counted in `abandoned(pool)` until it ends.
        """
        ...

    async def site(self, name: str) -> None:
        """A place in the controller where it may be held up for any time, as a busy loop might: the simulator does so, to look for
        what that breaks. In a real run it returns at once.

        It stands only where every room can stand the wait and an end in the middle of it; each says why.
        """
        ...

    def abandoned(self, pool: str) -> int:
        """Threads of the pool still busy with work that nobody waits for: its deadline passed, or its caller was cancelled."""
        ...
