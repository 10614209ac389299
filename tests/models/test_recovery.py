"""The rules of recovery hold in every history of small cases, with crashes at any moment; without one of them they do not."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.models.recovery import oracles
from tests.models.recovery.cases import QUICK, WALKS
from tests.models.recovery.model import RecoveryModel
from tests.models.recovery.rules import Rules
from tests.models.recovery.state import IDLE, Case, Checkpoint, Group, Journal, Process, Record, Session, State
from tests.models.recovery.variants import WRONG, Variant
from tests.models.recovery.walks import random_history
from tests.models.search import ENDLESS, explore

PAGE = (Path(__file__).parents[2] / "docs" / "proofs" / "recovery.md").read_text(encoding="utf-8")
ACTIONS = {
    *("admit", "the feed ends", "drop the rest", "drop", "begin a call", "turn", "retry", "late write"),
    *("record", "take the record", "update", "retire", "publish", "evaluated", "sync", "DONE", "prune", "purge"),
    *("crash", "lose from here", "the newest checkpoint is damaged", "start", "delete the damaged", "load"),
    *("SIGTERM", "save before the end", "exit"),
}


def test_no_history_breaks_a_promise() -> None:
    """And every action is taken somewhere: what is never possible proves nothing."""
    taken, num_states = set[str](), 0
    for case in QUICK:
        found = explore(RecoveryModel(case=case))
        assert (found.broken, found.is_whole) == ("", True), f"{case}: {found.way}"
        num_states += found.num_states
        taken |= found.actions
    assert taken == ACTIONS
    assert f"| {len(QUICK)} | {num_states:,} |" in PAGE, "docs/proofs/recovery.md has other numbers"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", WALKS, ids=str)
def test_random_histories_of_large_cases_end_well(case: Case, seed: int) -> None:
    assert random_history(case, seed, length=400) == ""


@pytest.mark.parametrize("variant", WRONG.values(), ids=list(WRONG))
def test_a_wrong_variant_is_caught(variant: Variant) -> None:
    found = explore(RecoveryModel(case=variant.case), limit=100_000)
    assert found.broken == variant.breaks, found.way


def test_the_cases_of_the_variants_are_not_to_blame() -> None:
    for case in {replace(variant.case, rules=Rules()) for variant in WRONG.values()}:
        assert explore(RecoveryModel(case=case)).broken == "", str(case)


def test_every_rule_is_switched_off_by_a_variant() -> None:
    off = {name for variant in WRONG.values() for name in names_off(variant.case.rules)}
    assert off == {field.name for field in fields(Rules)}
    assert {variant.rule for variant in WRONG.values()} == set(range(1, 15))


def names_off(rules: Rules) -> set[str]:
    return {field.name for field in fields(rules) if getattr(rules, field.name) != field.default}


PLANTED = {
    oracles.TOO_NEW: State(journal=Journal(cursor=1, groups=(Group(0, (Session(1, 0, 1),)),), num_open=1)),
    oracles.TRAINED_TWICE: State(
        journal=Journal(cursor=2, records=(Record(1, (0,)), Record(2, (0,))), num_open=2),
        trained=((1, (0,)),),
        process=Process(phase=IDLE, weights=1),
        checkpoints=(Checkpoint(0), Checkpoint(1)),
    ),
    oracles.RECORD_MISSING: State(journal=Journal(cursor=1, records=(Record(2, (0,)),), num_open=1)),
}
"""States that no rule lets happen, and that no variant reaches before another promise is broken."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_state_that_must_not_be_is_seen(name: str) -> None:
    assert explore(RecoveryModel(case=Case(), start=PLANTED[name])).broken == name


def test_every_promise_can_be_broken() -> None:
    names = {value for name, value in vars(oracles).items() if name.isupper() and isinstance(value, str)}
    assert names == {variant.breaks for variant in WRONG.values()} | set(PLANTED)


def test_a_history_that_does_not_end_is_seen() -> None:
    assert random_history(Case(), 0, length=2) in ("", ENDLESS)
    rules = Rules(rest_is_dropped=False)
    assert any(random_history(Case(batch=2, rules=rules), seed, length=200) == oracles.DEADLOCK for seed in range(20))
