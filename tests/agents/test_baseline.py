"""The greedy session of a group: its score stands on every row of its siblings, or nothing of the group does."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.config import TrainRun
from asyncrl.errors import EngineError
from asyncrl.keys import TRAIN
from asyncrl.ports import GenerateRequest, Prompt, RewardRequest
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.transfer_queue import TransferQueue

NewRun = Callable[..., TrainRun]
Rig = Any  # the fixture's class lives in conftest, which is no module
REMAX = {"algorithm": {"adv_estimator": "remax"}}


def is_greedy(request: GenerateRequest) -> bool:
    return request.sampling.temperature == 0.0


async def test_the_greedy_score_stands_on_every_row(rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun) -> None:
    def script(request: GenerateRequest) -> str:
        return "3" if is_greedy(request) else "4"

    run = new_run(**REMAX, agent={"name": "single_turn", "max_concurrent_sessions": 1})  # places are for siblings alone
    async with rig.runner(queue, rig.engine(script), run) as runner:
        runner.start(prompt)
        await runner.join()
        assert runner.stats()["groups_finished"] == 1
    assert sum(map(is_greedy, rig.requests)) == 1
    assert sorted(await rig.tags(queue)) == ["a1", "a1_0_0", "a1_1_0"]
    columns = await queue.kv_batch_get(["a1_0_0", "a1_1_0"], partition_id=TRAIN, fields=["reward_baselines", "reward_score"])
    assert columns["reward_baselines"].tolist() == [1.0, 1.0]
    assert columns["reward_score"].tolist() == [0.0, 0.0]


async def test_without_remax_there_is_no_greedy_session(rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun) -> None:
    async with rig.runner(queue, rig.engine(lambda request: "3"), new_run(agent={"name": "single_turn"})) as runner:
        runner.start(prompt)
        await runner.join()
    assert not any(map(is_greedy, rig.requests))


async def test_a_greedy_session_that_fails_makes_the_group_a_failure(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    def score(request: RewardRequest) -> float:
        if request.solution_str == "3":
            raise ValueError("no score for you")
        return 1.0

    rig.scorer.score_with = score
    engine = rig.engine(lambda request: "3" if is_greedy(request) else "4")
    async with rig.runner(queue, engine, new_run(**REMAX, agent={"name": "single_turn"})) as runner:
        runner.start(prompt)
        await runner.join()
    tags = await rig.tags(queue)
    assert tags["a1"]["status"] == "failure"
    assert "the greedy session failed: no score for you" in str(tags["a1"]["failure"])


@pytest.mark.parametrize("victim", ["baseline a1", "session a1_0"])
async def test_a_cancellation_from_inside_of_one_costs_the_group_and_hangs_nobody(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun, victim: str
) -> None:
    def script(request: GenerateRequest) -> str:
        for task in asyncio.all_tasks():
            if task.get_name() == victim:
                task.cancel()
        return "3"

    async with rig.runner(queue, rig.engine(script), new_run(**REMAX, agent={"name": "single_turn"})) as runner:
        runner.start(prompt)
        await asyncio.wait_for(runner.join(), 10)
    assert (await rig.tags(queue))["a1"]["status"] == "failure"


async def test_a_group_whose_sessions_have_all_failed_does_not_wait_for_the_greedy_one(
    rig: Rig, queue: TransferQueue, prompt: Prompt, new_run: NewRun
) -> None:
    async def answer(request: GenerateRequest) -> list[int]:
        if is_greedy(request):
            await asyncio.Event().wait()
        raise EngineError("the engine is ill")

    engine = ScriptedEngine(answer, context_len=1 << 16)
    async with rig.runner(queue, engine, new_run(**REMAX, agent={"name": "single_turn"})) as runner:
        runner.start(prompt)
        await asyncio.wait_for(runner.join(), 10)
    assert (await rig.tags(queue))["a1"]["status"] == "failure"
