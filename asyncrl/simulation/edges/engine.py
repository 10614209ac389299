"""Engines that take time to answer: continuous batching with slots, a prefill that the other rows wait for, and saturation.

session -> [SimEngines.generate] -> the engine with the least load -> a slot -> prefill -> decode steps -> answer

A decode step of b rows takes `decode_step_s + decode_row_s x b`, so every running row has seen the same number of steps: one counter
of steps an engine and one timer for its next row to end, whatever the number of tokens. A row's tokens are stamped with the version
under which their step was made. Engines that have died fail their requests and come back empty.
"""

import asyncio
import heapq
from collections import deque
from types import TracebackType
from typing import Self

from asyncrl.config.simulation import Scenario, SimEngineConfig
from asyncrl.errors import EngineError, PromptTooLongError
from asyncrl.ports import GenerateRequest, Generation, VersionSpan, WeightSnapshot
from asyncrl.simulation.edges.sampler import Answer, Sampler
from asyncrl.simulation.seams import Seams
from asyncrl.simulation.world import SimWorld

DOWN_S = 30.0
"""Seconds until an engine that died is back."""


class SimEngines:
    """A RolloutEngine of `sim.engine.count` engines."""

    def __init__(self, scenario: Scenario, world: SimWorld, seams: Seams, *, version: int = 0) -> None:
        self.version = version
        self.context_len = scenario.train_run().max_model_len
        self._publish_s = scenario.sim.training.publish_s
        self._world = world
        self._seams = seams
        self._sampler = Sampler(scenario)
        slots = scenario.rollout.max_num_seqs
        self._engines = [_Engine(n, scenario.sim.engine, slots, world, seams) for n in range(scenario.sim.engine.count)]
        self._generated = 0
        self._is_up = asyncio.Event()
        self._is_up.set()
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        room = self.context_len - len(request.prompt_ids)
        if room < 1:
            raise PromptTooLongError(f"request {request.request_id}: its prompt fills the context of {self.context_len} tokens")
        await self._may_run.wait()
        answer = self._sampler.answer(request, room)
        engine = await self._choose()
        row = _Row(answer, self.version, asyncio.get_running_loop().create_future())
        engine.take(row)
        if self._seams.engine_dies():
            self._kill(engine)
        try:
            await row.future
        finally:
            engine.leave(row)
        self._generated += answer.num_tokens
        self._seams.token(request.request_id, answer.ids)
        generation = Generation(
            token_ids=answer.ids,
            log_probs=[answer.log_prob] * len(answer.ids),
            version_spans=row.spans(),
            stop_reason=answer.stop_reason,
        )
        self._seams.generated(request, generation)
        return generation

    async def _choose(self) -> "_Engine":
        while True:
            alive = [engine for engine in self._engines if engine.is_alive]
            if alive:
                return min(alive, key=lambda engine: engine.load)
            await self._is_up.wait()  # bounded by the caller's deadline

    def _kill(self, engine: "_Engine") -> None:
        engine.die()
        if not any(each.is_alive for each in self._engines):
            self._is_up.clear()
        asyncio.get_running_loop().call_later(DOWN_S, self._bring_back, engine)

    def _bring_back(self, engine: "_Engine") -> None:
        engine.is_alive = True
        self._is_up.set()

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        began = self._world.now()
        await asyncio.sleep(self._publish_s)
        self._seams.busy("trainer", "publish", began, self._world.now())
        self.version = version
        for engine in self._engines:
            engine.stamp(version)

    async def pause(self) -> None:
        self._may_run.clear()

    async def resume(self) -> None:
        self._may_run.set()

    def stats(self) -> dict[str, float]:
        running = sum(len(engine.running) for engine in self._engines)
        waiting = sum(len(engine.waiting) for engine in self._engines)
        return {"generated_tokens": float(self._generated), "running": float(running), "waiting": float(waiting)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for engine in self._engines:
            engine.close()


class _Row:
    """One request on its way. `marks`: (steps of its engine, version) from which its tokens are of that version."""

    __slots__ = ("answer", "began_s", "begin", "end", "future", "is_gone", "marks", "version")

    def __init__(self, answer: Answer, version: int, future: "asyncio.Future[None]") -> None:
        self.answer = answer
        self.future = future
        self.version = version
        self.begin = self.end = self.began_s = 0.0
        self.marks: list[tuple[float, int]] = []
        self.is_gone = False

    def __lt__(self, other: "_Row") -> bool:
        return self.end < other.end

    def spans(self) -> list[VersionSpan]:
        """In ids: the share of a row's steps is the share of its ids."""
        num_ids, steps = len(self.answer.ids), max(self.end - self.begin, 1e-9)
        borders = [round((mark - self.begin) / steps * num_ids) for mark, _ in self.marks] + [num_ids]
        versions = [version for _, version in self.marks]
        pairs = zip(borders, borders[1:], versions, strict=False)
        return [VersionSpan(start=start, end=end, version=version) for start, end, version in pairs if start < end]


class _Engine:
    """`steps`: decode steps so far, as of `_at`. Until `_prefilling_until` none is made."""

    def __init__(self, number: int, config: SimEngineConfig, slots: int, world: SimWorld, seams: Seams) -> None:
        self.name = f"engine {number}"
        self.is_alive = True
        self.waiting: deque[_Row] = deque()
        self.running: list[_Row] = []
        """A heap by the step at which each row ends."""
        self.num_running = 0
        self._config = config
        self._slots = slots
        self._world = world
        self._seams = seams
        self._version = 0
        self._steps = 0.0
        self._at = world.now()
        self._prefilling_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> int:
        return self.num_running + len(self.waiting)

    def take(self, row: _Row) -> None:
        self.waiting.append(row)
        self._advance()
        self._fill()

    def leave(self, row: _Row) -> None:
        """Its slot is free; one that has ended has left already."""
        if row.is_gone or (row.future.done() and not row.future.cancelled()):
            return
        row.is_gone = True
        if row in self.waiting:
            self.waiting.remove(row)
        elif self.is_alive:
            self._advance()
            self.num_running -= 1
            self._fill()

    def die(self) -> None:
        rows = [*self.waiting, *(row for row in self.running if not row.is_gone)]
        self.waiting.clear()
        self.running.clear()
        self.num_running = 0
        self.is_alive = False
        self.close()
        for row in rows:
            row.is_gone = True
            if not row.future.done():
                row.future.set_exception(EngineError(f"{self.name} died"))

    def stamp(self, version: int) -> None:
        self._version = version
        self._advance()
        for row in self.running:
            row.marks.append((self._steps, version))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step_s(self) -> float:
        return self._config.decode_step_s + self._config.decode_row_s * self.num_running

    def _advance(self) -> None:
        """Count the steps made since it was looked at last."""
        now = self._world.now()
        began = max(self._at, self._prefilling_until)
        if self.num_running and now > began:
            self._steps += (now - began) / max(self._step_s(), 1e-12)
        self._at = max(now, self._at)

    def _fill(self) -> None:
        """Give free slots to who waits, and set the timer for who ends next."""
        now = self._world.now()
        while self.waiting and self.num_running < self._slots:
            row = self.waiting.popleft()
            seconds = self._config.prefill_call_s + self._config.prefill_token_s * row.answer.num_prompt_tokens
            self._prefilling_until = max(now, self._prefilling_until) + seconds
            row.begin, row.began_s = self._steps, now
            row.end = self._steps + self._seams.slowed("generate", row.answer.num_tokens)
            row.marks.append((self._steps, max(row.version, self._version)))
            heapq.heappush(self.running, row)
            self.num_running += 1
        while self.running and self.running[0].is_gone:
            heapq.heappop(self.running)
        self.close()
        if self.running:
            wait_s = max(self._prefilling_until - now, 0.0) + (self.running[0].end - self._steps) * self._step_s()
            self._timer = asyncio.get_running_loop().call_later(max(wait_s, 0.0), self._end_rows)

    def _end_rows(self) -> None:
        self._advance()
        self._timer = None
        while self.running and (self.running[0].is_gone or self.running[0].end <= self._steps + 1e-6):
            row = heapq.heappop(self.running)
            if row.is_gone:
                continue
            self.num_running -= 1
            row.is_gone = True
            self._seams.busy(self.name, "row", row.began_s, self._world.now())
            if not row.future.done():
                row.future.set_result(None)
        self._fill()
