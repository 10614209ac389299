"""Groups on the real store: every started group becomes terminal, and only whole groups are finished."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.config import TrainRun
from asyncrl.errors import StaleLeaseError
from asyncrl.keys import TRAIN, GroupLease
from asyncrl.ports import GenerateRequest, Prompt, RewardRequest
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.tools import FunctionTool
from asyncrl.transfer_queue import TransferQueue

NewRun = Callable[..., TrainRun]
Rig = Any  # the fixture's class lives in conftest, which is no module


async def test_a_group_becomes_finished_with_all_its_rows(rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun) -> None:
    engine = ScriptedEngine(lambda request: rig.template.encode_assistant(rig.call_then_answer(request)), version=4)
    async with rig.runner(queue, engine, new_run()) as runner:
        runner.start(replace(prompt, global_steps=4))
        await runner.join()
        stats = runner.stats()
    tags = await rig.tags(queue)
    assert tags["a1"] == {"is_prompt": True, "status": "finished", "global_steps": 4, "number": 0, "row": -1}
    assert sorted(tags) == ["a1", "a1_0_0", "a1_1_0"]
    names = [
        "input_ids",
        "response_mask",
        "rm_scores",
        "rollout_log_probs",
        "token_versions",
        "uid",
        "extra_fields",
        "raw_prompt",
        "session_id",
    ]
    columns = await queue.kv_batch_get(["a1_0_0", "a1_1_0"], partition_id=TRAIN, fields=names)
    assert columns["uid"] == ["a1", "a1"]
    assert columns["session_id"].tolist() == [0, 1]
    for row in range(2):
        mask, scores = columns["response_mask"][row], columns["rm_scores"][row]
        assert int(mask.sum()) == tags[f"a1_{row}_0"]["policy_len"]
        assert scores.sum() == scores[mask][-1] == 1.0
        assert set(columns["token_versions"][row][mask].tolist()) == {4}
        assert set(columns["token_versions"][row][~mask].tolist()) == {-1}
    counted = ("groups_finished", "sessions_finished", "stop_stop", "tools/ok")
    assert [stats[name] for name in counted] == [1.0, 2.0, 2.0, 2.0]


async def test_status_moves_forward_only(rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun) -> None:
    seen: list[object] = []

    async def follow() -> None:
        async for changes in queue.kv_watch(TRAIN):
            tag = changes.get("a1")
            if tag is not None:
                seen.append(tag["status"])
                if tag["status"] == "finished":
                    return

    follower = asyncio.create_task(follow())
    async with rig.runner(queue, rig.engine(rig.call_then_answer), new_run()) as runner:
        await asyncio.sleep(0)
        runner.start(prompt)
        await follower
    assert [status for status, before in zip(seen, [None, *seen], strict=False) if status != before] in (
        ["pending", "running", "finished"],
        ["running", "finished"],
    )


async def test_one_failed_session_makes_the_group_a_failure_after_all_have_settled(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    settled: list[str] = []

    def score(request: RewardRequest) -> float:
        settled.append(request.solution_str)
        if request.solution_str == "bad":
            raise ZeroDivisionError("in the rule")
        return 1.0

    rig.scorer.score_with = score
    engine = rig.engine(lambda request: "bad" if request.request_id.startswith("a1_0") else "3")
    async with rig.runner(queue, engine, new_run()) as runner:
        runner.start(prompt)
        await runner.join()
    tags = await rig.tags(queue)
    assert tags["a1"]["status"] == "failure"
    assert str(tags["a1"]["failure"]).startswith("ZeroDivisionError (infra): in the rule")
    assert sorted(settled) == ["3", "bad"]
    assert "a1_0_0" not in tags  # no row of the failed session, so nothing could train on it


async def cancels_itself() -> str:
    """Cancel."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    return "never"


async def raises_cancelled() -> str:
    """Cancel."""
    raise asyncio.CancelledError


