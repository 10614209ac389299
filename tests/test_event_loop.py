"""A command's loop gives back what its run does, and ends."""

import asyncio
import gc
import logging
from contextlib import suppress

import pytest

from asyncrl.event_loop import COLLECT_AFTER, rare_collections, run_loop


async def _hold_on() -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


def test_result_and_error_are_those_of_the_run() -> None:
    async def give() -> int:
        return 3

    async def fail() -> int:
        raise ZeroDivisionError

    assert run_loop(give()) == 3
    with pytest.raises(ZeroDivisionError):
        run_loop(fail())


def test_what_is_left_is_cancelled() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("wait")

    async def leave() -> None:
        leave.task = asyncio.create_task(wait())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    run_loop(leave())
    assert ended == ["wait"]


def test_a_task_that_holds_on_is_named_and_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> asyncio.Task[None]:
        task = asyncio.create_task(_hold_on(), name="guest: tool hammer")
        await asyncio.sleep(0)
        return task

    with caplog.at_level(logging.WARNING):
        task = run_loop(leave(), end_timeout_s=0.01)
    assert "left behind: guest: tool hammer" in caplog.text
    assert not task.done()
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_an_interrupt_ends_the_run_with_its_cleanup() -> None:
    cleaned: list[str] = []

    async def run() -> None:
        try:
            asyncio.get_running_loop().call_soon(_interrupt)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("run")

    with pytest.raises(KeyboardInterrupt):
        run_loop(run())
    assert cleaned == ["run"]


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_collections_are_rare_inside_the_block_and_as_before_after_it() -> None:
    before = gc.get_threshold()
    with suppress(ZeroDivisionError), rare_collections():
        assert gc.get_threshold() == COLLECT_AFTER
        assert gc.get_freeze_count() > 0
        raise ZeroDivisionError
    assert gc.get_threshold() == before
