"""Faults in a whole run: one group has a fault of each kind, and the run goes on with nothing lost.

The trainer, store, replay, actor, reward processes and tools are real, over the tiny model. The policy is scripted where a test
needs it to call a tool.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from asyncrl.agents.chat_template import ChatTemplate
from asyncrl.agents.loop import AgentLoopOutput, SessionContext
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Prompt
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.tools import FunctionTool, Tool
from asyncrl.trainer import Trainer
from asyncrl.wiring import Rollout

FAULTY = "what is 3+0?"
"""The one row that meets the fault."""

Opened = Callable[..., AbstractAsyncContextManager[Trainer]]
Check = Callable[..., None]
Equip = Callable[[Rollout], Rollout]


# --- sessions ---------------------------------------------------------------------------------------------------------------------


async def hang() -> None:
    await asyncio.Event().wait()


async def lose_engine(_: GenerateRequest) -> str:
    raise EngineError("the engine was lost")


async def hang_in_engine(_: GenerateRequest) -> str:
    await hang()
    return ""


async def say_nothing(_: GenerateRequest) -> str:
    return ""


def saying(text: str) -> Callable[[GenerateRequest], Awaitable[str]]:
    async def say(request: GenerateRequest) -> str:
        return text if request.request_id.endswith("_0") else "so it is"

    return say


def calling(name: str) -> Callable[[GenerateRequest], Awaitable[str]]:
    return saying(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')


let_threads_go = threading.Event()


async def raises() -> str:
    """Raise."""
    raise ValueError("no such file")


async def loses_its_server() -> str:
    """Lose."""
    raise ConnectionResetError("the tool's server is gone")


async def hangs() -> str:
    """Hang."""
    await hang()
    return ""


def hangs_in_a_thread() -> str:
    """Hang."""
    let_threads_go.wait()
    return ""


async def holds_on() -> str:
    """Hang, even when cancelled, until the test is over."""
    while not let_threads_go.is_set():
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            continue
    return ""


async def is_cancelled() -> str:
    """Cancel."""
    raise asyncio.CancelledError


TOOLS: list[Tool] = [FunctionTool(tool) for tool in (raises, loses_its_server, hangs, hangs_in_a_thread, holds_on, is_cancelled)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What the policy does on the faulty row, and the failure that follows; None: the session goes on."""

    deed: Callable[[GenerateRequest], Awaitable[str]]
    failure: str | None = None
    stat: str = "sessions_finished"
    """A counter of the agents that tells that it happened."""


FAULTS: dict[str, Fault] = {
    "engine error": Fault(deed=lose_engine, failure=r"EngineError (infra): the engine was lost"),
    "engine hang": Fault(deed=hang_in_engine, failure=r"DeadlineError (infra): generate call"),
    "empty generation": Fault(deed=say_nothing, failure="EmptySessionError (model): the policy sampled no token"),
    "malformed call": Fault(deed=saying('<tool_call>\n{"name": \n</tool_call>')),
    "unknown tool": Fault(deed=calling("no_such_tool"), stat="tools/unknown"),
    "tool error": Fault(deed=calling("raises"), stat="tools/error"),
    "tool server lost": Fault(deed=calling("loses_its_server"), failure="ConnectionResetError (infra): the tool's server is gone"),
    "tool hang": Fault(deed=calling("hangs"), stat="tools/timeout"),
    "tool hang in a thread": Fault(deed=calling("hangs_in_a_thread"), stat="tools/timeout"),
    "tool holds on when cancelled": Fault(deed=calling("holds_on"), stat="tools/timeout"),
    "session cancelled by its tool": Fault(deed=calling("is_cancelled"), failure="CancelledError (infra): cancelled from inside"),
}


def scripted(deed: Callable[[GenerateRequest], Awaitable[str]]) -> Equip:
    """The policy answers with a few words, but does `deed` on the faulty row."""

    def equip(rollout: Rollout) -> Rollout:
        template = rollout.template
        assert isinstance(template, ChatTemplate)

        async def answer(request: GenerateRequest) -> Sequence[int]:
            is_faulty = FAULTY in template.decode(list(request.prompt_ids))
            said = await deed(request) if is_faulty else f"it is {request.seed % 7}"
            return template.encode_assistant(said) if said else []

        engine = ScriptedEngine(answer, context_len=400, decode=template.decode)
        return replace(rollout, engine=engine, tools={tool.name: tool for tool in TOOLS})

    return equip


