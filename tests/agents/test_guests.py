"""Guests hold nobody, whatever they do with their cancellation."""

import asyncio

import pytest

from asyncrl.agents import guests as guests_module
from asyncrl.agents.guests import Guests
from asyncrl.errors import DeadlineError


class Stubborn:
    """A coroutine that goes on through every cancellation until it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.begun = asyncio.Event()
        self.num_cancelled = 0

    async def run(self) -> str:
        self.begun.set()
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
        raise RuntimeError("nobody hears this")


async def test_result_error_and_own_cancellation_arrive() -> None:
    async def give(error: BaseException | None) -> int:
        if error:
            raise error
        return 3

    async def cancel_myself() -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()
        return 3

    guests = Guests()
    assert await guests.run(give(None), name="n", timeout_s=9, limit="k") == 3
    with pytest.raises(ZeroDivisionError):
        await guests.run(give(ZeroDivisionError()), name="n", timeout_s=9, limit="k")
    for guest in (give(asyncio.CancelledError()), cancel_myself()):
        with pytest.raises(asyncio.CancelledError):
            await guests.run(guest, name="n", timeout_s=9, limit="k")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_deadline_holds_against_a_guest_that_holds_on() -> None:
    guests, stubborn = Guests(), Stubborn()
    with pytest.raises(DeadlineError, match=r"session x took longer than agent\.timeout_s = 0\.01 s"):
        await guests.run(stubborn.run(), name="session x", timeout_s=0.01, limit="agent.timeout_s")
    assert guests.num_late == 1
    stubborn.let_go.set()
    await guests.close()
    assert guests.num_late == 0
    assert stubborn.num_cancelled


async def test_a_cancelled_caller_ends_at_once() -> None:
    guests, stubborn = Guests(), Stubborn()
    caller = asyncio.create_task(guests.run(stubborn.run(), name="n", timeout_s=60, limit="k"))
    await stubborn.begun.wait()
    caller.cancel()
    await asyncio.wait({caller})
    assert caller.cancelled()
    assert guests.num_late == 1
    stubborn.let_go.set()
    await guests.close()


async def test_closing_leaves_behind_who_holds_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests_module, "CLOSE_TIMEOUT_S", 0.01)
    guests, stubborn = Guests(), Stubborn()
    with pytest.raises(DeadlineError):
        await guests.run(stubborn.run(), name="n", timeout_s=0.01, limit="k")
    await guests.close()
    assert guests.num_late == 1
    stubborn.let_go.set()
    await guests.close()
    assert guests.num_late == 0
