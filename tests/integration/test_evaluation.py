"""An evaluation of many rows: every session gets its turn."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from asyncrl.agents.chat_template import load_chat_template
from asyncrl.agents.session import session_parts
from asyncrl.agents.tool_runner import ToolRunner
from asyncrl.config import TrainRun, parse_run
from asyncrl.evaluation import Mode, evaluate
from asyncrl.ports import GenerateRequest, Prompt, RewardRequest, RewardResult, SamplingParams
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.world import RealWorld


class One:
    async def score(self, request: RewardRequest) -> RewardResult:
        return RewardResult(score=1.0)


async def test_no_session_of_a_large_evaluation_spends_its_deadline_in_the_queue(model_folder: Path) -> None:
    run = parse_run(
        TrainRun,
        {
            "model": {"path": str(model_folder)},
            "data": {"train_files": ["-"]},
            "rollout": {"max_num_seqs": 2},
            "agent": {"timeout_s": 5.0},
        },
    )
    template = load_chat_template(run.model, [])
    at_once: list[float] = []

    async def answer(request: GenerateRequest) -> Sequence[int]:
        at_once.append(engine.stats()["running"])
        await asyncio.sleep(0)
        return template.encode_assistant("1")

    engine = ScriptedEngine(answer)
    async with RealWorld() as world, ToolRunner({}, run.agent, world) as tools:
        parts = session_parts(run, engine=engine, scorer=One(), template=template, tools=tools, world=world)
        prompts = [Prompt(uid=f"val-{n}", messages=[{"role": "user", "content": "1?"}], data_source="x") for n in range(30)]
        numbers = await evaluate(prompts, Mode(name="sampled", sampling=SamplingParams(), n=2), parts, version=0)
    assert (numbers["eval/sampled/failed"], numbers["eval/sampled/success"], len(at_once)) == (0, 1, 60)
    assert max(at_once) == 8, "four sessions a slot"
