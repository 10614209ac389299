"""Engines that take time to answer: continuous batching with slots, a prefill that the other rows wait for, and saturation.

session -> [SimEngines.generate] -> the engine with the least load -> a slot -> prefill -> decode steps -> answer

Engines that have died fail their requests and come back empty; one that hangs answers nobody meanwhile. It passes the parts of
tests/rollout/test_conformance.py that need no model.
"""

import asyncio
from types import TracebackType
from typing import Self

from asyncrl.config.simulation import Scenario
from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation, WeightSnapshot, World
from asyncrl.rollout.requests import check_request
from asyncrl.simulation.edges.batching import BatchingEngine, work_of
from asyncrl.simulation.edges.policy import SimSnapshot
from asyncrl.simulation.edges.routing import LeastLoaded
from asyncrl.simulation.edges.sampler import Answer, Sampler
from asyncrl.simulation.edges.slots import Engine, Row
from asyncrl.simulation.edges.template import VOCABULARY
from asyncrl.simulation.seams import Seams


class SimEngines:
    """A RolloutEngine of `sim.engine.count` engines. `name`: of each, before its number."""

    def __init__(self, scenario: Scenario, world: World, seams: Seams, *, version: int = 0, name: str = "engine") -> None:
        self.version = version
        self.num_publications = 0
        self.weights_step: int | None = None
        """Steps that the weights have seen which were published last."""
        self._is_training = name == "engine"
        self.context_len = scenario.train_run().max_model_len
        self._publish_s = scenario.sim.training.publish_s
        self._overhead_s = scenario.sim.times.turn_overhead_s
        self._down_s = scenario.sim.engine.down_s
        self._slots = scenario.rollout.max_num_seqs
        self._world = world
        self._seams = seams
        self._sampler = Sampler(scenario)
        self._router = LeastLoaded()
        config, numbers, changed = scenario.sim.engine, range(scenario.sim.engine.count), self._router.changed
        self._batches = config.prefill_tokens > 0
        make = BatchingEngine if self._batches else Engine
        self._engines = [make(n, config, self._slots, world, seams, version=version, changed=changed, name=name) for n in numbers]
        self._router.watch(self._engines)
        self._generated = 0
        self._is_up = asyncio.Event()
        self._is_up.set()
        self._why_closed = "the simulated engines are opened by `async with`"
        self._controller_until = 0.0

    @property
    def failure(self) -> str | None:
        return self._why_closed or None

    @property
    def beats(self) -> int:
        return int(sum(engine.beats for engine in self._engines))

    async def generate(self, request: GenerateRequest) -> Generation:
        check_request(request, context_len=self.context_len, vocab_size=VOCABULARY, has_decode=False)
        self._seams.asked(request)
        answer = self._sampler.answer(request, self.context_len - len(request.prompt_ids))
        engine = await self._choose()
        prompt = hash(tuple(request.prompt_ids)) if self._batches else None  # of whole numbers: the same in every process
        row = Row(answer, asyncio.get_running_loop().create_future(), prompt)
        if answer.ids:
            self._may_hang(request, engine, row)
            await self._decode(engine, row)
        return await self._give(request, row)

    def _may_hang(self, request: GenerateRequest, engine: Engine, row: Row) -> None:
        hangs_s = self._seams.hangs(request.request_id)
        row.is_lost = hangs_s is not None
        if hangs_s:
            engine.hang(hangs_s)

    async def _decode(self, engine: Engine, row: Row) -> None:
        engine.take(row)
        if self._seams.engine_dies():
            self.kill(engine)
        try:
            await row.future
        finally:
            engine.leave(row)

    async def _give(self, request: GenerateRequest, row: Row) -> Generation:
        answer: Answer = row.answer
        slot = (row.began_s if answer.ids else self._world.now(), self._world.now())
        if self._overhead_s:
            await self._pass_controller()
        self._generated += answer.num_tokens
        generation = Generation(
            token_ids=answer.ids,
            log_probs=[answer.log_prob] * len(answer.ids),
            version_spans=row.spans() if answer.ids else [],
            stop_reason=answer.stop_reason,
        )
        self._seams.answered(request.request_id, generation, answer.num_tokens, slot)
        self._seams.generated(request, generation)
        return generation

    async def _choose(self) -> Engine:
        while True:
            if self._why_closed:
                raise EngineError(self._why_closed)
            number = self._router.choose()
            if number is not None:
                return self._engines[number]
            self._is_up.clear()
            await self._is_up.wait()  # bounded by the caller's deadline

    async def _pass_controller(self) -> None:
        """Its loop takes one turn's answer at a time."""
        now = self._world.now()
        self._controller_until = max(now, self._controller_until) + self._overhead_s
        await asyncio.sleep(self._controller_until - now)

    def kill(self, engine: Engine) -> None:
        """It fails its requests, and is back after `sim.engine.down_s`."""
        if engine.is_alive:
            engine.die(f"{engine.name} died")
            now = self._world.now()
            self._seams.busy(engine.name, "down", now, now + self._down_s)
            asyncio.get_running_loop().call_later(self._down_s, self._bring_back, engine)

    def _bring_back(self, engine: Engine) -> None:
        if not self._why_closed:
            engine.come_back()
            self._is_up.set()

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        began = self._world.now()
        await asyncio.sleep(self._publish_s)
        if self._is_training:
            self._seams.busy("trainer", "publish", began, self._world.now())
        self.version = version
        self.num_publications += 1
        self.weights_step = len(snapshot.lineage) if isinstance(snapshot, SimSnapshot) else None
        for engine in self._engines:
            engine.stamp(version)

    async def pause(self) -> None:
        for engine in self._engines:
            engine.pause()

    async def resume(self) -> None:
        for engine in self._engines:
            engine.resume()

    def stats(self) -> dict[str, float]:
        running = sum(engine.num_running for engine in self._engines)
        waiting = sum(engine.num_waiting for engine in self._engines)
        return {
            "generated_tokens": float(self._generated),
            **work_of(self._engines),
            "running": float(running),
            "waiting": float(waiting),
            "free_slots": float(self._slots * len(self._engines) - running),
            "discarded": 0.0,
        }

    async def __aenter__(self) -> Self:
        self._why_closed = ""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._why_closed = "the simulated engines are closed"
        self._is_up.set()
        for engine in self._engines:
            engine.die(self._why_closed)
