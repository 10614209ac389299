"""Bugs of failures: attempts, back-off, quarantine, the deadline of a group."""

from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from asyncrl import wiring
from asyncrl.agents import runner
from asyncrl.agents.attempts import is_retried
from asyncrl.agents.loop import SessionContext
from asyncrl.agents.runner import GroupRunner
from asyncrl.ports import FailureClass
from asyncrl.transfer_queue.ledger import Ledger
from asyncrl.transfer_queue.state import State
from tests.simulation.planted.bug import ASYNC, bug, replaced

SCARCE = (*ASYNC, "sim.prompts.count=3", "replay.quarantine_after=2", "sim.faults.await_error=0.05", "agent.max_attempts=1")
"""Few rows, which fail often."""
SHORT = (*ASYNC, "agent.timeout_s=60", "agent.group_timeout_s=90", "sim.faults.engine_hang=0.2")
"""Groups have less time than the attempts of their sessions may take."""


@bug("a retry keeps the lease of the attempt that failed, and its turns are kept a second time", changes=ASYNC)
def attempt_not_raised() -> Iterator[None]:
    async def open_next(self: Any, group: Any, lease: Any, live: Any, failure: Any) -> Any:
        return lease

    with replaced(GroupRunner, _open_next=open_next), replaced(Ledger, check_turn=lambda *which: None):
        yield


@bug("a session is tried again and again", changes=(*ASYNC, "agent.retry_backoff_s=0"))
def attempts_unbounded() -> Iterator[None]:
    def always(failure: Any, *, attempt: int, config: Any) -> bool:
        return bool(failure.kind is FailureClass.INFRA)

    with replaced(runner, is_retried=always):
        yield


@bug("one attempt more than agent.max_attempts is made", changes=ASYNC)
def one_attempt_more() -> Iterator[None]:
    with replaced(runner, is_retried=lambda failure, *, attempt, config: is_retried(failure, attempt=attempt - 1, config=config)):
        yield


@bug("a retry leaves the turns of the attempt before", changes=ASYNC)
def lower_attempt_is_kept() -> Iterator[None]:
    right = State.open_session

    def open_session(self: Any, lease: Any) -> Any:
        remove, self.ledger.remove_turns = self.ledger.remove_turns, lambda sessions: []
        try:
            return right(self, lease)
        finally:
            self.ledger.remove_turns = remove

    with replaced(State, open_session=open_session), replaced(Ledger, check_turn=lambda *which: None):
        yield


@bug("a retry samples with other seeds", changes=ASYNC)
def retry_with_another_seed() -> Iterator[None]:
    right = SessionContext.generate

    class Shifted:
        def __init__(self, world: Any, attempt: int) -> None:
            self._world, self._attempt = world, attempt

        def seed(self, *parts: Any) -> int:
            return int(self._world.seed(*parts, self._attempt))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._world, name)

    async def generate(self: Any, *which: Any, **named: Any) -> Any:
        shifted = replace(self, world=Shifted(self.world, self.live.attempt)) if self.live.attempt else self
        return await right(shifted, *which, **named)

    with replaced(SessionContext, generate=generate):
        yield


@bug("a row that fails again and again is handed out all the same", changes=SCARCE)
def quarantine_ignored() -> Iterator[None]:
    right = wiring._feed

    def feed(run: Any, edges: Any) -> Any:
        made = right(run, edges)
        made._is_left_out = lambda row: False
        return made

    with replaced(wiring, _feed=feed):
        yield


@bug("a failed group does not count against its row", changes=SCARCE)
def failed_rows_not_counted() -> Iterator[None]:
    with replaced(Ledger, count_failed=lambda self, rows: []):
        yield


@bug("a group has no deadline", changes=SHORT)
def group_without_deadline() -> Iterator[None]:
    @asynccontextmanager
    async def alarm(after_s: float, look: Any) -> Any:
        yield

    with replaced(runner, Alarm=alarm):
        yield
