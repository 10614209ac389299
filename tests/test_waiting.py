"""A deadline names what it cut short, and nothing else is taken for it."""

import asyncio

import pytest

from asyncrl.errors import DeadlineError, StrayCancelError
from asyncrl.waiting import is_asked_to_end, no_stray_cancel, within


async def test_a_block_that_takes_too_long_is_cancelled_and_named() -> None:
    ended = asyncio.Event()

    async def bake() -> None:
        try:
            async with within(0.01, lambda: "the oven took longer than 0.01 s"):
                await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(DeadlineError, match=r"^the oven took longer than 0\.01 s$"):
        await bake()
    assert ended.is_set()


async def test_a_timeout_of_the_block_itself_stays_what_it_is() -> None:
    with pytest.raises(TimeoutError, match="its own") as caught:
        async with within(60, lambda: "ours"):
            raise TimeoutError("its own")
    assert not isinstance(caught.value, DeadlineError)


async def test_without_a_limit_a_block_may_take_its_time() -> None:
    async with within(None, lambda: "never"):
        await asyncio.sleep(0)


async def test_a_cancellation_from_inside_is_told_from_one_that_was_asked_for() -> None:
    asked: list[bool] = []

    async def wait_on(future: asyncio.Future[None]) -> None:
        try:
            await future
        except asyncio.CancelledError:
            asked.append(is_asked_to_end())

    inside: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    inside.cancel()
    await wait_on(inside)
    task = asyncio.create_task(wait_on(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert asked == [False, True]


async def test_a_cancellation_that_nobody_asked_for_does_not_end_a_task_of_a_group_in_silence() -> None:
    inside: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        with no_stray_cancel("the baker"):
            await inside

    async def bake() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait())
            await asyncio.sleep(0)
            inside.cancel()

    with pytest.raises(ExceptionGroup) as caught:
        await bake()
    (error,) = caught.value.exceptions
    assert isinstance(error, StrayCancelError)
    assert str(error) == "the baker was cancelled, and nobody had asked for it"


async def test_a_cancellation_that_was_asked_for_goes_on() -> None:
    async def wait() -> None:
        with no_stray_cancel("the baker"):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
