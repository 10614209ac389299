"""Faults come true, each where and as often as it should, and what they do is seen; only they explain an end."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.errors import AdmissionError, DeadlineError, JournalWriteError, ReplayError, StrayCancelError, TooManyFailuresError
from asyncrl.simulation.await_coverage import Variant
from asyncrl.simulation.errors import Crash, DeadlockError, InjectedError, Violation
from asyncrl.simulation.faults import ALL, FaultKind, ResumeFault, armed_kinds
from asyncrl.simulation.faults.ends import is_explained
from asyncrl.simulation.faults.process import Loss
from asyncrl.simulation.faults.rates import Rate, distance
from asyncrl.simulation.faults.resumes import Probe, ResumeFaults
from asyncrl.simulation.faults.sites import SiteFaults
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.simulation.run import FAULTY_LIVES, simulate
from asyncrl.simulation.seams import SavePart
from asyncrl.transfer_queue.leases import Leases

CONFIGS = Path(__file__).parents[2] / "configs" / "sim"
REFERENCE = load_run(Scenario, CONFIGS / "reference.toml")
SMALLEST = load_run(Scenario, CONFIGS / "smallest.toml")
LOUD = {
    **{f"sim.faults.{kind}": 0.3 for kind in ("tool_error", "tool_hang", "reward_error", "reward_hang", "straggler", "late_write")},
    **{f"sim.faults.{kind}": 0.1 for kind in ("await_error", "await_cancel", "await_hang", "engine_death", "tag_replay")},
    **{f"sim.faults.{kind}": 0.1 for kind in ("engine_hang", "eval_hang")},
    **{f"sim.faults.{kind}": 0.05 for kind in ("journal_slow", "journal_fail")},
    **{f"sim.faults.{kind}": 1.0 for kind in ("crash", "sigterm", "checkpoint_damage", "site")},
}
"""A run of the smallest scenario is over before a fault of the usual rate comes."""


# --- which and how many -----------------------------------------------------------------------------------------------------------


def test_every_kind_has_a_rate_and_every_rate_a_kind() -> None:
    assert {kind.value for kind in FaultKind} == set(type(SMALLEST.sim.faults).model_fields)


@pytest.mark.parametrize("kind", sorted(ALL))
def test_every_kind_comes_true_and_is_told_in_the_log(kind: FaultKind) -> None:
    scenario = Variant(changes={**LOUD, "trainer.total_training_steps": 4, "sim.prompts.val_count": 2}).of(SMALLEST)
    # A checkpoint is damaged where a run starts again.
    asked = frozenset({kind, FaultKind.SIGTERM} if kind is FaultKind.CHECKPOINT_DAMAGE else {kind})
    hits: Counter[FaultKind] = Counter()
    for seed in range(20):
        outcome = simulate(scenario, seed=seed, faults=asked, keep_events=None)
        assert outcome.failure is None, f"seed {seed}"
        told = [line.split()[2] for line in outcome.log.lines() if line.split()[1] == "fault"]
        assert Counter(told) == Counter({name.value: number for name, number in outcome.hits.items()})
        hits.update(outcome.hits)
        if hits[kind]:
            break
    assert hits[kind] > 0
    assert set(hits) <= asked | {FaultKind.CRASH if FaultKind.SIGTERM in asked else kind}  # who asks twice ends it at once


def test_without_faults_nothing_is_hit_and_one_life_is_enough() -> None:
    outcome = simulate(SMALLEST, seed=3)
    assert (outcome.failure, outcome.num_lives, outcome.hits.total()) == (None, 1, 0)


def test_seeds_arm_different_kinds_and_the_same_ones_again() -> None:
    armed = [armed_kinds(seed, ALL) for seed in range(200)]
    assert armed == [armed_kinds(seed, ALL) for seed in range(200)]
    counts = Counter(kind for kinds in armed for kind in kinds)
    assert set(counts) == ALL
    assert all(60 < count < 140 for count in counts.values())
    assert armed_kinds(1, frozenset({FaultKind.CRASH})).keys() == {FaultKind.CRASH}
    assert armed_kinds(1, frozenset()) == {}


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5])
def test_a_share_of_the_chances_is_hit(share: float) -> None:
    rate = Rate(share, seed=7)
    chances = int(2000 / share)
    hits = sum(rate.hits() for _ in range(chances))
    assert 1700 < hits < 2300


def test_a_share_of_none_and_of_all() -> None:
    assert not any(Rate(0.0, seed=1).hits() for _ in range(1000))
    rate = Rate(1.0, seed=1)
    assert all(rate.hits() for _ in range(1000))
    assert distance(0.5, 0.0) == 1


def test_faults_cease_so_that_a_run_comes_to_its_end() -> None:
    scenario = Variant(changes={"sim.faults.journal_fail": 1.0}).of(SMALLEST)
    lives = []
    for seed in range(6):
        outcome = simulate(scenario, seed=seed, faults=frozenset({FaultKind.JOURNAL_FAIL}))
        assert outcome.failure is None
        lives.append(outcome.num_lives)
    assert max(lives) == FAULTY_LIVES + 1


# --- at resumes -------------------------------------------------------------------------------------------------------------------


def run_probed(coroutine: Any, *at: ResumeFault, name: str = "guest: tool") -> tuple[Any, list[str]]:
    """What a task of this name ends with, and the faults that it met."""
    met: list[str] = []
    loop = VirtualLoop(0)
    faults = ResumeFaults(0, {}, at=at, hit=lambda kind, task, frames: met.append(f"{kind} {task} {frames[-1].f_code.co_name}"))
    loop.wrap = faults.wrap

    async def main() -> Any:
        task = asyncio.create_task(coroutine, name=name)
        try:
            async with asyncio.timeout(100):
                await asyncio.wait({task})
        except TimeoutError:
            return "it hangs"
        _ = task.cancelled() or task.exception()  # somebody looks at it
        return task

    try:
        return loop.run_until_complete(main()), met
    finally:
        loop.abandon()


async def naps(number: int = 3) -> str:
    for _ in range(number):
        await asyncio.sleep(1)
    return "rested"


def fault(number: int, kind: FaultKind) -> ResumeFault:
    return ResumeFault(number=number, kind=kind)


def test_a_fault_is_thrown_at_its_resume_and_the_begin_of_a_task_is_none() -> None:
    task, met = run_probed(naps(), fault(2, FaultKind.AWAIT_ERROR))
    assert isinstance(task.exception(), InjectedError)
    assert met == ["await_error guest: tool sleep"]
    task, met = run_probed(naps(), fault(5, FaultKind.AWAIT_ERROR))
    assert (task.result(), met) == ("rested", [])


def test_a_cancellation_from_inside_is_one_that_nobody_asked_for() -> None:
    asked: list[int] = []

    async def nap() -> None:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            asked.append(task.cancelling())
            raise

    task, _ = run_probed(nap(), fault(1, FaultKind.AWAIT_CANCEL))
    assert task.cancelled()
    assert asked == [0]


def test_a_guest_that_hangs_holds_on_to_its_cancellation() -> None:
    assert run_probed(naps(), fault(1, FaultKind.AWAIT_HANG)) == ("it hangs", ["await_hang guest: tool sleep"])


def test_only_guests_hang() -> None:
    task, met = run_probed(naps(), fault(1, FaultKind.AWAIT_HANG), name="group a")
    assert (task.result(), met) == ("rested", [])


def test_an_error_that_asyncio_cannot_have_is_not_thrown() -> None:
    async def in_a_group() -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(naps(1), name="sim: not asked")
        return "together"

    task, met = run_probed(in_a_group(), fault(1, FaultKind.AWAIT_ERROR))
    assert (task.result(), met) == ("together", [])


def test_several_faults_come_in_their_order() -> None:
    async def stubborn() -> int:
        errors = 0
        for _ in range(4):
            try:
                await asyncio.sleep(1)
            except (InjectedError, asyncio.CancelledError):
                errors += 1
        return errors

    task, met = run_probed(stubborn(), fault(1, FaultKind.AWAIT_ERROR), fault(3, FaultKind.AWAIT_CANCEL))
    assert task.result() == 2
    assert [told.split()[0] for told in met] == ["await_error", "await_cancel"]


def test_a_probe_shows_where_its_task_waits() -> None:
    async def outer() -> None:
        await asyncio.sleep(1)

    coroutine: Any = outer()
    probe = Probe(coroutine, "t", ResumeFaults(0, {}, hit=lambda *told: None))
    assert asyncio.iscoroutine(probe)
    assert (probe.cr_frame, probe.cr_await, probe.cr_code) == (coroutine.cr_frame, None, outer.__code__)
    probe.close()
    assert probe.cr_frame is None


# --- what is written late ---------------------------------------------------------------------------------------------------------


def test_a_late_write_that_is_accepted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fence a ghost's write goes through: here sessions stay open after they have settled."""
    scenario = Variant(changes={"sim.faults.late_write": 1.0}).of(SMALLEST)
    late = frozenset({FaultKind.LATE_WRITE})
    assert simulate(scenario, seed=0, faults=late, oracles=False).failure is None
    monkeypatch.setattr(Leases, "check", lambda *asked: None)
    outcomes = [simulate(scenario, seed=seed, faults=late, oracles=False).failure for seed in range(10)]
    assert any(isinstance(failure, Violation) and failure.invariant == "I4" for failure in outcomes)


