"""When an evaluation is due, what it is measured on, and what becomes of its numbers. The way of one on a real run:
tests/integration/test_evaluation.py."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from asyncrl.config import TrainRun, parse_run
from asyncrl.errors import EvaluationError, StrayCancelError
from asyncrl.evaluations import Evaluations, Measure
from asyncrl.ports import Incident, IncidentKind, Policy, RolloutEngine, WeightSnapshot
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.world import RealWorld


@dataclass(frozen=True)
class Snapshot:
    tensors: Mapping[str, Any] = field(default_factory=dict)


class Copier:
    """A policy that can only be copied."""

    def __init__(self) -> None:
        self.copies: list[int] = []

    def snapshot(self, version: int) -> WeightSnapshot:
        self.copies.append(version)
        return Snapshot()


@dataclass
class Bench:
    """Evaluations with all that they touch; `events`: what happened, in order."""

    evaluations: Evaluations
    events: list[str]
    incidents: list[Incident]
    policy: Copier
    evaluated: int = -1

    def say(self, text: str) -> None:
        self.events.append(f"said {text}")

    async def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        self.events.append(f"wrote {step} {dict(numbers)}")

    async def note_evaluation(self, version: int) -> None:
        self.events.append(f"recorded {version}")
        self.evaluated = version


MakeBench = Callable[..., Bench]


@pytest.fixture
async def world() -> AsyncIterator[RealWorld]:
    async with RealWorld() as world:
        yield world


@pytest.fixture
def make(world: RealWorld) -> MakeBench:
    """make(measure, where=..., test_freq=..., ...): `own` engines have version 0 and say when they open and close."""

    def made(measure: Measure | None, *, where: str = "between", evaluated: int = -1, **trainer: Any) -> Bench:
        given = {
            "model": {"path": "-"},
            "data": {"train_files": ["-"], "val_files": ["-"]},
            "eval": {"where": where, "timeout_s": trainer.pop("timeout_s", 60.0)},
            "trainer": {"total_training_steps": 9, "save_freq": 0, **trainer},
        }
        run = parse_run(TrainRun, given)
        bench = Bench(cast("Any", None), [], [], Copier(), evaluated)

        @asynccontextmanager
        async def open_engine() -> AsyncIterator[RolloutEngine]:
            bench.events.append("opened")
            yield ScriptedEngine(lambda request: [])
            bench.events.append("closed")

        bench.evaluations = Evaluations(
            measure,
            run=run,
            world=world,
            policy=cast("Policy", bench.policy),
            engine=ScriptedEngine(lambda request: [], version=100),
            open_engine=open_engine,
            queue=bench,
            sight=bench,
            report=bench.incidents.append,
            total_steps=9,
        )
        return bench

    return made


async def at_once(engine: RolloutEngine, version: int) -> dict[str, float]:
    return {"engine": float(engine.version)}


def gated(gate: asyncio.Event) -> Measure:
    async def measure(engine: RolloutEngine, version: int) -> dict[str, float]:
        await gate.wait()
        return {"engine": float(engine.version)}

    return measure


# --- due --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "due"),
    [
        ({}, [0, 9]),
        ({"val_before_train": False}, [9]),
        ({"test_freq": 4}, [0, 4, 8, 9]),
        ({"test_freq": 1, "val_before_train": False}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"test_freq": 4, "publish_freq": 3}, [0, 6, 9]),  # the versions that hold step 4 and step 8
        ({"test_freq": 1, "publish_freq": 3}, [0, 3, 6, 9]),
    ],
)
async def test_due_are_the_first_the_last_and_each_version_with_a_step_of_the_interval(
    make: MakeBench, trainer: dict[str, Any], due: list[int]
) -> None:
    bench = make(at_once, **trainer)
    each = trainer.get("publish_freq", 1)
    assert [step for step in range(0, 10, each) if bench.evaluations.is_due(step, step // each)] == due


@pytest.mark.parametrize(("evaluated", "due"), [(-1, [0, 1, 2, 3]), (0, [1, 2, 3]), (2, [3]), (9, [])])
async def test_no_version_is_due_once_it_or_a_later_one_is_recorded(make: MakeBench, evaluated: int, due: list[int]) -> None:
    bench = make(at_once, test_freq=1, evaluated=evaluated)
    assert [step for step in range(4) if bench.evaluations.is_due(step, step)] == due


async def test_nothing_to_measure_is_never_due(make: MakeBench) -> None:
    bench = make(None, test_freq=1)
    assert not bench.evaluations.is_due(9, 9)
    await bench.evaluations.run_if_due(9, 9)
    await bench.evaluations.settle()
    assert bench.events == []


# --- between ----------------------------------------------------------------------------------------------------------------------


async def test_between_publications_it_is_over_when_it_returns_and_recorded_after_its_numbers(make: MakeBench) -> None:
    bench = make(at_once)
    await bench.evaluations.run_if_due(9, 9)
    assert bench.events == ["wrote 9 {'engine': 100.0, 'eval/version': 9.0}", "recorded 9"]
    assert bench.policy.copies == []
    await bench.evaluations.run_if_due(9, 9)
    assert len(bench.events) == 2, "once"


# --- beside training --------------------------------------------------------------------------------------------------------------


async def test_beside_training_it_measures_a_copy_on_an_engine_of_its_own(make: MakeBench) -> None:
    gate = asyncio.Event()
    bench = make(gated(gate), where="snapshot", test_freq=1)
    await bench.evaluations.run_if_due(3, 3)
    assert bench.policy.copies == [3], "the copy is made before training goes on"
    gate.set()
    await bench.evaluations.settle()
    assert bench.events == ["opened", "closed", "wrote 3 {'engine': 3.0, 'eval/version': 3.0}", "recorded 3"]


async def test_the_next_one_waits_for_the_one_before(make: MakeBench) -> None:
    gate = asyncio.Event()
    bench = make(gated(gate), where="snapshot", test_freq=1)
    await bench.evaluations.run_if_due(3, 3)
    following = asyncio.ensure_future(bench.evaluations.run_if_due(4, 4))
    await asyncio.wait({following}, timeout=0.02)
    assert (following.done(), bench.policy.copies) == (False, [3])
    gate.set()
    await following
    await bench.evaluations.settle()
    assert [event for event in bench.events if event.startswith("recorded")] == ["recorded 3", "recorded 4"]
    assert bench.events.index("recorded 3") < bench.events.index("opened", 1)


async def test_a_checkpoint_waits_for_evaluations_of_older_weights_alone(make: MakeBench) -> None:
    gate = asyncio.Event()
    bench = make(gated(gate), where="snapshot", test_freq=1)
    await bench.evaluations.run_if_due(3, 3)
    await bench.evaluations.settle(before=3)  # who loads version 3 measures it again
    assert "recorded 3" not in bench.events
    older = asyncio.ensure_future(bench.evaluations.settle(before=4))
    await asyncio.wait({older}, timeout=0.02)
    assert not older.done()
    gate.set()
    await older
    assert bench.events[-1] == "recorded 3"


async def test_who_is_cut_short_while_it_waits_has_not_ended_the_evaluation(make: MakeBench) -> None:
    gate = asyncio.Event()
    bench = make(gated(gate), where="snapshot", test_freq=1)
    await bench.evaluations.run_if_due(3, 3)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await bench.evaluations.settle()
    gate.set()
    await bench.evaluations.settle()
    assert bench.events[-1] == "recorded 3"


async def test_a_closed_one_leaves_no_number_and_no_task(make: MakeBench) -> None:
    bench = make(gated(asyncio.Event()), where="snapshot", test_freq=1)
    before = asyncio.all_tasks()
    await bench.evaluations.run_if_due(3, 3)
    await bench.evaluations.close()
    await bench.evaluations.close()
    assert asyncio.all_tasks() == before
    assert not any(event.startswith(("wrote", "recorded")) for event in bench.events)


# --- what goes wrong --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["between", "snapshot"])
async def test_one_that_takes_too_long_is_told_has_no_number_and_training_goes_on(make: MakeBench, where: str) -> None:
    gate = asyncio.Event()
    bench = make(gated(gate), where=where, timeout_s=0.05, test_freq=1)
    await bench.evaluations.run_if_due(3, 3)
    await bench.evaluations.settle()
    late = "the evaluation of version 3 took longer than eval.timeout_s = 0.05 s: it has no numbers"
    assert [event for event in bench.events if event not in ("opened", "closed")] == [f"said {late}"]
    (incident,) = bench.incidents
    assert (incident.kind, incident.what, incident.step, incident.limit) == (
        IncidentKind.DEADLINE,
        "evaluation",
        3,
        "eval.timeout_s",
    )
    assert incident.text == late
    assert bench.evaluations.is_due(3, 3), "a restart at this version tries again"
    gate.set()
    await bench.evaluations.run_if_due(4, 4)
    await bench.evaluations.settle()
    assert bench.events[-1] == "recorded 4"


async def fails(engine: RolloutEngine, version: int) -> dict[str, float]:
    raise EvaluationError(f"all sessions failed at version {version}")


@pytest.mark.parametrize("step", [4, 5])
async def test_what_failed_beside_training_is_raised_at_the_next_version_due_or_not(make: MakeBench, step: int) -> None:
    bench = make(fails, where="snapshot", test_freq=4)
    await bench.evaluations.run_if_due(4, 4)
    await asyncio.wait(asyncio.all_tasks() - {cast("Any", asyncio.current_task())})
    with pytest.raises(EvaluationError, match="at version 4"):
        await bench.evaluations.run_if_due(step, step)
    assert not any(event.startswith(("wrote", "recorded")) for event in bench.events)


async def fails_at_its_end(engine: RolloutEngine, version: int) -> dict[str, float]:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError as error:
        raise EvaluationError("the engine is gone") from error
    return {}


async def test_what_fails_while_it_is_closed_is_not_logged_as_forgotten(make: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    bench = make(fails_at_its_end, where="snapshot", test_freq=1)
    await bench.evaluations.run_if_due(4, 4)
    await asyncio.sleep(0)
    await bench.evaluations.close()
    del bench
    gc.collect()
    assert caplog.text == ""


async def test_a_cancellation_that_nobody_asked_for_is_no_silent_end(make: MakeBench) -> None:
    async def cancelled(engine: RolloutEngine, version: int) -> dict[str, float]:
        raise asyncio.CancelledError

    bench = make(cancelled, where="snapshot", test_freq=1)
    await bench.evaluations.run_if_due(4, 4)
    with pytest.raises(StrayCancelError, match="the evaluation of version 4"):
        await bench.evaluations.settle()
