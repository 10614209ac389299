"""What the sessions of a runner may take: places, the loop, and their time when it is left."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from asyncrl.agents import guests, tool_agent  # noqa: F401  (a run's checks have imported the loop before)
from asyncrl.agents.loop import AgentLoopOutput, SessionContext
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.config import TrainRun
from asyncrl.keys import TRAIN
from asyncrl.ports import GenerateRequest, Prompt
from asyncrl.tools import FunctionTool
from asyncrl.transfer_queue import TransferQueue

NewRun = Callable[..., TrainRun]
Rig = Any  # the fixture's class lives in conftest, which is no module


async def test_no_more_sessions_run_at_once_than_allowed(rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun) -> None:
    running, most = 0, 0

    async def slow() -> str:
        """Slow."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return "ok"

    call = '<tool_call>{"name": "slow", "arguments": {}}</tool_call>'
    engine = rig.engine(lambda request: call if request.request_id.endswith("_0") else "3")
    run = new_run(agent={"max_concurrent_sessions": 2}, rollout={"n": 6})
    async with rig.runner(queue, engine, run, {"slow": FunctionTool(slow)}) as runner:
        runner.start(prompt)
        await runner.join()
    assert most == 2
    assert len(await rig.tags(queue)) == 7


async def test_nothing_of_a_group_blocks_the_loop(rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun) -> None:
    def sleepy() -> str:
        """Sleep."""
        time.sleep(0.001)
        return "ok"

    call = '<tool_call>{"name": "sleepy", "arguments": {}}</tool_call>'
    engine = rig.engine(lambda request: call if request.request_id.endswith("_0") else "3")
    with blockbuster_ctx("asyncrl"):
        async with rig.runner(queue, engine, new_run(), {"sleepy": FunctionTool(sleepy)}) as runner:
            runner.start(prompt)
            await runner.join()
    assert (await rig.tags(queue))["a1"]["status"] == "finished"


async def test_the_guard_of_the_loop_bites(rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun) -> None:
    async def sleepy() -> str:
        """Sleep on the loop."""
        time.sleep(0.001)  # noqa: ASYNC251  it is what must be caught
        return "ok"

    call = '<tool_call>{"name": "sleepy", "arguments": {}}</tool_call>'
    engine = rig.engine(lambda request: call if request.request_id.endswith("_0") else "3")
    with blockbuster_ctx("asyncrl"):
        async with rig.runner(queue, engine, new_run(), {"sleepy": FunctionTool(sleepy)}) as runner:
            runner.start(prompt)
            await runner.join()
    columns = await queue.kv_batch_get(["a1_0_0"], partition_id=TRAIN, fields=["extra_fields"])
    assert columns["extra_fields"][0]["tool_outcomes"] == {"error": 1}


class _Odd:
    """An agent loop that does what no loop should: `deed` by uid."""

    let_go: asyncio.Event

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        made = await SingleTurn().run(prompt, context)
        if prompt.uid == "holds_on":
            while not self.let_go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.let_go.wait()
        if prompt.uid == "no_ids":
            return [replace(made[0], response_ids=("x",) * len(made[0].response_ids))]  # type: ignore[arg-type]
        if prompt.uid == "bad_error":
            raise _Unspeakable
        return made


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


async def test_what_an_odd_loop_does_costs_its_own_group_only(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    _Odd.let_go = asyncio.Event()
    run = new_run(agent={"name": "single_turn", "timeout_s": 0.2})
    async with rig.runner(queue, rig.engine(lambda _: "3"), run, {}) as runner:
        runner._parts = replace(runner._parts, loop=_Odd())
        for uid in ("holds_on", "no_ids", "bad_error", "well"):
            runner.start(replace(prompt, uid=uid))
        await runner.join()
        abandoned = runner.stats()["sessions_abandoned"]
        _Odd.let_go.set()
    tags = await rig.tags(queue)
    assert abandoned == 2
    assert {uid: tags[uid]["status"] for uid in ("holds_on", "no_ids", "bad_error", "well")} == {
        "holds_on": "failure",
        "no_ids": "failure",
        "bad_error": "failure",
        "well": "finished",
    }
    assert "agent.timeout_s = 0.2" in str(tags["holds_on"]["failure"])
    assert str(tags["no_ids"]["failure"]).startswith("FieldError (infra)")
    assert str(tags["bad_error"]["failure"]).startswith("_Unspeakable (infra): <its message raised ZeroDivisionError>")


async def test_leaving_the_runner_does_not_wait_for_a_loop_that_holds_on(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "CLOSE_TIMEOUT_S", 0.01)
    _Odd.let_go = asyncio.Event()
    begun = asyncio.Event()

    def note(_: GenerateRequest) -> str:
        begun.set()
        return "3"

    async with rig.runner(queue, rig.engine(note), new_run(agent={"name": "single_turn"}), {}) as runner:
        runner._parts = replace(runner._parts, loop=_Odd())
        runner.start(replace(prompt, uid="holds_on"))
        await begun.wait()
        await asyncio.sleep(0)
    assert runner.stats()["sessions_abandoned"] == 2
    _Odd.let_go.set()
    await runner._parts.guests.close()
