"""Faults in a whole run: one group has a fault of each kind, and the run ends or goes on as it should, with nothing lost.

The trainer, store, replay, actor, reward processes and tools are real, over the tiny model. The policy is scripted where a test
needs it to call a tool, and the embedded engine where the engine itself is at fault.
"""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from asyncrl.agents.loop import AgentLoopOutput, SessionContext
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.assembly import Rollout, open_rollout, open_trainer
from asyncrl.config import TrainRun, load_run
from asyncrl.errors import DeadlineError, EngineError, TooManyFailuresError
from asyncrl.observe.run_folder import create_run_folder
from asyncrl.ports import GenerateRequest, Prompt
from asyncrl.preflight import check_train
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.stages.stage import Stage, StageOutput
from asyncrl.stopping import Stop
from asyncrl.tools import FunctionTool, Tool
from asyncrl.trainer import Trainer
from asyncrl.world import RealWorld

FAULTY = "what is 3+0?"
"""The one row that meets the fault."""
STEPS = 6
"""Six steps of two groups use all twelve rows, the faulty one among them."""

Equip = Callable[[Rollout], Rollout]


@asynccontextmanager
async def opened(config: Path, *overrides: str, equip: Equip = lambda rollout: rollout) -> AsyncIterator[Trainer]:
    """A trainer on a rollout that a test may change; on leaving nothing of it may be left."""
    before = asyncio.all_tasks()
    run = load_run(TrainRun, config, [f"trainer.total_training_steps={STEPS}", *overrides])
    inputs = await asyncio.to_thread(check_train, run)
    async with RealWorld(run_seed=run.trainer.seed) as world, open_rollout(run, world) as rollout:
        folder = await world.offload(create_run_folder, run.trainer.default_local_dir, run.trainer.experiment_name)
        async with open_trainer(run, inputs, folder, None, equip(rollout), world, Stop()) as trainer:
            yield trainer
    assert asyncio.all_tasks() == before
    assert trainer.queue.stats()["open_leases"] == 0
    trainer.admission.check_conservation()


def check_whole_run(trainer: Trainer, *, num_failed: int) -> None:
    """Every step was trained on whole groups; every failed group was dropped and counted; the store is empty."""
    counts = trainer.admission.counters()
    assert (trainer.border.step, counts["trained"], counts["open"]) == (STEPS, 2 * STEPS, 0)
    assert counts.get("dropped/failure", 0) == counts["dropped"] == trainer.replay.counts()["failure"] == num_failed
    assert (trainer.queue.stats()["keys"], trainer.queue.stats()["bytes"]) == (0, 0)


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
async def test_a_fault_of_one_session_costs_its_group_at_most(config: Path, caplog: pytest.LogCaptureFixture, fault: Fault) -> None:
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
    config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, deed: str, error: str, text: str
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
async def test_a_prompt_that_fills_the_context_costs_its_group(config: Path, caplog: pytest.LogCaptureFixture) -> None:
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
        (lambda output: replace(output, response_ids=("x",) * len(output.response_ids)), "TypeError (infra)"),
    ],
    ids=["not json", "not ids"],
)
async def test_an_output_that_the_store_refuses_costs_its_group(
    config: Path, caplog: pytest.LogCaptureFixture, breaks: Callable[[AgentLoopOutput], AgentLoopOutput], failure: str
) -> None:
    Odd.breaks = staticmethod(breaks)
    with caplog.at_level(logging.WARNING):
        async with opened(config, f"agent.name={__name__}:Odd") as trainer:
            await trainer.fit()
    assert failures_in(caplog)
    assert all(failure in text for text in failures_in(caplog))
    check_whole_run(trainer, num_failed=len(failures_in(caplog)))


# --- engine, stages, the way itself -----------------------------------------------------------------------------------------------


def engine_of(trainer: Trainer) -> TorchEngine:
    assert isinstance(trainer.engine, TorchEngine)
    return trainer.engine


def after_step(trainer: Trainer, step: int, deed: Callable[[], object]) -> None:
    """Do `deed` in a stage of the step after `step`, so that the run is under way."""

    def compute(columns: Any, batch: Any, context: Any) -> StageOutput:
        if context.step == step:
            deed()
        return StageOutput()

    trainer.stages = (*trainer.stages, Stage(name="deed", reads=frozenset({"response_mask"}), writes=frozenset(), compute=compute))


def die() -> None:
    raise RuntimeError("out of luck")


