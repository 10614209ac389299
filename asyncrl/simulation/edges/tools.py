"""Tools that take time: latency and length of an answer follow from the call itself, so a repeated call is the same call."""

import asyncio
from collections.abc import Awaitable

from asyncrl.config.simulation import Scenario, SimToolConfig
from asyncrl.ports import Json
from asyncrl.simulation.draws import draw_count, draw_of, unit
from asyncrl.simulation.seams import Seams
from asyncrl.simulation.world import SimWorld

CHARS_A_TOKEN = 4
"""Of an answer's text: a long one is tokenised in a thread, as a real one is."""


class SimTool:
    """One tool of the scenario."""

    def __init__(self, config: SimToolConfig, world: SimWorld, seams: Seams, *, tokens_per_id: int) -> None:
        self.name = config.name
        self.schema: Json = {"type": "function", "function": {"name": config.name, "description": "", "parameters": {}}}
        self.is_async = config.is_async
        self._config = config
        self._world = world
        self._seams = seams
        self._tokens_per_id = tokens_per_id

    def check(self, arguments: dict[str, Json]) -> dict[str, Json]:
        return arguments

    def call(self, arguments: dict[str, Json], tools_kwargs: dict[str, Json]) -> str | Awaitable[str]:
        number = int(arguments["query"])
        latency_s = draw_of(self._config.latency_s)(unit(number, 1))
        if self.is_async:
            return self._run(number, latency_s)
        began, seconds = self._world.now(), self._seams.sync_tool(self.name) + self._seams.slowed("tool", latency_s)
        self._world.spend(seconds)
        self._seams.busy("tool", self.name, began, began + seconds)
        return self._answer(number)

    async def _run(self, number: int, latency_s: float) -> str:
        began = self._world.now()
        await self._seams.tool(self.name)
        await asyncio.sleep(self._seams.slowed("tool", latency_s))
        self._seams.busy("tool", self.name, began, self._world.now())
        return self._answer(number)

    def _answer(self, number: int) -> str:
        tokens = draw_count(self._config.result_len, unit(number, 2))
        return f"{max(1, -(-tokens // self._tokens_per_id))} {'.' * (CHARS_A_TOKEN * tokens)}"


def sim_tools(scenario: Scenario, world: SimWorld, seams: Seams) -> dict[str, "SimTool"]:
    """By name, in the scenario's order; none for an agent that calls no tools."""
    if scenario.agent.name != "tool_agent":
        return {}
    tokens = scenario.sim.sessions.tokens_per_id
    return {config.name: SimTool(config, world, seams, tokens_per_id=tokens) for config in scenario.sim.tools}
