"""Every fault in both modes, in a whole run of the real trainer: it ends, nothing is lost, and the report names what happened.

Row 3 meets the fault, again and again. The policy is scripted, so that it calls tools; what each fault is taken for, and what it
costs, is said in test_faults.py.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.agents.chat_template import ChatTemplate
from asyncrl.errors import AsyncRLError, EngineError, TooManyFailuresError, UserError
from asyncrl.observe.metrics import read_metrics
from asyncrl.ports import GenerateRequest
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.tools import FunctionTool
from asyncrl.trainer import Trainer
from asyncrl.wiring import Rollout

Opened = Callable[..., AbstractAsyncContextManager[Trainer]]
Deed = Callable[[GenerateRequest], Awaitable[str]]

FAULTY = 3
"""Number of the row, and of the prompt, that meets the fault."""
STEPS = 3
SETTINGS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.log_trajectories=0",
    "data.shuffle=false",
    "data.max_response_length=120",
    "data.max_prompt_length=120",
    "agent.name=tool_agent",
    "agent.tools=['calculator']",
    "agent.max_attempts=2",
    "agent.retry_backoff_s=0.01",
    "agent.tool_timeout_s=0.1",
    "agent.timeout_s=2",
    "rollout.request_timeout_s=0.2",
    "reward.timeout_s=0.3",
    "replay.sample_timeout_s=20",
)
MODES = {
    "sync": ("trainer.mode=sync",),
    "async": ("trainer.mode=async", "trainer.max_staleness=2"),
}


# --- deeds of the policy on the faulty row ----------------------------------------------------------------------------------------


async def lose_engine(_: GenerateRequest) -> str:
    raise EngineError("the engine was lost")


async def hang(_: GenerateRequest) -> str:
    await asyncio.Event().wait()
    return ""


async def say_nothing(_: GenerateRequest) -> str:
    return ""


async def be_cancelled(_: GenerateRequest) -> str:
    """By somebody inside it."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)
    return ""


async def be_ended(request: GenerateRequest) -> str:
    """All that is called a session, its runner's task too, as nobody of the product would."""
    uid, session_id, _ = request.request_id.split("_")
    for task in asyncio.all_tasks():
        if task.get_name() == f"session {uid}_{session_id}":
            task.cancel()
    await asyncio.sleep(60)
    return ""


def first_saying(text: str) -> Deed:
    async def say(request: GenerateRequest) -> str:
        return text if request.request_id.endswith("_0") else "so it is"

    return say