@pytest.mark.parametrize("function", [cancels_itself, raises_cancelled])
async def test_a_session_cancelled_by_its_tool_fails_its_group_and_no_other(
    function: Callable[..., object], rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    call = '<tool_call>{"name": "cancels", "arguments": {}}</tool_call>'
    engine = rig.engine(lambda request: call if request.request_id == "a1_0_0" else "3")
    async with rig.runner(queue, engine, new_run(), {"cancels": FunctionTool(function, name="cancels")}) as runner:
        runner.start(prompt)
        runner.start(replace(prompt, uid="b2"))
        await runner.join()
    tags = await rig.tags(queue)
    assert (tags["a1"]["status"], tags["b2"]["status"]) == ("failure", "finished")
    assert str(tags["a1"]["failure"]).startswith("CancelledError (infra)")


async def test_sessions_and_groups_whose_tasks_are_cancelled_become_failures(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    reached = asyncio.Event()

    def note(request: GenerateRequest) -> str:
        reached.set()
        return "3"

    rig.scorer.delay_s = 60.0
    async with rig.runner(queue, rig.engine(note), new_run()) as runner:
        for uid, name in (("a1", "session a1_1"), ("b2", "group b2")):
            reached.clear()
            runner.start(replace(prompt, uid=uid))
            await reached.wait()
            victim = next(task for task in asyncio.all_tasks() if task.get_name() == name)
            victim.cancel()
            rig.scorer.delay_s = 0.0 if uid == "a1" else 60.0
            await asyncio.wait({victim})
        other = next(task for task in asyncio.all_tasks() if task.get_name() == "session a1_0")
        other.cancel()
        await runner.join()
        tags = await rig.tags(queue)
    assert (tags["a1"]["status"], tags["b2"]["status"]) == ("failure", "failure")
    assert "cancelled from inside" in str(tags["a1"]["failure"])
    assert "cancelled from inside" in str(tags["b2"]["failure"])


async def test_a_group_whose_task_is_cancelled_before_its_first_turn_becomes_a_failure(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    async with rig.runner(queue, rig.saying(), new_run()) as runner:
        runner.start(prompt)
        next(task for task in asyncio.all_tasks() if task.get_name() == "group a1").cancel()
        await runner.join()
    tag = (await rig.tags(queue))["a1"]
    assert tag["status"] == "failure"
    assert "cancelled from inside" in str(tag["failure"])


async def test_a_prompt_that_cannot_be_rendered_fails_its_group(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    async with rig.runner(queue, rig.saying(), new_run()) as runner:
        runner.start(replace(prompt, messages=[{"role": "user", "content": 3}]))
        await runner.join()
    assert "cannot render" in str((await rig.tags(queue))["a1"]["failure"])


async def test_leaving_the_runner_cancels_what_is_in_flight(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    engine = rig.saying()
    await engine.pause()
    async with rig.runner(queue, engine, new_run()) as runner:
        runner.start(prompt)
        async for changes in queue.kv_watch(TRAIN):
            if (changes.get("a1") or {}).get("status") == "running":
                break
    assert (await rig.tags(queue))["a1"]["status"] == "running"
    assert runner.stats()["groups_in_flight"] == 0.0
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith(("group", "session"))]


async def test_what_the_store_refuses_of_an_admission_is_raised_at_its_start(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    await queue.open_lease(GroupLease(uid="a1"))
    async with rig.runner(queue, rig.saying(), new_run()) as runner:
        with pytest.raises(StaleLeaseError):
            runner.start(prompt)
        assert runner.stats()["groups_in_flight"] == 0.0


async def test_an_error_of_the_body_leaves_as_it_is(rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun) -> None:
    engine = rig.saying()
    await engine.pause()

    async def run() -> None:
        async with rig.runner(queue, engine, new_run()) as runner:
            runner.start(prompt)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run()


async def test_a_group_dropped_while_it_runs_is_counted_and_harms_nobody(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    reached = asyncio.Event()

    def note(request: GenerateRequest) -> str:
        reached.set()
        return "3"

    rig.scorer.delay_s = 0.01
    async with rig.runner(queue, rig.engine(note), new_run()) as runner:
        runner.start(prompt)
        await reached.wait()
        await queue.kv_clear(["a1"], partition_id=TRAIN)
        await runner.join()
        assert runner.stats()["groups_dropped"] == 1.0
    assert await rig.tags(queue) == {}


async def test_a_group_dropped_before_its_sessions_begin_is_counted_and_harms_nobody(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    async with rig.runner(queue, rig.engine(rig.call_then_answer), new_run()) as runner:
        runner.start(prompt)
        runner.start(replace(prompt, uid="b2"))
        async for changes in queue.kv_watch(TRAIN):
            if (changes.get("a1") or {}).get("status") == "pending":
                await queue.drop(["a1"], partition_id=TRAIN, reason="test")
                break
        await runner.join()
        assert runner.stats()["groups_dropped"] == 1.0
    assert sorted(await rig.tags(queue)) == ["b2", "b2_0_0", "b2_1_0"]
