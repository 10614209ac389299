"""A store with open leases, for all tests of this folder."""

from collections.abc import Awaitable, Callable

import pytest

from asyncrl.keys import GroupLease, SessionLease
from asyncrl.transfer_queue import TransferQueue

OpenSession = Callable[..., Awaitable[SessionLease]]


@pytest.fixture
def queue() -> TransferQueue:
    return TransferQueue()


@pytest.fixture
def open_session(queue: TransferQueue) -> OpenSession:
    """`await open_session("a")` opens group `a` where it is not open yet, and its session 0; returns the session's lease."""
    groups: set[str] = set()

    async def start(uid: str = "a", session_id: int = 0, attempt: int = 0) -> SessionLease:
        if uid not in groups:
            groups.add(uid)
            await queue.open_lease(GroupLease(uid=uid))
        lease = SessionLease(uid=uid, session_id=session_id, attempt=attempt)
        await queue.open_lease(lease)
        return lease

    return start
