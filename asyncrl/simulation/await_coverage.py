"""The search for await coverage: a fault of each kind at every line of the controller that waits.

`python -m asyncrl.simulation.await_coverage configs/sim/smallest.toml` -> one line, and what is missing; exit code 1 if anything is

A run tells which lines wait at which of its resumes. Where one is among them that has not met a cancellation, or an error, the same
run is made again with that fault there; and so on in that run, since what a fault leads to waits in lines of its own.
"""

import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.agents.loop import AgentLoopOutput, SessionContext
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.errors import TooManyFailuresError
from asyncrl.ports import Json, Prompt
from asyncrl.simulation.faults import FaultKind, ResumeFault
from asyncrl.simulation.faults.awaits import PACKAGE, AwaitCoverage, AwaitLine, Seen, report
from asyncrl.simulation.run import Outcome, simulate

Faults = tuple[ResumeFault, ...]
MOST_FAULTS = 3
"""Of one run."""
THROWN = (FaultKind.AWAIT_CANCEL, FaultKind.AWAIT_ERROR)
MAIN_TASK = "task 1"
MANY = 1 << 40
"""More resumes than a run has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A scenario's sections, changed so that it waits in other lines. `changes`: dotted key -> value."""

    changes: dict[str, Json] = field(default_factory=dict)
    faults: frozenset[FaultKind] = frozenset()
    in_pairs: bool = False
    """Two faults at a time, too, and requests to stop."""
    is_hopeless: bool = False
    """It cannot come to its end, by its own error."""
    is_plain: bool = False
    """Without faults at awaits: how it ends says enough."""

    def of(self, scenario: Scenario) -> Scenario:
        """The scenario, changed."""
        tree = scenario.model_dump()
        for key, value in self.changes.items():
            *sections, name = key.split(".")
            section = tree
            for part in sections:
                section = section[part]
            section[name] = value
        return Scenario.model_validate(tree)


class UnkeepableLoop(SingleTurn):
    """What it gives cannot be kept: the store refuses it, which costs the session."""

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        return [replace(output, extra_fields={"of": object()}) for output in await super().run(prompt, context)]


_SYNC_TOOL = {"name": "search", "is_async": False, "result_len": 300.0}
VARIANTS = (
    Variant(),
    Variant(changes={"agent.name": "single_turn", "sim.prompts.val_count": 4}),
    Variant(changes={"agent.parallel_tool_calls": True, "sim.sessions.calls_a_turn": 2.0, "agent.max_concurrent_sessions": 1}),
    Variant(changes={"sim.tools": (_SYNC_TOOL,), "data.max_response_length": 2048}),
    Variant(changes={"sim.sessions.turn_len": 1100.0, "data.max_response_length": 4096, "trainer.invariants": "all"}),
    Variant(changes={"trainer.save_freq": 0, "agent.max_concurrent_tools": 1}, in_pairs=True),
    Variant(changes={"algorithm.adv_estimator": "remax"}),
    Variant(changes={"sim.prompts.val_count": 4, "eval.where": "snapshot", "sim.engine.decode_step_s": 0.2}),
    Variant(
        changes={
            **{"agent.timeout_s": 1.0, "agent.group_timeout_s": 1.0, "agent.tool_timeout_s": 5.0},
            **{"sim.tools": ({"name": "search", "latency_s": 3.0},), "replay.max_failed_groups_in_a_row": 2},
        },
        is_hopeless=True,
    ),
    Variant(
        changes={"agent.name": "asyncrl.simulation.await_coverage:UnkeepableLoop", "replay.max_failed_groups_in_a_row": 2},
        is_hopeless=True,
    ),
    Variant(
        changes={"agent.name": "single_turn", "sim.faults.reward_error": 1.0, "sim.prompts.val_count": 4},
        faults=frozenset({FaultKind.REWARD_ERROR}),
        is_plain=True,
    ),
)
"""Of the smallest scenario; together they wait in every line that waits at all."""

_ACTS_AT_ONCE = (
    "self.queue.open_lease(scope.lease",  # leases of steps and reads are not kept: no commit is waited for
    "self.queue.close_lease(scope.lease",
    "check_cleanup(scope)",
    "self.queue.describe(",
    "self.queue.kv_batch_get(",
    "self._trajectory_texts(batch)",
    "self._trace_end(balanced)",
    "self.replay.restore(step)",
    "self._queue.revive(",
    "self._stack.enter_async_context(self._tools)",  # nothing is opened that takes time
    "self._owner.__aenter__()",
    "self._within.__aenter__()",  # an alarm's
)
_NOT_IN_A_RUN = (
    "self._drop_rest(head, batch_size)",  # the feed of a run has no end
    'reason="feed_end")',
    "asyncio.wait(self._group_tasks)",  # GroupRunner.join, which benchmarks wait in
    "self.sight.trajectories(step, texts)",  # a simulation writes no files
)
_AFTER_A_RESTART = (  # faults come in the first life alone: the seeds of hunts, with crashes and faults at awaits, meet these
    "self._caught_up.wait()",
    "self._queue.kv_turns(lease.uid, lease.session_id)",
    "self._open_next(group, lease, live, LOST_STATE)",
    "self._settling.settle_group(group, group.failure)",
    "await self._admission.changed.wait()  # bounded by the sample's deadline",
    "await self._purge()  # a crash may have come",
)
LEFT_OUT = {
    FaultKind.AWAIT_CANCEL: (*_ACTS_AT_ONCE, *_NOT_IN_A_RUN, *_AFTER_A_RESTART),
    # asyncio waits for its own future in a semaphore: no exception comes out of it.
    FaultKind.AWAIT_ERROR: (*_ACTS_AT_ONCE, *_NOT_IN_A_RUN, *_AFTER_A_RESTART, "enter_async_context(self._places)"),
}
"""Texts of lines in which nothing can happen, by kind."""


