"""A stop cuts short what stands inside `until`, and nothing else."""

import asyncio
import os
import signal

import pytest

from asyncrl.stopping import Stop, StopRequested, on_signals, until


async def test_a_request_cuts_a_wait_short() -> None:
    stop = Stop()
    asyncio.get_running_loop().call_soon(stop.request)
    with pytest.raises(StopRequested):
        async with until(stop):
            await asyncio.Event().wait()


async def test_a_second_request_on_the_heels_of_the_first_changes_nothing() -> None:
    """The wait is being cut short already, and a timeout that expires cannot be told again when to."""
    stop, told = Stop(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: told.append(context))

    def request_twice() -> None:
        stop.request()
        loop.call_soon(stop.request)

    loop.call_soon(request_twice)
    with pytest.raises(StopRequested):
        async with until(stop):
            await asyncio.Event().wait()
    assert told == []


async def test_a_request_before_the_block_does_not_start_it() -> None:
    stop, entered = Stop(), False
    stop.request()
    with pytest.raises(StopRequested):
        async with until(stop):
            entered = True
    assert not entered


async def test_a_block_that_ends_by_itself_is_left_alone() -> None:
    stop = Stop()
    async with until(stop):
        await asyncio.sleep(0)
    stop.request()
    await asyncio.sleep(0)


async def test_a_timeout_of_the_block_itself_stays_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with until(Stop()):
            raise TimeoutError


async def test_a_cancellation_from_outside_stays_a_cancellation() -> None:
    async def wait() -> None:
        async with until(Stop()):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_first_signal_requests_a_stop_and_the_second_is_the_systems() -> None:
    stop = Stop()
    with on_signals(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
        assert stop.is_requested
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
