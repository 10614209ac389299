"""A session ends with scored trajectories or with a failure that says whose fault it was; rewards are never invented."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.agents.loop import AgentLoopOutput, SessionContext
from asyncrl.agents.rows import rows_of, score_on_last_policy_token, trajectory_tag
from asyncrl.agents.session import SessionParts, failure_of, run_session
from asyncrl.config import TrainRun
from asyncrl.errors import EngineError, RewardError
from asyncrl.fields import CATALOGUE, TAGS
from asyncrl.ports import FailureClass, Prompt
from asyncrl.tools import FunctionTool
from asyncrl.transfer_queue.encoding import encode

NewRun = Callable[..., TrainRun]
Rig = Any  # the fixture's class lives in conftest, which is no module


def raising(error: BaseException) -> Callable[..., float]:
    def act(_: object) -> float:
        raise error

    return act


async def test_the_reward_function_sees_the_last_answer_and_the_conversation(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    engine = rig.saying("so " + rig.call("1 + 2"), "3")
    result = await run_session(prompt, 1, rig.parts(engine, new_run()))
    (request,) = rig.scorer.requests
    assert (request.solution_str, request.ground_truth, request.data_source) == ("3", "3", "test")
    assert (request.extra_info["num_turns"], request.extra_info["num_tool_calls"]) == (2, 1)
    assert [message["role"] for message in request.extra_info["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert result.outputs[0].extra_fields["reward_extra_info"] == {"length": 3}
    assert (result.session_id, result.outputs[0].reward_score) == (1, 1.0)


@pytest.mark.parametrize(
    "error", [RewardError("the function raised ZeroDivisionError"), ValueError("x"), ExceptionGroup("several", [KeyError("k")])]
)
async def test_an_error_in_the_reward_is_a_failure_and_never_a_zero(
    error: Exception, rig: Rig, prompt: Prompt, new_run: NewRun
) -> None:
    rig.scorer.score_with = raising(error)
    result = await run_session(prompt, 0, rig.parts(rig.saying("3"), new_run()))
    assert result.outputs == ()
    assert result.failure is not None
    assert result.failure.error == ("KeyError" if isinstance(error, ExceptionGroup) else type(error).__name__)
    assert result.failure.kind is FailureClass.INFRA


async def test_an_engine_that_dies_is_infrastructure(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    result = await run_session(prompt, 0, rig.parts(rig.engine(raising(EngineError("gone"))), new_run()))
    assert str(result.failure).startswith("EngineError (infra): gone")


@pytest.mark.parametrize("name", ["single_turn", "tool_agent"])
async def test_empty_and_overlong_are_the_models(name: str, rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    run = new_run(agent={"name": name})
    empty = await run_session(prompt, 0, rig.parts(rig.saying([]), run))
    overlong = await run_session(prompt, 0, rig.parts(rig.saying("3", context_len=4), run))
    for result, error in ((empty, "EmptySessionError"), (overlong, "PromptTooLongError")):
        assert result.failure is not None
        assert (result.failure.kind, result.failure.error) == (FailureClass.MODEL, error)


async def test_the_deadline_covers_engine_tools_and_reward(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    run = new_run(agent={"timeout_s": 0.02})
    rig.scorer.delay_s = 60.0
    late_reward = await run_session(prompt, 0, rig.parts(rig.saying("3"), run))

    async def hang() -> str:
        """Hang."""
        await asyncio.Event().wait()
        return ""

    call = '<tool_call>{"name": "hang", "arguments": {}}</tool_call>'
    late_tool = await run_session(prompt, 0, rig.parts(rig.saying(call), run, {"hang": FunctionTool(hang)}))
    for result in (late_reward, late_tool):
        assert result.failure is not None
        assert result.failure.error == "DeadlineError"
        assert "agent.timeout_s = 0.02" in result.failure.message


async def test_a_generate_call_has_a_deadline_of_its_own(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    parts = rig.parts(rig.saying("3"), new_run(rollout={"request_timeout_s": 0.01}))
    await parts.engine.pause()
    result = await run_session(prompt, 0, parts)
    told = "generate call a1_0_0: the engine has made no step for rollout.request_timeout_s = 0.01 s"
    assert told in str(result.failure)


async def test_a_timeout_of_the_reward_itself_keeps_its_own_message(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    rig.scorer.score_with = raising(TimeoutError("the judge"))
    result = await run_session(prompt, 0, rig.parts(rig.saying("3"), new_run()))
    assert "the judge" in str(result.failure)


async def test_a_cancellation_from_inside_is_a_failure(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    async def cancels() -> str:
        """Cancel."""
        raise asyncio.CancelledError

    call = '<tool_call>{"name": "cancels", "arguments": {}}</tool_call>'
    result = await run_session(prompt, 0, rig.parts(rig.saying(call), new_run(), {"cancels": FunctionTool(cancels)}))
    assert result.failure is not None
    assert (result.failure.error, result.failure.kind) == ("CancelledError", FailureClass.INFRA)


async def test_a_cancellation_from_outside_goes_on(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    parts = rig.parts(rig.saying("3"), new_run())
    await parts.engine.pause()
    task = asyncio.create_task(run_session(prompt, 0, parts))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Custom:
    """A loop that gives what it is told."""

    def __init__(self, *outputs: AgentLoopOutput) -> None:
        self.outputs = list(outputs)

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        return self.outputs


def output(**changes: Any) -> AgentLoopOutput:
    columns: dict[str, Any] = {
        "prompt_ids": (1, 2),
        "response_ids": (3, 4, 5),
        "response_mask": (1, 0, 1),
        "response_logprobs": (-1.0, 0.0, -2.0),
        "token_versions": (4, -1, 5),
        "num_turns": 2,
    }
    return AgentLoopOutput(**{**columns, **changes})


async def with_loop(rig: Rig, prompt: Prompt, run: TrainRun, *outputs: AgentLoopOutput) -> Any:
    parts: SessionParts = rig.parts(rig.saying(), run)
    fields = {name: getattr(parts, name) for name in parts.__slots__}
    return await run_session(prompt, 0, SessionParts(**{**fields, "loop": Custom(*outputs)}))


async def test_a_loop_without_trajectories_or_with_torn_columns_fails(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    assert "EmptySessionError (model)" in str((await with_loop(rig, prompt, new_run())).failure)
    torn = await with_loop(rig, prompt, new_run(), output(response_mask=(1, 0)))
    assert "FieldError (infra): columns of a trajectory differ in length" in str(torn.failure)


async def test_a_loop_may_give_several_trajectories_and_its_own_reward(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    result = await with_loop(rig, prompt, new_run(), output(reward_score=0.5), output())
    assert [made.reward_score for made in result.outputs] == [0.5, 0.0]
    assert len(rig.scorer.requests) == 1


async def test_a_session_of_several_trajectories_is_scored_once_by_its_last(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    said = [{"messages": [{"role": "assistant", "content": text}]} for text in ("a draft", "3")]
    first, last = (output(extra_fields=fields) for fields in said)
    result = await with_loop(rig, prompt, new_run(), first, last)
    (request,) = rig.scorer.requests
    assert (request.solution_str, request.response_len) == ("3", 6)
    assert [made.reward_score for made in result.outputs] == [1.0, 1.0]
    assert [made.extra_fields["reward_extra_info"] for made in result.outputs] == [{"length": 3}] * 2
    assert [made.extra_fields["messages"] for made in result.outputs] == [fields["messages"] for fields in said]


# --- rows -------------------------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_catalogue(prompt: Prompt) -> None:
    rows = rows_of(prompt, 3, [output(reward_score=0.5), output(reward_score=1.0)], version=9)
    assert rows.keys == ["a1_3_0", "a1_3_1"]
    for name, column in rows.fields.items():
        entry = CATALOGUE[name]
        block = encode(name, column, rows.keys, step=None)
        if entry.is_tensor:
            assert str(block.schema.dtype) == f"torch.{entry.dtype}", name
            length = {"prompt": 2, "response": 3, "sequence": 5, "none": 1}[entry.axis]
            assert block.bounds == [0, length * block.schema.item_bytes, 2 * length * block.schema.item_bytes], name
    assert rows.fields["rm_scores"][0] == [0.0, 0.0, 0.5]
    assert set(rows.tags[0]) == {name for name, tag in TAGS.items() if tag.on in ("both", "trajectory")}
    tag = {
        name: rows.tags[0][name]
        for name in ("prompt_len", "response_len", "seq_len", "policy_len", "min_global_steps", "max_global_steps")
    }
    assert list(tag.values()) == [2, 3, 5, 2, 4, 5]
    assert rows.tags[0]["global_steps"] == 9


def test_the_score_stands_on_the_last_token_of_the_policy() -> None:
    assert score_on_last_policy_token((1, 1, 0, 0), 2.0) == [0.0, 2.0, 0.0, 0.0]


def test_without_a_versioned_token_the_dispatch_version_counts() -> None:
    tag = trajectory_tag(output(response_mask=(0, 0, 0)), version=6)
    assert (tag["min_global_steps"], tag["max_global_steps"]) == (6, 6)


def test_a_failure_can_be_told_in_a_tag_whatever_its_text() -> None:
    """An error may quote bytes that are no text; a tag must fit into a journal."""
    failure = failure_of(ValueError("the tool said \udcff"))
    assert str(failure) == "ValueError (infra): the tool said \\udcff"