# --- sites ------------------------------------------------------------------------------------------------------------------------


def test_a_seed_arms_a_quarter_of_the_sites_and_an_armed_one_pauses_now_and_then() -> None:
    pauses = {
        (seed, name): [SiteFaults(Rate(0.25, number), seed).pause_s(name) is not None for number in range(100)]
        for seed in range(40)
        for name in ("a.b", "c.d")
    }
    armed = [sum(passes) for passes in pauses.values() if any(passes)]
    assert 10 < len(armed) < 32
    assert all(10 < number < 45 for number in armed)


# --- ends -------------------------------------------------------------------------------------------------------------------------


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "hits", "explained"),
    [
        (Crash(Loss.POWER), {}, True),
        (InjectedError("x"), {}, True),
        (JournalWriteError("full"), {FaultKind.JOURNAL_FAIL}, True),
        (JournalWriteError("full"), {FaultKind.JOURNAL_SLOW}, False),
        (DeadlineError("late"), {FaultKind.TOOL_HANG}, True),
        (DeadlineError("late"), {FaultKind.CRASH}, False),
        (StrayCancelError("admission"), {FaultKind.AWAIT_CANCEL}, True),
        (StrayCancelError("admission"), set(), False),
        (asyncio.CancelledError(), {FaultKind.AWAIT_CANCEL}, False),
        (TooManyFailuresError("32"), {FaultKind.TOOL_ERROR}, True),
        (caused(ReplayError("dead"), InjectedError("x")), set(), True),
        (ReplayError("dead"), ALL, False),
        (caused(AdmissionError("no place"), InjectedError("x")), ALL, False),
        (caused(InjectedError("x"), Violation("I1", "lost")), ALL, False),
        (DeadlockError("stuck"), ALL, False),
        (ExceptionGroup("both", [InjectedError("x"), InjectedError("y")]), set(), True),
        (ExceptionGroup("both", [InjectedError("x"), AttributeError("y")]), ALL, False),
        (AttributeError("x"), ALL, False),
    ],
    ids=lambda value: "all" if value is ALL else repr(value),  # the order in a set is another one in each process
)
def test_an_end_is_explained_by_a_fault_of_its_life_or_it_is_a_finding(
    error: BaseException, hits: set[FaultKind], explained: bool
) -> None:
    assert is_explained(error, dict.fromkeys(hits, 1)) is explained


