"""Bugs in the pool of engines: routing, deaths, restarts, publications."""

import asyncio
from collections.abc import Iterator
from typing import Any

from asyncrl.errors import EngineError
from asyncrl.rollout.pool.life import Life
from asyncrl.rollout.pool.member import Member
from asyncrl.rollout.pool.pool import EnginePool
from asyncrl.rollout.pool.routing import LeastLoaded, Router
from asyncrl.rollout.pool.watch import Watch
from tests.simulation.planted.bug import ASYNC, bug, replaced

TWO: tuple[str, ...] = ("sim.engine.count=2", "sim.engine.down_s=5", "sim.faults.engine_death=0.05", "sim.faults.engine_hang=0.03")
"""Two engines that die and hang all the time."""
TWO_ASYNC = (*TWO, *ASYNC)
HANG = ("sim.engine.count=2", "rollout.request_timeout_s=60", "rollout.slow_after_s=5", "sim.faults.engine_hang=0.2")


@bug("a session goes on at its engine, dead or not", changes=TWO)
def sticky_to_a_dead_engine() -> Iterator[None]:
    right = EnginePool._choose

    async def choose(self: Any, session: str) -> Life:
        lives: dict[str, Life] = self.__dict__.setdefault("_planted", {})
        life = lives.get(session) or await right(self, session)
        lives[session] = life
        return life

    with replaced(EnginePool, _choose=choose):
        yield


@bug("a session goes wherever the load is least: its beginning is in no cache", changes=TWO)
def sessions_wander() -> Iterator[None]:
    with replaced(Router, _can_stay=lambda self, home, version: False):
        yield


@bug("the router takes the first engine that takes requests", changes=TWO)
def load_not_balanced() -> Iterator[None]:
    def choose(self: Any) -> int | None:
        return next((engine.number for engine in self._engines if engine.takes_requests), None)

    with replaced(LeastLoaded, choose=choose):
        yield


@bug("a slow engine gets requests like any other", changes=HANG)
def slow_engine_takes_requests() -> Iterator[None]:
    with replaced(Life, takes_requests=property(lambda self: self.failure is None)):
        yield


@bug("an engine that comes back serves with the weights of its start", changes=TWO_ASYNC)
def restarted_with_old_weights() -> Iterator[None]:
    async def obey(self: Any, life: Life) -> bool:
        return not life.is_dead()

    with replaced(Member, _obey=obey):
        yield


@bug("who waits for an engine that is declared dead is not told", changes=HANG)
def waiter_forgotten_at_a_death() -> Iterator[None]:
    right = Life.die

    def die(self: Any, reason: str) -> None:
        calls, self._calls = self._calls, {}
        right(self, reason)
        self._calls = calls

    with replaced(Life, die=die):
        yield


@bug("who waits for any engine at all is not told when one is back", changes=TWO)
def waiter_forgotten_at_a_restart() -> Iterator[None]:
    with replaced(EnginePool, _changed=lambda self, member: self._router.changed(member)):
        yield


@bug("an engine that hangs is slow for ever: nobody ends it", changes=HANG)
def hung_engine_stays() -> Iterator[None]:
    right = Watch._judge

    def judge(self: Any) -> None:
        limit_s, self._hung_after_s = self._hung_after_s, 1e9
        right(self)
        self._hung_after_s = limit_s

    with replaced(Watch, _judge=judge):
        yield


@bug("a publication is over when the first engine has it", changes=TWO_ASYNC)
def published_when_the_first_has_it() -> Iterator[None]:
    async def spread(self: Any, weights: Any) -> None:
        gives = [asyncio.ensure_future(life.take(weights)) for life in self._lives()]
        for give in gives:
            give.set_name("sim: publication")
        if gives:
            await asyncio.wait(gives, return_when=asyncio.FIRST_COMPLETED)
        self._orders.accept(weights)

    with replaced(EnginePool, _spread=spread):
        yield


@bug("a call that fails counts as load for ever", changes=TWO)
def load_leaks() -> Iterator[None]:
    async def generate(self: Any, request: Any) -> Any:
        self._count(1)
        generation = await self._call(lambda: self.engine.generate(request))
        self.has_answered = True
        self._watch.heard()
        self._count(-1)
        return generation

    with replaced(Life, generate=generate):
        yield


@bug("the pool asks another engine when one dies: the session runner retries, and so the call is made twice", changes=TWO)
def retried_inside_the_pool() -> Iterator[None]:
    right = EnginePool.generate

    async def generate(self: Any, request: Any) -> Any:
        try:
            return await right(self, request)
        except EngineError:
            return await right(self, request)

    with replaced(EnginePool, generate=generate):
        yield
