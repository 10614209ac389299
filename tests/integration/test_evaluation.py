"""An evaluation of many rows: every session gets its turn. One version: a session of another is refused. Beside training: on the
real trainer, with an engine of its own."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import ClassVar, cast

import pytest

from asyncrl.agents.chat_template import load_chat_template
from asyncrl.agents.loop import AgentLoopOutput, SessionContext
from asyncrl.agents.session import SessionParts, session_parts
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.agents.tool_runner import ToolRunner
from asyncrl.config import AgentConfig, TrainRun, parse_run
from asyncrl.errors import EvaluationError
from asyncrl.evaluation import Mode, evaluate
from asyncrl.observe.metrics import read_metrics
from asyncrl.observe.run_folder import RunFolder
from asyncrl.ports import GenerateRequest, Prompt, RewardRequest, RewardResult, SamplingParams, Template, WeightSnapshot
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.tools import load_tools
from asyncrl.trainer import Trainer
from asyncrl.world import RealWorld


class One:
    async def score(self, request: RewardRequest) -> RewardResult:
        return RewardResult(score=1.0)


@pytest.fixture
def small(model_folder: Path) -> TrainRun:
    return parse_run(
        TrainRun,
        {
            "model": {"path": str(model_folder)},
            "data": {"train_files": ["-"]},
            "rollout": {"max_num_seqs": 2},
            "agent": {"timeout_s": 5.0},
        },
    )


@asynccontextmanager
async def parts_on(engine: ScriptedEngine, run: TrainRun, template: Template) -> AsyncIterator[SessionParts]:
    async with RealWorld() as world, ToolRunner(load_tools(run.agent.tools), run.agent, world) as tools:
        yield session_parts(run, engine=engine, scorer=One(), template=template, tools=tools, world=world)


def prompts(number: int) -> list[Prompt]:
    return [Prompt(uid=f"val-{n}", messages=[{"role": "user", "content": "1?"}], data_source="x") for n in range(number)]


async def test_no_session_of_a_large_evaluation_spends_its_deadline_in_the_queue(small: TrainRun) -> None:
    template = load_chat_template(small.model, [])
    at_once: list[float] = []

    async def answer(request: GenerateRequest) -> Sequence[int]:
        at_once.append(engine.stats()["running"])
        await asyncio.sleep(0)
        return template.encode_assistant("1")

    engine = ScriptedEngine(answer)
    async with parts_on(engine, small, template) as parts:
        numbers = await evaluate(prompts(30), Mode(name="sampled", sampling=SamplingParams(), n=2), parts, version=0)
    assert (numbers["eval/sampled/failed"], numbers["eval/sampled/success"], len(at_once)) == (0, 1, 60)
    assert max(at_once) == 8, "four sessions a slot"


async def test_what_a_tool_answers_was_sampled_by_no_version(small: TrainRun) -> None:
    run = small.model_copy(update={"agent": AgentConfig(name="tool_agent", tools=["calculator"])})
    template = load_chat_template(run.model, [tool.schema for tool in load_tools(["calculator"]).values()])
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'

    def answer(request: GenerateRequest) -> Sequence[int]:
        return template.encode_assistant(call if request.request_id.endswith("_0") else "3")

    async with parts_on(ScriptedEngine(answer, version=7), run, template) as parts:
        numbers = await evaluate(prompts(3), Mode(name="greedy", sampling=SamplingParams(), n=1), parts, version=7)
    assert (numbers["eval/greedy/tool_share"], numbers["eval/greedy/failed"]) == (1, 0)


async def test_a_publication_meanwhile_is_found_out(small: TrainRun) -> None:
    """No number is an average over two policies."""
    template = load_chat_template(small.model, [])
    asked: list[str] = []

    async def answer(request: GenerateRequest) -> Sequence[int]:
        asked.append(request.request_id)
        if request.request_id == "val-2_1_0":
            await engine.publish(8, cast("WeightSnapshot", None))
        return template.encode_assistant("1")

    engine = ScriptedEngine(answer, version=7)
    told = r"session val-2_1 of the greedy evaluation of version 7 was sampled by version 8: an evaluation is of one version"
    async with parts_on(engine, small, template) as parts:
        with pytest.raises(EvaluationError, match=told):
            await evaluate(prompts(3), Mode(name="greedy", sampling=SamplingParams(), n=2), parts, version=7)
    assert len(asked) == 6


# --- on the real trainer ----------------------------------------------------------------------------------------------------------

Opened = Callable[..., AbstractAsyncContextManager[Trainer]]


class Held:
    """Sessions of an evaluation are held until training has gone on: until a group is admitted at version `until`."""

    gate: ClassVar[asyncio.Event]
    until: ClassVar[int]
    evaluated_at: ClassVar[list[int]]
    """The newest version that training had seen when a session of an evaluation ended."""
    newest: ClassVar[int]

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        if not prompt.uid.startswith("val-"):
            Held.newest = max(Held.newest, prompt.global_steps)
            if prompt.global_steps >= Held.until:
                Held.gate.set()
            return await SingleTurn().run(prompt, context)
        await Held.gate.wait()
        outputs = await SingleTurn().run(prompt, context)
        Held.evaluated_at.append(Held.newest)
        return outputs


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """held(version): the override that makes `Held` the agent of the run."""

    def named(until: int) -> str:
        monkeypatch.setitem(sys.modules, "held_sessions", sys.modules[__name__])
        Held.gate, Held.until, Held.evaluated_at, Held.newest = asyncio.Event(), until, [], 0
        return "agent.name='held_sessions:Held'"

    return named


def newest(tmp_path: Path) -> RunFolder:
    return RunFolder(path=sorted((tmp_path / "runs").iterdir())[-1])  # small, small-2


def measured(tmp_path: Path) -> dict[int, dict[str, float]]:
    """Step -> its `eval/*` numbers."""
    lines = read_metrics(newest(tmp_path).metrics)
    found = {int(line["step"]): {name: value for name, value in line.items() if name.startswith("eval/")} for line in lines}
    return {step: numbers for step, numbers in found.items() if numbers}


def evaluating(rows: Path, *overrides: str) -> list[str]:
    return [f"data.val_files='{rows}'", "eval.max_rows=3", "trainer.test_freq=3", *overrides]


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.long), "async"])
async def test_training_goes_on_beside_a_snapshot_evaluation_which_stays_at_its_version(
    config: Path, rows: Path, tmp_path: Path, opened: Opened, held: Callable[[int], str], mode: str
) -> None:
    overrides = evaluating(rows, "eval.where='snapshot'", f"trainer.mode='{mode}'", held(2))
    async with opened(config, *overrides) as trainer:
        await trainer.fit()
    assert min(Held.evaluated_at) >= 2, "the evaluation of version 0 ended after version 2 was published"
    assert {step: numbers["eval/version"] for step, numbers in measured(tmp_path).items()} == {0: 0, 3: 3, 6: 6}
    assert trainer.queue.evaluated == 6


@pytest.mark.long
async def test_a_snapshot_evaluation_has_the_numbers_of_one_between_publications(
    config: Path, rows: Path, tmp_path: Path, opened: Opened
) -> None:
    found: list[dict[int, dict[str, float]]] = []
    for where in ("between", "snapshot"):
        async with opened(config, *evaluating(rows, f"eval.where='{where}'", "rollout.deterministic=true", "eval.n=4")) as trainer:
            await trainer.fit()
        found.append(measured(tmp_path))
    between, snapshot = found
    assert between == snapshot
    assert len({tuple(sorted(numbers.items())) for numbers in between.values()}) == 3, "the weights differ, and so do the numbers"


@pytest.mark.parametrize("where", [pytest.param("between", marks=pytest.mark.long), "snapshot"])
async def test_an_evaluation_that_hangs_costs_its_numbers_and_nothing_else(
    config: Path,
    rows: Path,
    tmp_path: Path,
    opened: Opened,
    held: Callable[[int], str],
    check_whole_run: Callable[..., None],
    where: str,
) -> None:
    async with opened(config, *evaluating(rows, f"eval.where='{where}'", "eval.timeout_s=0.1", held(99))) as trainer:
        await trainer.fit()
    check_whole_run(trainer, num_failed=0)
    assert measured(tmp_path) == {}
    assert trainer.queue.evaluated == -1
    lines = newest(tmp_path).path.joinpath("incidents.jsonl").read_text(encoding="utf-8")
    late = [line for line in map(json.loads, lines.splitlines()) if line["what"] == "evaluation"]
    assert [(line["kind"], line["step"], line["limit"]) for line in late] == [
        ("deadline", step, "eval.timeout_s") for step in (0, 3, 6)
    ]
