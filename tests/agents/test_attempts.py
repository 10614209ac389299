"""A session that the machinery failed is tried again; nothing of the attempt before is left, and nobody else is held up."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.agents.attempts import backoff_s
from asyncrl.agents.loop import AgentLoopOutput, SessionContext
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.config import TrainRun
from asyncrl.errors import DeadlineError, EngineError, PromptTooLongError, RewardError, StaleLeaseError, TaskEndedError
from asyncrl.keys import TRAIN
from asyncrl.ports import GenerateRequest, Prompt, RewardRequest
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.tools import FunctionTool
from asyncrl.transfer_queue import TransferQueue

NewRun = Callable[..., TrainRun]
Rig = Any  # the fixtures' classes live in conftest, which is no module
Virtual = Callable[..., Any]
RETRIES = {"max_attempts": 3}
CALL = '<tool_call>{"name": "fails", "arguments": {}}</tool_call>'


def now() -> float:
    return asyncio.get_running_loop().time()


class Once:
    """Raises an error at its first call."""

    def __init__(self, error: BaseException) -> None:
        self._errors = [error]

    def __call__(self) -> None:
        if self._errors:
            raise self._errors.pop()


# --- which failures are tried again -----------------------------------------------------------------------------------------------

WHERE: dict[str, tuple[str, Callable[[], BaseException], bool]] = {
    "engine lost": ("engine", lambda: EngineError("gone"), True),
    "our own bug": ("engine", lambda: KeyError("x"), True),
    "over-long prompt": ("engine", lambda: PromptTooLongError("too long"), False),
    "tool server lost": ("tool", lambda: ConnectionResetError("gone"), True),
    "cancelled by a tool": ("tool", asyncio.CancelledError, True),
    "ended by the environment": ("tool", lambda: TaskEndedError("game over"), False),
    "reward raised": ("reward", lambda: RewardError("in the rule"), True),
    "reward late": ("reward", lambda: DeadlineError("the rule took longer than reward.timeout_s = 1"), True),
}


@pytest.mark.parametrize("case", WHERE)
def test_only_what_the_machinery_failed_is_tried_again(
    case: str, in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun
) -> None:
    where, error, is_retried = WHERE[case]

    async def main(rig: Rig) -> tuple[dict[str, Any], dict[str, float], Rig]:
        fails = Once(error())

        async def tool() -> str:
            """Fail."""
            if where == "tool":
                fails()
            return "ok"

        def script(request: GenerateRequest) -> str:
            if where == "engine":
                fails()
            return CALL if request.request_id.endswith("_0") else "3"

        def score(request: RewardRequest) -> float:
            if where == "reward":
                fails()
            return 1.0

        rig.scorer.score_with = score
        run = new_run(agent=RETRIES, rollout={"n": 1})
        async with TransferQueue() as queue:
            async with rig.runner(queue, rig.engine(script), run, {"fails": FunctionTool(tool, name="fails")}) as runner:
                runner.start(prompt)
                await runner.join()
                stats = runner.stats()
            return await rig.tags(queue), stats, rig

    tags, stats, rig = in_virtual_time(main)
    assert stats.get("sessions_retried", 0.0) == float(is_retried)
    if is_retried:
        assert (tags["a1"]["status"], sorted(tags)) == ("finished", ["a1", "a1_0_0"])
        assert "failure" not in tags["a1"]
        assert rig.told()[-1] == ("retry", "session")
    else:
        assert tags["a1"]["status"] == "failure"
        assert rig.told() == [("failure", "session")]


async def test_a_session_without_a_token_is_not_tried_again(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    async with rig.runner(queue, rig.engine(lambda _: []), new_run(agent=RETRIES, rollout={"n": 1})) as runner:
        runner.start(prompt)
        await runner.join()
    assert len(rig.requests) == 1
    assert str((await rig.tags(queue))["a1"]["failure"]).startswith("EmptySessionError (model)")


def test_a_session_that_is_late_is_tried_again(in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    async def main(rig: Rig) -> tuple[dict[str, Any], Rig]:
        waits = [60.0]

        async def answer(request: GenerateRequest) -> list[int]:
            await asyncio.sleep(waits.pop() if waits else 0.0)
            ids: list[int] = rig.template.encode_assistant("3")
            return ids

        run = new_run(agent={**RETRIES, "timeout_s": 50.0}, rollout={"n": 1})
        async with TransferQueue() as queue:
            async with rig.runner(queue, ScriptedEngine(answer), run) as runner:
                runner.start(prompt)
                await runner.join()
            return await rig.tags(queue), rig

    tags, rig = in_virtual_time(main)
    assert tags["a1"]["status"] == "finished"
    assert rig.told() == [("deadline", "session"), ("retry", "session")]
    late = rig.incidents[0]
    assert (late.uid, late.session_id, late.attempt, late.turn, late.state) == ("a1", 0, 0, 0, "generate")
    assert (late.limit, "generate for 50.0 s" in late.text) == ("agent.timeout_s", True)


# --- when, and how often ----------------------------------------------------------------------------------------------------------


def test_the_back_off_doubles_and_the_seeds_stay(in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    async def main(rig: Rig) -> tuple[dict[str, Any], list[float], Rig]:
        times: list[float] = []

        def script(request: GenerateRequest) -> str:
            times.append(now())
            raise EngineError(f"gone {len(times)}")

        run = new_run(agent={"max_attempts": 4, "retry_backoff_s": 3.0}, rollout={"n": 1})
        async with TransferQueue() as queue:
            async with rig.runner(queue, rig.engine(script), run) as runner:
                runner.start(prompt)
                await runner.join()
            return await rig.tags(queue), times, rig

    tags, times, rig = in_virtual_time(main)
    assert [time - times[0] for time in times] == [0.0, 3.0, 9.0, 21.0]
    assert len({request.seed for request in rig.requests}) == 1
    assert str(tags["a1"]["failure"]).startswith("EngineError (infra): gone 4")
    assert rig.told() == [("retry", "session")] * 3 + [("failure", "session")]
    assert [incident.attempt for incident in rig.incidents] == [0, 1, 2, 3]


def test_a_back_off_is_never_more_than_a_float_can_hold(new_run: NewRun) -> None:
    config = new_run(agent={"max_attempts": 2**31 - 1}).agent
    assert backoff_s(attempt=2**31 - 2, config=config) < 1e10


def test_a_session_leaves_its_place_to_others_while_it_waits(in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    async def main(rig: Rig) -> tuple[list[tuple[float, str]], dict[str, float]]:
        asked: list[tuple[float, str]] = []
        fails = Once(EngineError("gone"))

        async def answer(request: GenerateRequest) -> list[int]:
            asked.append((now(), request.request_id))
            fails()
            await asyncio.sleep(2.0)
            ids: list[int] = rig.template.encode_assistant("3")
            return ids

        run = new_run(agent={"name": "single_turn", "max_attempts": 2, "retry_backoff_s": 5.0, "max_concurrent_sessions": 1})
        async with TransferQueue() as queue:
            engine = ScriptedEngine(answer)
            async with rig.runner(queue, engine, run, {}) as runner:
                runner.start(prompt)
                await runner.join()
            return asked, {**runner.stats(), **engine.stats()}

    asked, stats = in_virtual_time(main)
    (_, first), (_, other), (_, again) = asked
    assert first == again != other
    assert [time for time, _ in asked] == [0.0, 0.0, 5.0]
    assert (stats["groups_finished"], stats["running"], stats["sessions_abandoned"]) == (1.0, 0.0, 0.0)


def test_an_attempt_that_failed_leaves_no_place_and_no_guest_behind(
    in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun
) -> None:
    """Its tool still runs when the session is late: it would hold the only place of the tool."""

    async def main(rig: Rig) -> tuple[dict[str, Any], dict[str, float], int]:
        waits = [60.0]

        async def slow() -> str:
            """Be slow once."""
            await asyncio.sleep(waits.pop() if waits else 0.0)
            return "ok"

        call = CALL.replace("fails", "slow")
        run = new_run(agent={**RETRIES, "timeout_s": 50.0, "tool_timeout_s": 100.0, "max_concurrent_tools": 1}, rollout={"n": 1})
        engine = rig.engine(lambda request: call if request.request_id.endswith("_0") else "3")
        async with TransferQueue() as queue:
            async with rig.runner(queue, engine, run, {"slow": FunctionTool(slow)}) as runner:
                runner.start(prompt)
                await runner.join()
                free = runner._tools._places["slow"]._value
            return await rig.tags(queue), runner.stats(), free

    tags, stats, free = in_virtual_time(main)
    assert (tags["a1"]["status"], free) == ("finished", 1)
    assert (stats["sessions_abandoned"], stats["tools/abandoned"]) == (0.0, 0.0)


# --- what is left of an attempt ---------------------------------------------------------------------------------------------------


class _HoldsOn:
    """A loop whose first attempt goes on through its cancellation, and keeps a turn when the second one has begun."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.refused: list[BaseException] = []
        self.num_begun = 0

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        self.num_begun += 1
        if self.num_begun > 1:
            made = await SingleTurn().run(prompt, context)
            self.let_go.set()
            await asyncio.sleep(1.0)
            return made
        while not self.let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.let_go.wait()
        try:
            await SingleTurn().run(prompt, context)
        except StaleLeaseError as error:
            self.refused.append(error)
        return []