async def test_an_engine_that_dies_ends_the_run_with_its_reason_and_a_checkpoint(config: Path) -> None:
    async with opened(config) as trainer:
        after_step(trainer, 2, lambda: engine_of(trainer)._commands.put(die))
        with pytest.raises(EngineError, match="the engine's thread died: RuntimeError: out of luck"):
            await trainer.fit()
    assert [path.name for path in checkpoints_of(config)] == ["global_step_2"]


class Killer:
    """An agent loop that takes the engine along on the faulty row."""

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        if prompt.ground_truth == "3":
            assert isinstance(context.engine, TorchEngine)
            context.engine._commands.put(die)
        return await SingleTurn().run(prompt, context)


async def test_an_engine_that_dies_under_its_sessions_ends_the_run_with_its_reason_and_a_checkpoint(config: Path) -> None:
    async with opened(config, "replay.max_failed_groups_in_a_row=3", f"agent.name={__name__}:Killer") as trainer:
        with pytest.raises(TooManyFailuresError, match="the engine's thread died: RuntimeError: out of luck"):
            await trainer.fit()
    step = trainer.border.step
    assert [path.name for path in checkpoints_of(config)] == ([f"global_step_{step}"] if step else [])


def checkpoints_of(config: Path) -> list[Path]:
    return sorted((config.parent / "runs" / "small" / "checkpoints").glob("global_step_*"))


async def test_an_engine_that_hangs_ends_the_run_with_its_reason(config: Path) -> None:
    let_go = threading.Event()
    overrides = ("rollout.request_timeout_s=0.2", "replay.max_failed_groups_in_a_row=2")
    async with opened(config, *overrides) as trainer:
        engine = engine_of(trainer)
        engine._close_timeout_s = 0.01
        after_step(trainer, 2, lambda: engine._commands.put(lambda: [*iter(let_go.wait, True)].clear()))
        with pytest.raises(DeadlineError, match=r"did not take version 2 within rollout\.request_timeout_s = 0\.2 s"):
            await trainer.fit()
    let_go.set()
    assert [path.name for path in checkpoints_of(config)] == ["global_step_2"]


async def test_generation_that_hangs_ends_the_run_with_its_reason(config: Path) -> None:
    overrides = ("rollout.request_timeout_s=0.1", "replay.max_failed_groups_in_a_row=2", "agent.name=single_turn")
    async with opened(config, *overrides) as trainer:
        await trainer.engine.pause()
        with pytest.raises(TooManyFailuresError, match=r"generate call \w+_\d_0 took longer than 0.1 s"):
            await trainer.fit()
    assert checkpoints_of(config) == []


async def test_sessions_that_never_end_are_named_at_the_deadline_of_the_sample(config: Path) -> None:
    async with opened(config, "replay.sample_timeout_s=0.2") as trainer:
        await trainer.engine.pause()
        with pytest.raises(DeadlineError, match=r"step 1 waited .* for 2 of its 2 groups: [0-9a-f]{16} running, 0 of 2 sessions"):
            await trainer.fit()


async def test_a_failed_step_gives_its_groups_back_as_their_sessions_left_them(config: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("in a stage")

    async with opened(config) as trainer:
        trainer.stages = trainer.stages[:1]  # what the step wrote before it failed: advantages
        after_step(trainer, 2, fail)
        following = asyncio.create_task(trainer.replay.run())
        admitting = asyncio.create_task(trainer.admit())
        await trainer.train_step(1)
        trainer.admission.publish(1)
        with pytest.raises(ZeroDivisionError):
            await trainer.train_step(2)
        again = await trainer.replay.sample(2, 2)
        assert len(again) == 4
        listed = (await trainer.queue.kv_list("train"))["train"]
        assert set(again.keys) < set(listed)
        for name in trainer.stages[0].writes:
            with pytest.raises(KeyError, match=name):
                await trainer.queue.kv_batch_get(again.keys, partition_id="train", fields=[name])
        assert trainer.queue.stats()["open_leases"] == 0
        for task in (following, admitting):
            task.cancel()
        await asyncio.wait([following, admitting])


async def test_an_error_between_steps_leaves_a_checkpoint_and_in_a_step_none(config: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("in a stage")

    async with opened(config) as trainer:
        after_step(trainer, 3, fail)
        with pytest.raises(ZeroDivisionError, match="in a stage"):
            await trainer.fit()
    assert trainer.border.step == 2
    assert checkpoints_of(config) == []  # the weights may be those of half a step


async def test_nothing_blocks_the_loop_in_a_whole_run(config: Path, rows: Path) -> None:
    async with opened(config, f"data.val_files={str(rows)!r}", "trainer.test_freq=3", "trainer.save_freq=3") as trainer:
        with blockbuster_ctx("asyncrl"):
            await trainer.fit()
    check_whole_run(trainer, num_failed=0)