TOOL_AGENT = (
    "agent.name=tool_agent",
    "agent.tools=['calculator']",
    "agent.tool_timeout_s=0.1",
    "rollout.request_timeout_s=0.3",
    "data.max_response_length=120",
    "data.max_prompt_length=120",
)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_a_fault_of_one_session_costs_its_group_at_most(
    opened: Opened, check_whole_run: Check, config: Path, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    let_threads_go.clear()
    with caplog.at_level(logging.WARNING):
        async with opened(config, *TOOL_AGENT, equip=scripted(fault.deed)) as trainer:
            await trainer.fit()
            let_threads_go.set()
    check_whole_run(trainer, num_failed=len(failures_in(caplog)))
    assert trainer.agents.stats()[fault.stat] > 0
    assert bool(failures_in(caplog)) == (fault.failure is not None)
    assert all(fault.failure and fault.failure in failure for failure in failures_in(caplog))


def failures_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "failed and is replaced" in record.getMessage()]


REWARD = """
import os, time
def score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "3":
        {deed}
    return len(solution_str) % 3 / 2
"""


@pytest.mark.parametrize(
    ("deed", "error", "text"),
    [
        ("raise ValueError('cannot grade')", "RewardError", " raised ValueError: cannot grade"),
        ("time.sleep(600)", "DeadlineError", " took longer than reward.timeout_s = 0.3"),
        ("return float('nan')", "RewardError", " returned nan"),
        ("os._exit(3)", "RewardError", ": the reward worker ended with exit code 3"),
    ],
    ids=["raises", "hangs", "nan", "dies"],
)
async def test_a_fault_of_the_reward_costs_its_group(
    opened: Opened,
    check_whole_run: Check,
    config: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    deed: str,
    error: str,
    text: str,
) -> None:
    (tmp_path / "odd_reward.py").write_text(REWARD.format(deed=deed), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        async with opened(config, "reward.function=odd_reward:score", "reward.timeout_s=0.3") as trainer:
            await trainer.fit()
    assert failures_in(caplog)
    assert all(f"{error} (infra): reward function 'odd_reward:score'{text}" in failure for failure in failures_in(caplog))
    check_whole_run(trainer, num_failed=len(failures_in(caplog)))


@pytest.fixture
def long_row(rows: Path) -> None:
    """The faulty row leaves no room for an answer."""
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[3]["prompt"][0]["content"] = "what is " + "3+" * 100 + "0?"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.usefixtures("long_row")
async def test_a_prompt_that_fills_the_context_costs_its_group(
    opened: Opened, check_whole_run: Check, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with opened(config) as trainer:
            await trainer.fit()
    assert failures_in(caplog)
    assert all("PromptTooLongError (model)" in text for text in failures_in(caplog))
    check_whole_run(trainer, num_failed=len(failures_in(caplog)))


class Odd:
    """An agent loop whose outputs cannot be stored on the faulty row."""

    breaks: Callable[[AgentLoopOutput], AgentLoopOutput]

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        outputs = await SingleTurn().run(prompt, context)
        return [type(self).breaks(output) for output in outputs] if prompt.ground_truth == "3" else outputs


@pytest.mark.parametrize(
    ("breaks", "failure"),
    [
        (lambda output: replace(output, extra_fields={**output.extra_fields, "file": object()}), "FieldError (infra)"),
        (lambda output: replace(output, response_ids=("x",) * len(output.response_ids)), "FieldError (infra)"),
    ],
    ids=["not json", "not ids"],
)
async def test_an_output_that_the_store_refuses_costs_its_group(
    opened: Opened,
    check_whole_run: Check,
    config: Path,
    caplog: pytest.LogCaptureFixture,
    breaks: Callable[[AgentLoopOutput], AgentLoopOutput],
    failure: str,
) -> None:
    Odd.breaks = staticmethod(breaks)
    with caplog.at_level(logging.WARNING):
        async with opened(config, f"agent.name={__name__}:Odd") as trainer:
            await trainer.fit()
    assert failures_in(caplog)
    assert all(failure in text for text in failures_in(caplog))
    check_whole_run(trainer, num_failed=len(failures_in(caplog)))