def calling(name: str) -> Deed:
    return first_saying(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')


async def raises() -> str:
    """Raise."""
    raise ValueError("no such file")


async def hangs() -> str:
    """Hang."""
    await asyncio.Event().wait()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens on the faulty row, and how it is reported: in incidents.jsonl, of the session or its prompt, with `told` in its
    text; or, when it is no incident, in a number of metrics.jsonl. costs: is its group lost?"""

    deed: Deed | None = None
    reward: str = "pass"
    is_long: bool = False
    told: str = ""
    metric: str = ""
    costs: bool = True
    names_session: bool = True
    """Does an incident name the session and its state? Otherwise the group alone."""


FAULTS: dict[str, Fault] = {
    "engine error": Fault(deed=lose_engine, told="the engine was lost"),
    "engine hang": Fault(deed=hang, told="rollout.request_timeout_s"),
    "tool error": Fault(deed=calling("raises"), metric="agents/tools/error", costs=False),
    "tool hang": Fault(deed=calling("hangs"), told="agent.tool_timeout_s", costs=False),
    "malformed call": Fault(deed=first_saying('<tool_call>\n{"name": \n</tool_call>'), metric="num_turns/max", costs=False),
    "over-long prompt": Fault(is_long=True, told="leave no room"),
    "reward error": Fault(reward="raise ValueError('cannot grade')", told="cannot grade"),
    "reward hang": Fault(reward="time.sleep(600)", told="reward.timeout_s"),
    "empty generation": Fault(deed=say_nothing, told="no token"),
    "cancelled session": Fault(deed=be_cancelled, told="cancelled"),
    "cancelled session and its task": Fault(deed=be_ended, told="cancelled", names_session=False),
}
QUICK = {("engine error", "async"), ("tool hang", "async"), ("cancelled session", "async")}
"""In every run of the tests; the others are long, and their kinds are tested in sync mode elsewhere."""

CELLS = [
    pytest.param(fault, mode, id=f"{fault}, {mode}", marks=[] if (fault, mode) in QUICK else [pytest.mark.long])
    for fault in FAULTS
    for mode in MODES
]

REWARD = """
import time
def score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "3":
        {deed}
    return len(solution_str) % 3 / 2
"""


def scripted(fault: Fault) -> Callable[[Rollout], Rollout]:
    """The policy says a few words, but does the deed on the faulty row."""

    def equip(rollout: Rollout) -> Rollout:
        template = rollout.template
        assert isinstance(template, ChatTemplate)

        async def answer(request: GenerateRequest) -> Sequence[int]:
            is_faulty = fault.deed is not None and f"what is {FAULTY}+0?" in template.decode(list(request.prompt_ids))
            said = await fault.deed(request) if is_faulty and fault.deed else f"it is {request.seed % 7}"
            return template.encode_assistant(said) if said else []

        engine = ScriptedEngine(answer, context_len=400, decode=template.decode)
        return replace(rollout, engine=engine, tools={tool.name: tool for tool in (FunctionTool(raises), FunctionTool(hangs))})

    return equip


def incidents_of(config: Path) -> list[dict[str, Any]]:
    path = config.parent / "runs" / "small" / "incidents.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _lengthen(rows: Path) -> None:
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    lines[FAULTY]["prompt"][0]["content"] = "what is " + "3+" * 300 + "0?"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.mark.parametrize(("name", "mode"), CELLS)
async def test_a_fault_ends_no_run_loses_nothing_and_is_named(
    opened: Opened, config: Path, rows: Path, tmp_path: Path, name: str, mode: str
) -> None:
    fault = FAULTS[name]
    (tmp_path / "length_reward.py").write_text(REWARD.format(deed=fault.reward), encoding="utf-8")
    if fault.is_long:
        _lengthen(rows)
    async with opened(config, *SETTINGS, *MODES[mode], equip=scripted(fault)) as trainer:
        await trainer.fit()
    counts = trainer.admission.counters()
    assert (trainer.step, counts["trained"], counts["open"]) == (STEPS, 2 * STEPS, 0)
    assert counts["dropped"] == counts.get("dropped/failure", 0) == fault.costs
    uid = trainer.world.uid(FAULTY)
    told = [line for line in incidents_of(config) if line.get("uid") == uid]
    if fault.told:
        assert any(fault.told in line["text"] + line.get("limit", "") for line in told), told
        if fault.names_session:
            assert any("session_id" in line and line.get("state") for line in told), told
    if fault.costs:
        assert {line["kind"] for line in told} >= {"drop", *(["failure"] if fault.names_session else [])}, told
    if fault.metric:
        numbers = [row.get(fault.metric, 0) for row in read_metrics(config.parent / "runs/small/metrics.jsonl")]
        assert max(numbers) >= 2, numbers  # both sessions; and a turn after the answer


def remove_journal_at(number: int, journal: Path) -> Callable[[Rollout], Rollout]:
    def equip(rollout: Rollout) -> Rollout:
        template = rollout.template
        assert isinstance(template, ChatTemplate)

        async def answer(request: GenerateRequest) -> Sequence[int]:
            await asyncio.sleep(0)
            if engine.beats >= number:
                journal.unlink(missing_ok=True)  # noqa: ASYNC240 -- a moment, in a test
            return template.encode_assistant(f"it is {request.seed % 7}")

        engine = ScriptedEngine(answer, context_len=400, decode=template.decode)
        return replace(rollout, engine=engine)

    return equip


def exit_code(error: AsyncRLError) -> int:
    """As the command line has it."""
    return 2 if isinstance(error, UserError) else 3


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
async def test_a_journal_that_fails_ends_the_run_with_its_name(opened: Opened, config: Path, tmp_path: Path, mode: str) -> None:
    journal = tmp_path / "runs/small/journal.db"
    with pytest.raises(AsyncRLError, match=r"journal\.db cannot be written: it was removed") as raised:
        async with opened(config, *SETTINGS, *MODES[mode], equip=remove_journal_at(5, journal)) as trainer:
            await trainer.fit()
    assert exit_code(raised.value) == 3
    trainer.admission.check_conservation()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
async def test_faults_without_end_end_the_run_with_their_reason(opened: Opened, config: Path, tmp_path: Path, mode: str) -> None:
    (tmp_path / "length_reward.py").write_text("def score(**given):\n    raise ValueError('cannot grade')\n", encoding="utf-8")
    fault = Fault(reward="pass")
    with pytest.raises(TooManyFailuresError, match="cannot grade") as raised:
        async with opened(config, *SETTINGS, *MODES[mode], "replay.max_failed_groups_in_a_row=3", equip=scripted(fault)) as trainer:
            await trainer.fit()
    assert exit_code(raised.value) == 3
    trainer.admission.check_conservation()
