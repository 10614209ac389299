"""Every wait of a session and of its group has an end, which is told with uid, session, turn and state."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.agents.alarm import Alarm
from asyncrl.agents.session import run_session
from asyncrl.config import TrainRun
from asyncrl.errors import DeadlineError
from asyncrl.ports import GenerateRequest, IncidentKind, Prompt, RewardRequest
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.tools import FunctionTool
from asyncrl.transfer_queue import TransferQueue

NewRun = Callable[..., TrainRun]
Rig = Any  # the fixtures' classes live in conftest, which is no module
Virtual = Callable[..., Any]


def now() -> float:
    return asyncio.get_running_loop().time()


def run_virtual(main: Any) -> Any:
    loop = VirtualLoop(0)
    try:
        return loop.run_until_complete(main)
    finally:
        loop.abandon()


# --- alarm ------------------------------------------------------------------------------------------------------------------------


def test_an_alarm_strikes_when_a_look_finds_nothing_new() -> None:
    async def main() -> tuple[list[float], float]:
        looks: list[float] = []

        def look() -> str:
            looks.append(now())
            return "" if len(looks) < 3 else "it stands"

        with pytest.raises(DeadlineError, match="it stands"):
            async with Alarm(2.0, look):
                await asyncio.sleep(100.0)
        return looks, now()

    assert run_virtual(main()) == ([2.0, 4.0, 6.0], 6.0)


def test_an_alarm_looks_no_more_when_its_block_has_ended() -> None:
    async def main() -> float:
        async with Alarm(2.0, lambda: pytest.fail("nobody asked")):
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        return now()

    assert run_virtual(main()) == 11.0


def test_an_alarm_changes_no_other_error_of_its_block() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match="mine") as caught:
            async with Alarm(2.0, lambda: "late"):
                raise TimeoutError("mine")
        assert not isinstance(caught.value, DeadlineError)
        task = asyncio.create_task(block())
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def block() -> None:
        async with Alarm(2.0, lambda: "late"):
            await asyncio.sleep(100.0)

    run_virtual(main())


# --- a generate call --------------------------------------------------------------------------------------------------------------


class Beating(ScriptedEngine):
    """Beats every second until `stops_s`; answers after `answers_s`."""

    def __init__(self, answer: Any, *, answers_s: float, stops_s: float) -> None:
        async def late(request: GenerateRequest) -> Any:
            await asyncio.sleep(answers_s)
            return answer(request)

        super().__init__(late)
        self._stops_s = stops_s

    @property
    def beats(self) -> int:
        return int(min(now(), self._stops_s))


@pytest.mark.parametrize(("answers_s", "stops_s", "told_s"), [(500.0, 1e9, None), (500.0, 35.0, 50.0), (500.0, 0.0, 10.0)])
def test_a_call_may_take_as_long_as_its_engine_makes_steps(
    answers_s: float, stops_s: float, told_s: float | None, in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun
) -> None:
    """A look every 10 s. The last beat is at 35 s: the look at 40 s still finds news, that of 50 s none."""
    run = new_run(rollout={"request_timeout_s": 10.0})

    async def main(rig: Rig) -> Any:
        engine = Beating(lambda _: rig.template.encode_assistant("3"), answers_s=answers_s, stops_s=stops_s)
        result = await run_session(prompt, 1, rig.parts(engine, run))
        return result, now(), rig, engine.stats()["running"]

    result, ended_s, rig, num_running = in_virtual_time(main)
    assert num_running == 0
    if told_s is None:
        assert (result.failure, ended_s, rig.told()) == (None, 500.0, [])
        return
    assert ended_s == told_s
    assert "the engine has made no step for rollout.request_timeout_s = 10 s" in str(result.failure)
    (late,) = rig.incidents
    assert (late.kind, late.what, late.limit) == (IncidentKind.DEADLINE, "generate", "rollout.request_timeout_s")
    assert (late.uid, late.session_id, late.turn, late.state) == ("a1", 1, 0, "generate")


# --- tools and rewards ------------------------------------------------------------------------------------------------------------


def test_a_tool_that_is_late_is_told_though_the_model_hears_of_it(
    in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun
) -> None:
    async def slow() -> str:
        """Be slow."""
        await asyncio.sleep(100.0)
        return "never"

    async def main(rig: Rig) -> Any:
        engine = rig.saying('<tool_call>{"name": "slow", "arguments": {}}</tool_call>', "3")
        parts = rig.parts(engine, new_run(agent={"tool_timeout_s": 7.0}), {"slow": FunctionTool(slow)})
        return await run_session(prompt, 0, parts), rig

    result, rig = in_virtual_time(main)
    assert result.failure is None
    (late,) = rig.incidents
    assert (late.kind, late.what, late.limit) == (IncidentKind.DEADLINE, "tool", "agent.tool_timeout_s")
    assert (late.uid, late.session_id, late.turn, late.state) == ("a1", 0, 0, "tool slow")


async def test_a_reward_that_is_late_is_told_with_its_key(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    def late(request: RewardRequest) -> float:
        raise DeadlineError("reward function 'f' took longer than reward.timeout_s = 3")

    rig.scorer.score_with = late
    result = await run_session(prompt, 0, rig.parts(rig.saying("3"), new_run()))
    assert str(result.failure).startswith("DeadlineError (infra)")
    (told,) = rig.incidents
    assert (told.what, told.limit, told.turn, told.state) == ("reward", "reward.timeout_s", 0, "reward")


# --- a group ----------------------------------------------------------------------------------------------------------------------


def test_a_group_that_is_late_ends_with_what_it_has(in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    """Session 0 answers; session 1 is tried again for ever; session 2 waits for its tool, and has been late once."""

    async def slow() -> str:
        """Be slow."""
        await asyncio.sleep(1e6)
        return "never"

    call = '<tool_call>{"name": "slow", "arguments": {}}</tool_call>'

    async def main(rig: Rig) -> Any:
        def script(request: GenerateRequest) -> str:
            if request.request_id.startswith("a1_1"):
                raise ConnectionError("gone")
            return call if request.request_id.startswith("a1_2") else "3"

        agent = {"group_timeout_s": 100.0, "tool_timeout_s": 1e5, "timeout_s": 90.0, "max_attempts": 100, "retry_backoff_s": 2.0}
        engine = rig.engine(script)
        async with TransferQueue() as queue:
            run = new_run(agent=agent, rollout={"n": 3})
            async with rig.runner(queue, engine, run, {"slow": FunctionTool(slow)}) as runner:
                runner.start(prompt)
                await runner.join()
                ended_s, stats = now(), runner.stats()
                assert runner.describe("a1") == "group a1 is not under way"
            return await rig.tags(queue), ended_s, stats, rig, queue.stats()["open_leases"]

    tags, ended_s, stats, rig, num_leases = in_virtual_time(main)
    assert (tags["a1"]["status"], sorted(tags), ended_s) == ("failure", ["a1", "a1_0_0"], 100.0)
    assert str(tags["a1"]["failure"]).startswith("DeadlineError (infra): group a1 took longer than agent.group_timeout_s = 100 s")
    late = rig.incidents[-1]
    assert (late.kind, late.what, late.uid, late.limit) == (IncidentKind.DEADLINE, "group", "a1", "agent.group_timeout_s")
    # attempts fail at 0, 2, 6, 14, 30, 62 s: the seventh would follow at 126 s
    assert "session 1, attempt 5, turn 0: back-off for 38.0 s; session 2, attempt 1, turn 0: tool slow for 8.0 s" in late.text
    assert (stats["sessions_finished"], stats["sessions_failed"], stats["groups_failure"]) == (1.0, 2.0, 1.0)
    assert (stats["sessions_abandoned"], num_leases) == (0.0, 0.0)


def test_a_prompt_that_hangs_in_its_template_ends_with_its_group(in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    async def main(rig: Rig) -> Any:
        async with TransferQueue() as queue:
            async with rig.runner(queue, rig.saying(), new_run(agent={"group_timeout_s": 100.0, "timeout_s": 100.0})) as runner:
                rig.world._pools["files"].free = 0  # every thread hangs
                runner.start(prompt)
                await runner.join()
            return await rig.tags(queue)

    assert str(in_virtual_time(main)["a1"]["failure"]).startswith("DeadlineError (infra): group a1 took longer")


def test_what_the_sessions_of_a_group_are_at_can_be_asked(in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    async def main(rig: Rig) -> Any:
        async def answer(request: GenerateRequest) -> list[int]:
            if request.request_id == "a1_0_1":
                await asyncio.sleep(50.0)
            ids: list[int] = rig.template.encode_assistant(rig.call_then_answer(request))
            return ids

        rig.scorer.delay_s = 100.0
        told = []
        async with TransferQueue() as queue:
            async with rig.runner(queue, ScriptedEngine(answer), new_run()) as runner:
                assert runner.describe("a1") == "group a1 is not under way"
                runner.start(prompt)
                told.append(runner.describe("a1"))
                await asyncio.sleep(20.0)
                told.append(runner.describe("a1"))
                await runner.join()
                lengths = runner.take_lengths()
                assert runner.take_lengths() == []
            tags = await rig.tags(queue)
        return told, sorted(lengths) == sorted(int(tags[key]["policy_len"]) for key in ("a1_0_0", "a1_1_0"))

    told, are_lengths_right = in_virtual_time(main)
    assert told == [
        "no session is under way",
        "session 0, attempt 0, turn 1: generate for 20.0 s; session 1, attempt 0, turn 1: reward for 20.0 s",
    ]
    assert are_lengths_right
