"""Managers: the over-long penalty, the components, and limits before any function. A failure is never a number."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import LimitsConfig
from asyncrl.errors import DeadlineError, RewardError
from asyncrl.ports import RewardRequest, RewardResult
from asyncrl.rewards.managers import overlong_penalty
from asyncrl.rewards.scoring import Scorer

Project = Callable[[str], Path]
Opened = Callable[..., AbstractAsyncContextManager[Scorer]]
Ask = Callable[..., RewardRequest]


# --- dapo -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20479, -4095 / 4096), (20480, -1.0), (40960, -1.0)],
)
def test_the_overlong_penalty_by_hand(length: int, penalty: float) -> None:
    """The numbers of the paper: at most 20,480 tokens, a buffer of 4,096."""
    assert overlong_penalty(length, max_response_length=20480, buffer_len=4096, factor=1.0) == penalty
    assert overlong_penalty(length, max_response_length=20480, buffer_len=4096, factor=2.5) == 2.5 * penalty


@given(limit=st.integers(1, 10**5), share=st.floats(0, 1), length=st.integers(1, 10**5), factor=st.floats(0.01, 100))
def test_within_the_limit_the_penalty_is_verls(limit: int, share: float, length: int, factor: float) -> None:
    buffer = max(1, round(limit * share))
    found = overlong_penalty(length, max_response_length=limit, buffer_len=buffer, factor=factor)
    verl = min(-(length - (limit - buffer)) / buffer * factor, 0)
    assert found == pytest.approx(max(verl, -factor), rel=1e-12)
    assert found == overlong_penalty(max(length, 1), max_response_length=limit, buffer_len=buffer, factor=factor)
    assert not str(found).startswith("-0.0") or found < 0


async def test_dapo_lowers_the_score_of_a_long_session_and_says_by_how_much(project: Project, opened: Opened, ask: Ask) -> None:
    project("def score(**request): return {'score': float(request['solution_str']), 'kept': 7, 'overlong': 'mine'}")
    keys = {"manager": "dapo", "overlong_buffer_len": 4096, "overlong_penalty_factor": 2.0}
    async with opened("my_rewards:score", rules={"max_response_length": 20480}, **keys) as scorer:
        short = await scorer.score(ask("1", response_len=100))
        long = await scorer.score(ask("1", response_len=18432))
        with pytest.raises(RewardError, match="raised ValueError"):
            await scorer.score(ask("x", response_len=18432))
    assert short == RewardResult(score=1.0, extra={"kept": 7, "overlong": False, "overlong_reward": 0.0})
    assert long == RewardResult(score=0.0, extra={"kept": 7, "overlong": True, "overlong_reward": -1.0})


# --- gdpo -------------------------------------------------------------------------------------------------------------------------


async def test_with_any_manager_a_session_must_have_the_components(project: Project, opened: Opened, ask: Ask) -> None:
    """The over-long penalty may be one of them."""
    project("def score(**request): return {'score': 1.0} if request['solution_str'] == 'bare' else {'score': 1.0, 'form': 0.5}")
    keys = {"manager": "dapo", "overlong_buffer_len": 10, "overlong_penalty_factor": 1.0}
    rules = {"max_response_length": 20, "components": ["form", "overlong_reward"]}
    async with opened("my_rewards:score", rules=rules, **keys) as scorer:
        assert (await scorer.score(ask("whole", response_len=15))).extra == {"form": 0.5, "overlong": True, "overlong_reward": -0.5}
        with pytest.raises(RewardError, match="returned no component 'form'"):
            await scorer.score(ask("bare", response_len=15))


async def test_gdpo_keeps_every_component(project: Project, opened: Opened, ask: Ask) -> None:
    project("def score(**request): return {'score': 1.5, 'right': 1, 'format': 0.5, 'note': 'x'}")
    rules = {"components": ["right", "format", "score"]}
    async with opened("my_rewards:score", manager="gdpo", rules=rules) as scorer:
        result = await scorer.score(ask())
    assert result == RewardResult(score=1.5, extra={"right": 1.0, "format": 0.5, "score": 1.5, "note": "x"})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("1.0", "returned no component 'format' (algorithm.gdpo_reward_keys); it returned 'score'"),
        ("{'score': 1.0, 'right': 1}", "returned no component 'format' (algorithm.gdpo_reward_keys); it returned 'right', 'score'"),
        ("{'score': 1.0, 'format': float('nan')}", "returned 'format': nan; it must be a finite number"),
        ("{'score': 1.0, 'format': None}", "returned 'format': None; it must be a finite number"),
        ("{'score': 1.0, 'format': True}", "returned 'format': True; it must be a finite number"),
        ("{'score': 1.0, 'format': '1'}", "returned 'format': '1'; it must be a finite number"),
        ("{'score': 1.0, 'format': 10**400}", "an integer of more than 64 bits"),
        ("{'format': 1.0}", "returned a dict without 'score'"),
    ],
)
async def test_a_component_that_is_no_finite_number_fails_the_session(
    project: Project, opened: Opened, ask: Ask, returned: str, message: str
) -> None:
    project(f"def score(**request): return {returned}")
    async with opened("my_rewards:score", manager="gdpo", rules={"components": ["format"]}) as scorer:
        with pytest.raises(RewardError) as caught:
            await scorer.score(ask())
        assert scorer.stats()["failed"] == 1
    assert message in str(caught.value)


# --- rate_limited -----------------------------------------------------------------------------------------------------------------

AT_ONCE = """
    running = most = 0
    async def score(**request):
        global running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return {"score": 1.0, "most": most}
