"""An evaluation of many rows: every session gets its turn. One version: a session of another is refused. Beside training: on the
real trainer, with an engine of its own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from asyncrl.agents.chat_template import load_chat_template
from asyncrl.agents.session import SessionParts, session_parts
from asyncrl.agents.tool_runner import ToolRunner
from asyncrl.config import TrainRun, parse_run
from asyncrl.errors import EvaluationError
from asyncrl.evaluation import Mode, evaluate
from asyncrl.ports import GenerateRequest, Prompt, RewardRequest, RewardResult, SamplingParams, Template, WeightSnapshot
from asyncrl.rollout.scripted import ScriptedEngine
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
    async with RealWorld() as world, ToolRunner({}, run.agent, world) as tools:
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
