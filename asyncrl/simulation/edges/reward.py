"""A reward function that takes time. It is scheduled by the product's own scorer, with its deadline."""

import asyncio
import zlib

from asyncrl.config.simulation import Scenario
from asyncrl.ports import Json
from asyncrl.rewards.managers import NaiveManager
from asyncrl.rewards.on_loop import LoopFunction
from asyncrl.rewards.scoring import Scorer
from asyncrl.simulation.draws import draw_of, unit
from asyncrl.simulation.seams import Seams
from asyncrl.simulation.world import SimWorld

NAME = "simulated"


def sim_scorer(scenario: Scenario, world: SimWorld, seams: Seams) -> Scorer:
    """0 or 1 by the text of the answer, so that groups have a signal."""
    latency = draw_of(scenario.sim.reward.latency_s)

    async def reward(data_source: str, solution_str: str, ground_truth: Json, extra_info: dict[str, Json]) -> float:
        began = world.now()
        await seams.reward()
        await asyncio.sleep(seams.slowed("reward", latency(unit(zlib.crc32(solution_str.encode()), 3))))
        seams.busy("reward", NAME, began, world.now())
        return reward_of(solution_str)

    call = LoopFunction(NAME, reward, timeout_s=scenario.reward.timeout_s)
    return Scorer(NaiveManager(NAME, call))


def reward_of(text: str) -> float:
    """0 or 1."""
    return float(zlib.crc32(text.encode()) % 2)