"""


async def test_limits_stand_before_an_async_function(project: Project, opened: Opened, ask: Ask) -> None:
    project(AT_ONCE)
    async with opened("my_rewards:score", manager="rate_limited", limits=LimitsConfig(max_concurrent=3)) as scorer:
        results = await asyncio.gather(*(scorer.score(ask()) for _ in range(20)))
        assert max(result.extra["most"] for result in results) == 3
        assert (scorer.stats()["queued"], scorer.stats()["running"], scorer.stats()["scored"]) == (0, 0, 20)


async def test_an_expired_wait_is_a_failure_and_the_line_goes_on(project: Project, opened: Opened, ask: Ask) -> None:
    project("gate = asyncio.Event()\nasync def score(**request):\n    await gate.wait()\n    return 1.0")
    limits = LimitsConfig(max_concurrent=1, queue_timeout_s=0.05)
    async with opened("my_rewards:score", manager="rate_limited", limits=limits) as scorer:
        first = asyncio.create_task(scorer.score(ask()))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineError, match=r"no place for a reward call within reward\.limits\.queue_timeout_s"):
            await scorer.score(ask())
        assert (scorer.stats()["timed_out"], scorer.stats()["queue_timeouts"]) == (1, 1)
        sys.modules["my_rewards"].gate.set()
        assert [(await first).score, (await scorer.score(ask())).score] == [1.0, 1.0]


async def test_a_call_past_its_deadline_is_a_failure_and_gives_its_place_back(project: Project, opened: Opened, ask: Ask) -> None:
    project("def score(**request):\n    request['solution_str'] == 'hang' and time.sleep(1000)\n    return 1.0")
    limits = LimitsConfig(max_concurrent=1)
    async with opened("my_rewards:score", manager="rate_limited", limits=limits, timeout_s=0.2) as scorer:
        late, fine = await asyncio.gather(*(scorer.score(ask(text)) for text in ("hang", "1")), return_exceptions=True)
        assert isinstance(late, DeadlineError)
        assert "took longer than reward.timeout_s" in str(late)
        assert fine == RewardResult(score=1.0)


async def test_a_sync_function_has_at_most_as_many_places_as_workers(project: Project, opened: Opened, ask: Ask) -> None:
    """Or calls that began in one minute, by the limit, would reach the function in another."""
    project("def score(**request): return 1.0")
    async with opened("my_rewards:score", manager="rate_limited", num_workers=2, limits=LimitsConfig(max_rpm=1000)) as scorer:
        tasks = [asyncio.create_task(scorer.score(ask())) for _ in range(9)]
        await asyncio.sleep(0)
        assert (scorer.stats()["running"], scorer.stats()["queued"], scorer.stats()["waiting"]) == (2, 7, 0)
        assert [result.score for result in await asyncio.gather(*tasks)] == [1.0] * 9
