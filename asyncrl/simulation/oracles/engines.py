"""The pool of engines: where a request goes, what fails it, what weights answer it, and that nobody is forgotten.

1. A session stays at its engine, until that takes no requests or its weights are older than those that the session has seen.
2. Every other request goes to an engine with the least load, once; and none to one that is slow and has others.
3. A token that is asked for after a publication has returned is of its version or a later one.
4. A call fails for its engine's death, and for no other engine's; or when none is left.
5. Nobody waits at an engine that is gone, and nobody for an engine while one takes requests, longer than it takes to tell him.
6. An engine that has requests makes steps, or is ended.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.rollout.pool.member import Member
from asyncrl.simulation.edges.engine import SimEngine
from asyncrl.simulation.faults.kinds import FaultKind
from asyncrl.simulation.faults.resumes import INJECTED_INTO
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle

TOLD_S = 1.0
"""Virtual seconds within which everybody is told."""
SILENT_LOOKS = 3
"""Looks, `hung_after_s` apart, after which a silent engine must be gone. The watch does not count the time of publications."""
MOST_SESSIONS = 1 << 12
"""Whose engine is remembered here: fewer than the pool remembers."""


class Engines(Oracle):
    """`taken`, `given` and `failed` are asked in the middle of a turn, as things stand then: what is wrong is told at its end."""

    name = "engines"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._pool = ground.engines
        self._closed = ground.engines.kind.closed
        self._homes: OrderedDict[str, tuple[Member, int]] = OrderedDict()
        """Session -> where its last call went, and the newest version that it has seen."""
        self._calls: dict[str, tuple[SimEngine, int]] = {}
        """Request -> the engine that has it, and the version that it must have at least."""
        self._waits_since: float | None = None
        self._hung_after_s = ground.run.rollout.hung_after_s
        self._next_look = ground.loop.time()
        self._silent: dict[SimEngine, tuple[int, int]] = {}
        """Engines with requests -> their steps so far, and for how many looks these have been as many."""

    # --- in the middle of a turn

    def taken(self, request: GenerateRequest, engine: SimEngine) -> str:
        """Returns what is wrong with it."""
        members = self._pool._members
        if engine.number >= len(members) or (life := members[engine.number].life) is None or life.engine is not engine:
            return ""  # of another pool, for an evaluation
        is_again = request.request_id in self._calls and not self._can_be_deaf
        self._calls[request.request_id] = engine, self._pool.published
        here = members[engine.number]
        home, seen = self._homes.get(request.session, (None, -1))
        self._remember(request.session, here, seen)
        if is_again:
            return f"request {request.request_id} was asked once, and went to an engine twice"
        if here.is_slow and here.load > 1:  # a silent one is asked once more, now and then: whether it is at work again
            return f"request {request.request_id} went to {here.name}, which is slow and has {here.load - 1} others"
        if home is not None and home.takes_requests and home.version >= seen:
            strays = home is not here
            return f"request {request.request_id} went to {here.name}, and its session is at {home.name}" if strays else ""
        return "" if home is here else self._check_load(request, here, seen)

    def _check_load(self, request: GenerateRequest, here: Member, seen: int) -> str:
        """Its own request is counted already."""
        others = [other for other in self._pool._members if other.takes_requests and other.version >= seen]
        least = min((other.load for other in others if other is not here), default=here.load)
        if here.load - 1 > least:
            return f"request {request.request_id} went to {here.name} with {here.load - 1} others; one has {least}"
        return ""

    def _remember(self, session: str, member: Member, seen: int) -> None:
        if session:
            self._homes[session] = member, seen
            self._homes.move_to_end(session)
            if len(self._homes) > MOST_SESSIONS:
                self._homes.popitem(last=False)

    def failed(self, request: GenerateRequest, error: BaseException) -> str:
        """Returns what is wrong with it."""
        engine, _ = self._calls.pop(request.request_id, (None, 0))
        is_thrown_in = str(error).startswith(INJECTED_INTO)
        if type(error) is not EngineError or is_thrown_in or self._pool.failure is not None:
            return ""
        if engine is None:
            return f"request {request.request_id} failed, and no engine had it: {error}"
        if engine.failure is None and any(engine is other for other in self._pool.serving()):
            return f"request {request.request_id} failed at {engine.name}, which serves: {error}"
        return ""

    def given(self, request: GenerateRequest, generation: Generation) -> str:
        """Returns what is wrong with it."""
        engine, least = self._calls.pop(request.request_id, (None, 0))
        versions = generation.token_versions()
        if engine is None or not versions:
            return ""
        home, seen = self._homes.get(request.session, (None, -1))
        if home is not None:
            self._homes[request.session] = home, max(seen, versions[-1])
        if versions[0] < least:
            return f"request {request.request_id} was taken after version {least} was published, and has tokens of {versions[0]}"
        return ""

    # --- after it

    def strange(self, text: str) -> None:
        self.fail(text)

    def turn(self) -> None:
        now = self.ground.loop.time()
        while self._closed and self._closed[0].closed_s + TOLD_S < now:
            gone = self._closed.popleft()
            if gone.num_inside and not self._can_be_deaf:
                self.fail(f"{gone.num_inside} calls wait at {gone.name}, which was ended {now - gone.closed_s:.1f} s ago")
        if not self._pool._num_waiting or self._can_be_deaf or not any(self._taking()):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        elif self._waits_since + TOLD_S < now:
            self.fail(f"{self._pool._num_waiting} calls wait for an engine, and {next(self._taking()).name} takes requests")
        if now >= self._next_look:
            self._next_look = now + self._hung_after_s
            self._look()

    def _look(self) -> None:
        """Who has made no step since the last look, and has requests at both?"""
        before, self._silent = self._silent, {}
        for engine in self._pool.serving():
            beats, looks = before.get(engine, (-1, 0))
            if engine.num_inside:
                self._silent[engine] = engine.beats, looks + 1 if engine.beats == beats else 0
            if self._silent.get(engine, (0, 0))[1] >= SILENT_LOOKS:
                self.fail(f"{engine.name} has made no step for {SILENT_LOOKS * self._hung_after_s:g} s, has requests, and serves")

    @property
    def _can_be_deaf(self) -> bool:
        """A guest that hangs by himself hears nothing, wherever he waits."""
        return bool(self.ground.hits.get(FaultKind.AWAIT_HANG))

    def _taking(self) -> Iterator[Member]:
        return (member for member in self._pool._members if member.takes_requests)

    def due(self) -> float:
        closed_s = self._closed[0].closed_s if self._closed else math.inf
        told_s = min(closed_s, math.inf if self._waits_since is None else self._waits_since) + TOLD_S
        return min(told_s, self._next_look)