def waiting_files() -> list[str]:
    """Sources of replay, agents and the trainer."""
    rooms = [path for room in ("replay", "agents") for path in sorted((PACKAGE / room).glob("*.py"))]
    return [*(str(path.relative_to(PACKAGE)) for path in rooms if path.name != "check.py"), "trainer.py"]


def search(
    coverage: AwaitCoverage, scenario: Scenario, variant: Variant, done: set[frozenset[AwaitLine]] | None = None
) -> Iterator[tuple[Faults, Outcome]]:
    """Run the scenario with faults wherever a task waits, and again wherever a line has not met one; yields each run.

    done: chains of lines that were looked at before, in another variant.
    """
    waiting: deque[Faults] = deque([()])
    planned: set[tuple[AwaitLine, FaultKind]] = set()
    places = done if done is not None and not variant.in_pairs else set()
    while waiting:
        faults = waiting.popleft()
        coverage.seen = []
        at = faults or (ResumeFault(number=MANY, kind=FaultKind.AWAIT_ERROR),)
        yield faults, simulate(scenario, seed=0, at=at, awaits=coverage, faults=variant.faults)
        if variant.is_plain:
            break
        if not faults:
            waiting.extend(_first_faults([each for each in coverage.seen if each.lines not in places], coverage.seen, variant))
            places.update(each.lines for each in coverage.seen)
        elif len(faults) < MOST_FAULTS:
            waiting.extend(_next_faults(coverage, faults, planned))
            if variant.in_pairs and len(faults) == 1:
                waiting.extend(_pairs(coverage.seen, faults[0]))
    coverage.seen = None


def _first_faults(new: Sequence[Seen], seen: Sequence[Seen], variant: Variant) -> Iterator[Faults]:
    """Each kind at each new place, the first and the last time that a task waits there; guests that hang; requests to stop."""
    first = {each.lines: each.number for each in reversed(new)}
    last = {each.lines: each.number for each in new}
    for number in sorted({*first.values(), *last.values()}):
        for kind in THROWN:
            yield (ResumeFault(number=number, kind=kind),)
    guests = {each.task.partition("_")[0]: each.number for each in seen if each.task.startswith("guest: ")}
    for number in guests.values():
        yield (ResumeFault(number=number, kind=FaultKind.AWAIT_HANG),)
    if variant.in_pairs:
        yield from ((ResumeFault(number=number, kind=FaultKind.SIGTERM),) for number in range(1, len(seen), 4))


def _next_faults(coverage: AwaitCoverage, faults: Faults, planned: set[tuple[AwaitLine, FaultKind]]) -> Iterator[Faults]:
    """The same faults, and one more where a line waits that has not met it, and for which none is planned yet."""
    for kind in THROWN:
        missing = set(coverage.missing(kind))
        for each in coverage.seen or ():
            new = {(line, kind) for line in each.lines & missing} - planned
            if each.number > faults[-1].number and new:
                planned |= new
                yield (*faults, ResumeFault(number=each.number, kind=kind))


def _pairs(seen: Sequence[Seen], first: ResumeFault) -> Iterator[Faults]:
    """After an exception in the trainer's own task, one in each group's task: two things that end a run at the same time."""
    if first.kind is FaultKind.AWAIT_ERROR and seen[first.number - 1].task == MAIN_TASK:
        for each in seen[first.number :]:
            if each.task.startswith("group "):
                yield (first, ResumeFault(number=each.number, kind=FaultKind.AWAIT_ERROR))


def cover(
    scenario: Scenario, variants: Sequence[Variant] = VARIANTS, *, told: Callable[[str], object] = lambda text: None
) -> AwaitCoverage:
    """Search all variants of a scenario. Raises what a run finds."""
    coverage = AwaitCoverage(waiting_files())
    done: set[frozenset[AwaitLine]] = set()
    for variant in variants:
        changed = variant.of(scenario)
        num_runs = 0
        for faults, outcome in search(coverage, changed, variant, done):
            num_runs += 1
            if outcome.failure is not None and not (variant.is_hopeless and isinstance(outcome.failure, TooManyFailuresError)):
                told(f"{variant} with {faults}:")
                raise outcome.failure
        told(f"{num_runs} runs of {variant}")
    return coverage


def main(arguments: Sequence[str]) -> int:
    """Prints the report; 1 when a line is missing."""
    coverage = cover(load_run(Scenario, Path(arguments[0])), told=lambda text: sys.stderr.write(f"{text}\n"))
    text = report(coverage, but=LEFT_OUT)
    sys.stdout.write(f"{text}\n")
    return int("\n" in text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads may stop early, as `head` does
    sys.exit(main(sys.argv[1:]))
