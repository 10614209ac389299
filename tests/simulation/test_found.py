"""What the simulator has found in the product: each once more, and no more to be found.

A fault is told by the line that waited when it came, or by a seed of a scenario's faults. Seeds find something else once the code
changes: where a fault can be told by its place, it is.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.ports import Json
from asyncrl.simulation.await_coverage import Variant, waiting_files
from asyncrl.simulation.faults import ALL, FaultKind, ResumeFault
from asyncrl.simulation.faults.awaits import AwaitCoverage, Seen
from asyncrl.simulation.run import simulate

CONFIGS = Path(__file__).parents[2] / "configs" / "sim"
NEVER = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class AtPlace:
    """Faults one after the other, each at the first resume (after the one before) of a task that waits in a line with this text."""

    what: str
    places: tuple[tuple[FaultKind, str], ...]
    changes: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BySeed:
    """All faults of a seed."""

    what: str
    seed: int
    scenario: str = "reference"
    faults: frozenset[FaultKind] = ALL


CANCEL, ERROR, STOP = FaultKind.AWAIT_CANCEL, FaultKind.AWAIT_ERROR, FaultKind.SIGTERM

AT_PLACES = (
    AtPlace(
        what="admission was cancelled from inside and ended in silence; the step waited an hour for groups that nobody admitted",
        places=((CANCEL, "await self.admission.wait_for_place()"),),
    ),
    AtPlace(
        what="the trainer's own task was cancelled from inside: no checkpoint, and an end without a word",
        places=((CANCEL, "await self.publish(self.version)"),),
        changes={"trainer.save_freq": 0},
    ),
    AtPlace(
        what="a second request to stop, while the first cut a wait short, raised in the event loop and ended it",
        places=((STOP, "await self._queue.begin_sessions("), (STOP, 'await self._world.site("agents.session")')),
    ),
)
BY_SEED = (
    BySeed(
        what="groups left for two reasons, and between the two drops one was admitted: a crash then found more than places",
        seed=85,
        scenario="async",
    ),
    BySeed(
        what="a run that failed by an evaluation left a later checkpoint: the version could never be measured",
        seed=286,
        scenario="async",
    ),
    BySeed(what="a failed group that was told twice was taken for one that nobody had admitted, and ended the run", seed=0),
    BySeed(what="the same", seed=7),
)


def resumes_of(scenario: Scenario, faults: list[ResumeFault]) -> list[Seen]:
    """Every resume of the run with these faults."""
    coverage = AwaitCoverage(waiting_files())
    coverage.seen = []
    never = ResumeFault(number=NEVER, kind=ERROR)
    simulate(scenario, seed=0, at=[*faults, never], awaits=coverage)
    return coverage.seen


@pytest.mark.parametrize("found", AT_PLACES, ids=lambda found: found.what)
def test_what_a_fault_at_a_place_has_found_is_mended(found: AtPlace) -> None:
    scenario = Variant(changes=found.changes).of(load_run(Scenario, CONFIGS / "smallest.toml"))
    faults: list[ResumeFault] = []
    for kind, text in found.places:
        since = faults[-1].number if faults else 0
        seen = resumes_of(scenario, faults)
        number = next(each.number for each in seen if each.number > since and any(text in line.text for line in each.lines))
        faults.append(ResumeFault(number=number, kind=kind))
    outcome = simulate(scenario, seed=0, at=faults, awaits=AwaitCoverage(waiting_files()), keep_events=None)
    assert outcome.failure is None
    assert outcome.hits.total() == len(faults)
    assert outcome.seconds < 60, "it waited for a deadline"


@pytest.mark.parametrize("found", BY_SEED, ids=lambda found: f"{found.scenario} {found.seed}")
def test_what_a_seed_has_found_is_mended(found: BySeed) -> None:
    scenario = load_run(Scenario, CONFIGS / f"{found.scenario}.toml")
    assert simulate(scenario, seed=found.seed, faults=found.faults).failure is None
