"""`async def` reward functions: on the loop, under the same deadline, and as harmless as those in a process."""

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from asyncrl.errors import DeadlineError, RewardError
from asyncrl.ports import RewardRequest, RewardResult
from asyncrl.rewards.scoring import Scorer

Project = Callable[[str], Path]
Opened = Callable[..., AbstractAsyncContextManager[Scorer]]
Ask = Callable[..., RewardRequest]


async def test_an_async_function_runs_on_the_loop(project: Project, opened: Opened, ask: Ask) -> None:
    project("""
        async def score(data_source, solution_str, ground_truth, extra_info):
            await asyncio.sleep(0)
            extra_info["mine"] = 1
            return {"score": float(solution_str), "pid": os.getpid()}
    """)
    async with opened("my_rewards:score") as scorer:
        request = ask("2.5", "", seen=[])
        assert await scorer.score(request) == RewardResult(score=2.5, extra={"pid": os.getpid()})
        assert request.extra_info == {"seen": []}, "the function changed the row of the other sessions"


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("raise ValueError('x')", "raised ValueError: x (my_rewards.py:3 in score)"),
        ("raise TimeoutError('its own')", "raised TimeoutError: its own"),
        ("raise asyncio.CancelledError('inner')", "raised asyncio.exceptions.CancelledError: inner"),
        ("sys.exit(2)", "raised SystemExit: 2"),
        ("return float('nan')", "returned nan"),
        ("return None", "returned None"),
        ("return {1, 2}", "returned set that cannot be kept"),
    ],
)
async def test_a_failing_async_function_is_an_error(project: Project, opened: Opened, ask: Ask, deed: str, message: str) -> None:
    project(f"async def score(**request):\n    {deed}")
    async with opened("my_rewards:score") as scorer:
        with pytest.raises(RewardError) as caught:
            await scorer.score(ask())
    assert message in str(caught.value)


async def test_a_hanging_async_function_meets_its_deadline(project: Project, opened: Opened, ask: Ask) -> None:
    project("async def score(**request):\n    await asyncio.Event().wait()")
    async with opened("my_rewards:score", timeout_s=0.05) as scorer:
        with pytest.raises(DeadlineError, match=r"took longer than reward\.timeout_s"):
            await scorer.score(ask())


async def test_cancelling_an_async_score_is_a_cancellation(project: Project, opened: Opened, ask: Ask) -> None:
    project("async def score(**request):\n    await asyncio.Event().wait()")
    async with opened("my_rewards:score") as scorer:
        task = asyncio.create_task(scorer.score(ask()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