def test_a_finding_is_in_the_outcome_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Leases, *asked: object, **named: object) -> None:
        raise AttributeError("a mistake of ours")

    monkeypatch.setattr(Leases, "open_step", broken)
    outcome = simulate(SMALLEST, seed=0)
    assert isinstance(outcome.failure, AttributeError)
    assert not outcome.is_ok
    assert list(outcome.log.lines())[-1].endswith("AttributeError: a mistake of ours")


# --- the whole process ------------------------------------------------------------------------------------------------------------


def crashes(num_seeds: int, **changes: Any) -> list[list[str]]:
    scenario = Variant(changes={"sim.faults.crash": 1.0, "trainer.total_training_steps": 4, **changes}).of(SMALLEST)
    found = []
    for seed in range(num_seeds):
        outcome = simulate(scenario, seed=seed, faults=frozenset({FaultKind.CRASH}), keep_events=None)
        assert outcome.failure is None, f"seed {seed}: {outcome.failure!r}"
        found.append(list(outcome.log.lines()))
    return found


def test_crashes_fall_at_any_turn_while_it_starts_and_in_each_part_of_a_checkpoint() -> None:
    lines = [line for lines in crashes(40) for line in lines]
    told = [line for line in lines if " fault " in line]
    assert [part for part in SavePart if not any(f"with a checkpoint {part}" in line for line in told)] == []
    turns = sorted(int(line.partition("turn ")[2].partition(",")[0]) for line in told if "turn" in line)
    assert turns[0] < 20
    assert turns[-1] > 300
    assert {"process", "power"} == {line.rpartition(", ")[2] for line in told}
    resumed = [line for line in lines if " life " in line and not line.endswith(" 0")]
    assert resumed, "no life went on from a checkpoint"


def test_a_crash_runs_no_more_code() -> None:
    """Nothing of the dead life is in the log of the one after it."""
    for lines in crashes(10):
        for number, line in enumerate(lines):
            if " end " in line and "Crash" in line:
                assert all(" life " in after for after in lines[number + 1 : number + 2])
