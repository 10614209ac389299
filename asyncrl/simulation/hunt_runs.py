"""One run of a hunt, and what is left of it: numbers, and what it found, in a form that goes from process to process.

hunt, shrink -> [run_task] -> simulate -> RunReport
"""

import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.config.simulation import Scenario
from asyncrl.simulation.errors import UnseenError, Violation
from asyncrl.simulation.faults import FaultKind
from asyncrl.simulation.loop import Order
from asyncrl.simulation.run import Outcome, simulate
from asyncrl.wording import first_of

MAX_TRACE_LINES = 60
"""Of a failure's traceback, from its end: beyond them it is the loop's own frames."""


LAST_EVENTS = 50
"""Told of a finding: what led to it is rarely further back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTask:
    """What to run. Its outcome is a pure function of these."""

    scenario: Scenario
    seed: int
    faults: frozenset[FaultKind] = frozenset()
    order: Order = Order.TASKS
    oracles: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a run should not have done. `kind` is what findings of one cause share: an invariant's name, a class of errors."""

    seed: int
    kind: str
    message: str
    event: int = 0
    """Its number, from 1; 0 when the run did not live to tell."""
    at_s: float = 0.0
    """Virtual seconds."""
    events: tuple[str, ...] = ()
    """The last ones up to it."""
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What is left of a run. `hits`: faults that came true, by kind."""

    seed: int
    finding: Finding | None = None
    num_lives: int = 0
    steps: int = 0
    seconds: float = 0.0
    """Virtual."""
    hits: Mapping[str, int] = field(default_factory=dict)


def run_task(task: RunTask) -> RunReport:
    outcome = simulate(task.scenario, seed=task.seed, faults=task.faults, order=task.order, oracles=task.oracles)
    return RunReport(
        seed=task.seed,
        finding=finding_of(outcome),
        num_lives=outcome.num_lives,
        steps=outcome.steps,
        seconds=outcome.seconds,
        hits={str(kind): number for kind, number in sorted(outcome.hits.items())},
    )


def finding_of(outcome: Outcome) -> Finding | None:
    """With its last events, however many the log has kept."""
    failure = outcome.failure
    if failure is None:
        return None
    return Finding(
        seed=outcome.seed,
        kind=kind_of(failure),
        message=str(failure) or type(failure).__name__,
        event=outcome.log.num_events,
        at_s=outcome.log.now(),
        events=tuple(deque(outcome.log.lines(), maxlen=LAST_EVENTS)),
        trace=_trace_of(failure),
    )


def kind_of(failure: BaseException) -> str:
    """The invariant that was broken, or the class of the error; of a group, of its first; with that of a failure nobody saw."""
    if isinstance(failure, Violation):
        return failure.invariant
    first = first_of(failure)
    name = type(first).__name__
    if isinstance(first, UnseenError) and first.__cause__ is not None:
        return f"{name} of {kind_of(first.__cause__)}"
    return name


def _trace_of(failure: BaseException) -> str:
    lines = "".join(traceback.format_exception(failure)).splitlines()
    return "\n".join(lines[-MAX_TRACE_LINES:])
