"""A traced session is a span with its turns, tool calls and reward inside, however it ends."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from asyncrl.agents.session import run_session
from asyncrl.config import TrainRun
from asyncrl.errors import EngineError
from asyncrl.observe.spans import RecordedSpan
from asyncrl.ports import Prompt, SpanKind
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.tools import FunctionTool

NewRun = Callable[..., TrainRun]
Rig = Any  # the fixture's class lives in conftest, which is no module


class Trace:
    """The spans of sessions, on a clock that ticks at every look."""

    def __init__(self) -> None:
        self._ticks: Iterator[int] = count(1)
        self.sessions: list[RecordedSpan] = []

    def __call__(self, uid: str, session_id: int) -> RecordedSpan:
        self.sessions.append(RecordedSpan(SpanKind.SESSION, f"{uid} {session_id}", lambda: float(next(self._ticks))))
        return self.sessions[-1]

    @property
    def session(self) -> RecordedSpan:
        (session,) = self.sessions
        return session

    def told(self) -> list[tuple[str, str, str]]:
        return [(str(span.kind), span.name, span.outcome) for span in (self.session, *self.session.inner)]


@pytest.fixture
def trace() -> Trace:
    return Trace()


def check_nesting(session: RecordedSpan) -> None:
    """All of a session is inside it, and turns, calls of different turns and the reward follow one another."""
    assert session.end_s is not None
    ended = session.start_s
    for span in session.inner:
        assert span.end_s is not None
        assert ended < span.start_s < span.end_s < session.end_s
        ended = span.end_s


async def test_turns_tools_and_reward_are_inside_their_session(trace: Trace, rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    unknown = rig.call("1 + 2").replace("calculator", "calculater")
    engine = rig.saying("so " + rig.call("1 + 2"), unknown, "3")
    await run_session(prompt, 1, replace(rig.parts(engine, new_run()), session_span=trace))
    assert trace.told() == [
        ("session", "a1 1", "ok"),
        ("turn", "turn 0", "ok"),
        ("tool", "calculator", "ok"),
        ("turn", "turn 1", "ok"),
        ("tool", "calculater", "unknown"),
        ("turn", "turn 2", "ok"),
        ("reward", "reward", "ok"),
    ]
    check_nesting(trace.session)
    assert trace.session.facts == {"num_turns": 3, "stop_reason": "stop"}
    turns = [span.facts for span in trace.session.inner if span.kind is SpanKind.TURN]
    prompt_len = len(rig.template.prompt_ids(prompt.messages))
    assert turns[0]["prompt_tokens"] == prompt_len
    assert [turn["prompt_tokens"] for turn in turns] == [len(request.prompt_ids) for request in rig.requests]
    assert all(turn["versions"] == [0] and turn["tokens"] > 0 for turn in turns)
    assert trace.session.inner[-1].facts == {"score": 1.0}


async def test_calls_of_one_turn_overlap(trace: Trace, rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    both = asyncio.Barrier(2)

    async def meet() -> str:
        """Wait for the other."""
        await both.wait()
        return "met"

    call = '<tool_call>{"name": "meet", "arguments": {}}</tool_call>'
    run = new_run(agent={"parallel_tool_calls": True})
    parts = rig.parts(rig.saying(call + call, "3"), run, {"meet": FunctionTool(meet)})
    await run_session(prompt, 0, replace(parts, session_span=trace))
    first, second = [span for span in trace.session.inner if span.kind is SpanKind.TOOL]
    assert first.end_s is not None
    assert first.start_s < second.start_s < first.end_s


async def test_an_engine_that_dies_ends_its_turn_and_the_session(trace: Trace, rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    def die(_: object) -> str:
        raise EngineError("gone")

    await run_session(prompt, 0, replace(rig.parts(rig.engine(die), new_run()), session_span=trace))
    assert trace.told() == [("session", "a1 0", "EngineError"), ("turn", "turn 0", "EngineError")]
    assert str(trace.session.facts["failure"]).startswith("EngineError (infra): gone")


async def test_a_deadline_ends_what_is_under_way(trace: Trace, rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    rig.scorer.delay_s = 60.0
    parts = rig.parts(rig.saying("3"), new_run(agent={"timeout_s": 0.02}))
    await run_session(prompt, 0, replace(parts, session_span=trace))
    assert trace.told()[0] == ("session", "a1 0", "DeadlineError")
    assert trace.told()[1:] in (
        [("turn", "turn 0", "ok"), ("reward", "reward", "abandoned")],
        [("turn", "turn 0", "ok"), ("reward", "reward", "cancelled")],
    )


async def test_a_cancellation_from_outside_closes_every_span(trace: Trace, rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    is_asked = asyncio.Event()

    async def never(_: object) -> list[int]:
        is_asked.set()
        await asyncio.Event().wait()
        return []

    parts = rig.parts(ScriptedEngine(never), new_run())
    task = asyncio.create_task(run_session(prompt, 0, replace(parts, session_span=trace)))
    await is_asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert trace.told() == [("session", "a1 0", "cancelled"), ("turn", "turn 0", "abandoned")]
    ends = [span.end_s for span in (trace.session, *trace.session.inner)]
    assert None not in ends
