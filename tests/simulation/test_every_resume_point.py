"""The smallest scenario with a cancellation from inside, and with an exception, at every single resume of every task.

However a life ends by it, the run comes to its end afterwards, and every oracle holds all the way.
"""

from collections import Counter
from pathlib import Path

import pytest

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.faults import FaultKind, ResumeFault
from asyncrl.simulation.run import simulate

SMALLEST = load_run(Scenario, Path(__file__).parents[2] / "configs" / "sim" / "smallest.toml")
NEVER = 1 << 40
SCHEDULES = range(3)


def num_resumes(seed: int) -> int:
    """Of a run in which nothing goes wrong."""
    outcome = simulate(SMALLEST, seed=seed, at=ResumeFault(number=NEVER, kind=FaultKind.AWAIT_ERROR))
    assert outcome.failure is None
    return outcome.num_resumes


@pytest.mark.long
@pytest.mark.parametrize("kind", [FaultKind.AWAIT_CANCEL, FaultKind.AWAIT_ERROR])
@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_fault_at_any_resume_ends_nothing_for_good(seed: int, kind: FaultKind) -> None:
    total = num_resumes(seed)
    assert total > 80
    lives: Counter[int] = Counter()
    for number in range(1, total + 1):
        outcome = simulate(SMALLEST, seed=seed, at=ResumeFault(number=number, kind=kind))
        assert outcome.failure is None, f"seed {seed}, {kind} at resume {number}: {outcome.failure!r}"
        # An error that asyncio cannot have is not thrown.
        assert outcome.hits.total() == 1 or kind is FaultKind.AWAIT_ERROR
        lives[outcome.num_lives] += 1
    # Some faults cost a session or a group, some the life; never more.
    assert set(lives) == {1, 2}
    assert min(lives.values()) > total / 10


def test_two_faults_at_once_end_nothing_for_good() -> None:
    """Each pair of an exception and a cancellation a few resumes apart, of a few places."""
    total = num_resumes(0)
    for first in range(3, total, 7):
        for second in (first + 1, first + 3):
            at = [
                ResumeFault(number=first, kind=FaultKind.AWAIT_ERROR),
                ResumeFault(number=second, kind=FaultKind.AWAIT_CANCEL),
            ]
            outcome = simulate(SMALLEST, seed=0, at=at)
            assert outcome.failure is None, f"{at}: {outcome.failure!r}"