def test_a_late_write_of_the_attempt_before_is_refused(in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    async def main(rig: Rig) -> tuple[dict[str, Any], _HoldsOn, list[int]]:
        loop, run = _HoldsOn(), new_run(agent={"name": "single_turn", **RETRIES, "timeout_s": 50.0}, rollout={"n": 1})
        texts = iter(["3", "late"])
        async with TransferQueue() as queue:
            async with rig.runner(queue, rig.engine(lambda _: next(texts)), run, {}) as runner:
                runner._parts = replace(runner._parts, loop=loop)
                runner.start(prompt)
                await runner.join()
            columns = await queue.kv_batch_get(["a1_0_0"], partition_id=TRAIN, fields=["responses"])
            return await rig.tags(queue), loop, columns["responses"][0].tolist() == rig.template.encode_assistant("3")

    tags, loop, is_of_the_second = in_virtual_time(main)
    assert (tags["a1"]["status"], sorted(tags), is_of_the_second) == ("finished", ["a1", "a1_0_0"], True)
    assert loop.num_begun == 2
    assert [str(error).split(":")[0] for error in loop.refused] == ["refused a write of key 'a1_0_0' in 'turns'"]


async def test_a_group_that_was_dropped_is_not_tried_again(rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun) -> None:
    dropped = asyncio.Event()

    async def answer(request: GenerateRequest) -> list[int]:
        await queue.drop(["a1"], partition_id=TRAIN, reason="test")
        dropped.set()
        raise EngineError("gone")

    async with rig.runner(queue, ScriptedEngine(answer), new_run(agent=RETRIES, rollout={"n": 1})) as runner:
        runner.start(prompt)
        await runner.join()
        assert dropped.is_set()
        assert runner.stats()["groups_dropped"] == 1.0
    assert rig.told() == []  # who dropped it has told so


# --- the greedy session -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_failures", [1, 3])
def test_the_greedy_session_has_its_own_attempts(
    num_failures: int, in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun
) -> None:
    async def main(rig: Rig) -> tuple[dict[str, Any], Rig]:
        left = [EngineError("ill")] * num_failures

        def script(request: GenerateRequest) -> str:
            if request.sampling.temperature == 0.0 and left:
                raise left.pop()
            return "3"

        run = new_run(agent={"name": "single_turn", **RETRIES}, algorithm={"adv_estimator": "remax"})
        async with TransferQueue() as queue:
            async with rig.runner(queue, rig.engine(script), run, {}) as runner:
                runner.start(prompt)
                await runner.join()
            return await rig.tags(queue), rig

    tags, rig = in_virtual_time(main)
    greedy = [request for request in rig.requests if request.sampling.temperature == 0.0]
    assert len(rig.requests) - len(greedy) == 2  # for its sake no other session is tried again
    assert len(greedy) == min(num_failures + 1, 3)
    assert tags["a1"]["status"] == ("finished" if num_failures == 1 else "failure")
    if num_failures == 3:
        assert str(tags["a1"]["failure"]).startswith("EngineError (infra): the greedy session failed: ill")
