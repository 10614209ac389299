"""The same seed is the same run, in any process; and what is not the same is seen."""

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation import determinism
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.faults import FaultKind
from asyncrl.simulation.loop import Order
from asyncrl.simulation.run import simulate

REFERENCE = Path(__file__).parents[2] / "configs" / "sim" / "reference.toml"


@pytest.mark.long
def test_two_processes_that_differ_in_all_else_run_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert determinism.main([str(REFERENCE), "--seeds", "4"]) == 0
    assert capsys.readouterr().out == "4 seeds twice, 0 differ\n"


@pytest.mark.parametrize("order", Order)
def test_a_run_repeats_itself_whatever_ran_before(order: Order) -> None:
    scenario = load_run(Scenario, REFERENCE)

    def log_of(seed: int) -> list[str]:
        outcome = simulate(scenario, seed=seed, order=order, faults=frozenset(FaultKind), keep_events=None)
        return list(outcome.log.lines())

    first = log_of(7)
    assert log_of(8) != first
    assert log_of(7) == first


def test_watching_does_not_change_a_run() -> None:
    """Oracles see everything and touch nothing: with and without them the same things happen at the same times."""
    scenario = load_run(Scenario, REFERENCE)

    def digest_of(*, oracles: bool) -> str:
        return simulate(scenario, seed=3, faults=frozenset(FaultKind), oracles=oracles, digest=True).log.digest

    assert digest_of(oracles=True) == digest_of(oracles=False)


def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(determinism, "differing", lambda *args, **kwargs: [3])
    assert determinism.main([str(REFERENCE), "--seeds", "5"]) == 1
    assert capsys.readouterr().out == "seed 3 differs from itself\n5 seeds twice, 1 differ\n"


# --- the log


def _filled(log: EventLog, number: int = 1_000) -> EventLog:
    ticks = itertools.count()
    log.now = lambda: next(ticks) / 4
    for index in range(number):
        log.step(f"task {index}")
    log.note("fault", "two\nlines")
    return log


def test_a_line_an_event_and_the_newest_are_kept() -> None:
    log = _filled(EventLog(keep=2))
    assert list(log.lines()) == ["249.750000000 step     task 999", "250.000000000 fault    two\\nlines"]
    assert log.num_events == 1_001


def test_the_whole_log_goes_to_a_file(tmp_path: Path) -> None:
    log = _filled(EventLog(keep=None))
    log.write(tmp_path / "events.log")
    assert (tmp_path / "events.log").read_bytes() == "".join(f"{line}\n" for line in log.lines()).encode()
    assert log.num_events == len(list(log.lines())) == 1_001


@pytest.mark.parametrize("change", [lambda log: log.note("fault", "one more"), lambda log: log.step("")])
def test_the_digest_counts_what_is_not_kept(change: Callable[[EventLog], None]) -> None:
    few, all_of_them = _filled(EventLog(keep=1, digests=True)), _filled(EventLog(keep=None, digests=True))
    whole = "".join(f"{line}\n" for line in all_of_them.lines())
    assert few.digest == all_of_them.digest == hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
    before = few.digest
    assert few.digest == before
    change(few)
    assert few.digest != before


def test_a_digest_must_be_asked_for() -> None:
    with pytest.raises(ValueError, match="digests=True"):
        _ = EventLog().digest
