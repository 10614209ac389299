"""The engines of a simulation: the product's own pool, over engines that are models.

session -> [SimEngines.generate] -> EnginePool -> SimEngine -> answer

Here is what the controller's side adds: its own time a turn, and what observers and oracles are told. The pool passes the parts of
tests/rollout/test_conformance.py that need no model.
"""

import asyncio
from collections.abc import Iterator

from asyncrl.config.simulation import Scenario
from asyncrl.ports import GenerateRequest, Generation, WeightSnapshot, World
from asyncrl.rollout.pool import EnginePool, limits_of
from asyncrl.simulation.edges.engine import EngineKind, Place, SimEngine, SimGeneration
from asyncrl.simulation.edges.policy import SimSnapshot
from asyncrl.simulation.edges.sampler import Sampler
from asyncrl.simulation.seams import Seams


class SimEngines(EnginePool):
    """A pool of `sim.engine.count` engines. `name`: of each, before its number."""

    def __init__(self, scenario: Scenario, world: World, seams: Seams, *, version: int = 0, name: str = "engine") -> None:
        run = scenario.train_run()
        self.num_publications = 0
        self.weights_step: int | None = None
        """Steps that the weights have seen which were published last."""
        self.newest = self.published = version
        """The newest version that an engine may have; that which all must have."""
        self.kind = EngineKind(
            config=scenario.sim.engine,
            sampler=Sampler(scenario),
            world=world,
            seams=seams,
            name=name,
            version=version,
            context_len=run.max_model_len,
            num_slots=run.rollout.max_num_seqs,
            publish_s=scenario.sim.training.publish_s,
        )
        self._is_training = name == "engine"
        self._overhead_s = scenario.sim.times.turn_overhead_s
        self._controller_until = 0.0
        self._world = world
        self._seams = seams
        super().__init__([Place(number, self.kind) for number in range(scenario.sim.engine.count)], limits=limits_of(run.rollout))

    def serving(self) -> Iterator[SimEngine]:
        """Those that serve now, slow or not."""
        for life in self._lives():
            assert isinstance(life.engine, SimEngine)
            yield life.engine

    async def generate(self, request: GenerateRequest) -> Generation:
        self._seams.asked(request)
        try:
            generation = await super().generate(request)
            if self._overhead_s:
                await self._pass_controller()
        except BaseException as error:
            if self._is_training:
                self._seams.failed(request, error)
            raise
        assert isinstance(generation, SimGeneration)
        self._seams.answered(request.request_id, generation, generation.num_tokens, generation.slot)
        self._seams.generated(request, generation)
        return generation

    async def _pass_controller(self) -> None:
        """Its loop takes one turn's answer at a time."""
        now = self._world.now()
        self._controller_until = max(now, self._controller_until) + self._overhead_s
        await asyncio.sleep(self._controller_until - now)

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        began = self._world.now()
        self.newest = max(self.newest, version)
        await super().publish(version, snapshot)
        if self._is_training:
            self._seams.busy("trainer", "publish", began, self._world.now())
        self.published = version
        self.num_publications += 1
        self.weights_step = len(snapshot.lineage) if isinstance(snapshot, SimSnapshot) else None
