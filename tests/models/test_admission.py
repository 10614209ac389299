"""The admission rule keeps the staleness bound in every history of the small cases, and each wrong rule is caught."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.models.admission.cases import SMALL
from tests.models.admission.model import POSITION, TOO_OLD, AdmissionModel, Case
from tests.models.admission.policies import FEASIBLE, RIGHT, WRONG, Policy, Variant, one_place_more
from tests.models.search import explore

PAGE = (Path(__file__).parents[2] / "docs" / "proofs" / "staleness.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("policy", [RIGHT, FEASIBLE], ids=["first of the queue", "feasible"])
def test_no_history_breaks_a_promise(policy: Policy) -> None:
    num_states = 0
    for case in SMALL:
        found = explore(AdmissionModel(case=case, policy=policy))
        assert (found.broken, found.is_whole) == ("", True), f"{case}: {found.way}"
        num_states += found.num_states
    assert f"| {len(SMALL)} | {num_states:,} |" in PAGE, "docs/proofs/staleness.md has other numbers"


@pytest.mark.parametrize("variant", WRONG.values(), ids=list(WRONG))
def test_a_wrong_policy_is_caught(variant: Variant) -> None:
    assert explore(AdmissionModel(case=variant.case, policy=variant.policy)).broken == variant.breaks
    assert explore(AdmissionModel(case=variant.case, policy=RIGHT)).broken == "", "the case itself is possible"


@pytest.mark.parametrize(
    "variant", [v for v in WRONG.values() if v.breaks != "deadlock"], ids=[n for n in WRONG if WRONG[n].breaks != "deadlock"]
)
def test_a_wrong_policy_trains_on_what_is_too_old(variant: Variant) -> None:
    """The bound itself, when nobody looks ahead and says sooner that it cannot be kept."""
    found = explore(AdmissionModel(case=variant.case, policy=variant.policy, looks_ahead=False), limit=10_000)
    assert found.broken == TOO_OLD


def test_one_place_more_breaks_the_position_promise() -> None:
    """So the rule is the weakest that keeps it: see the proof."""
    policy = replace(RIGHT, limit=one_place_more)
    found = explore(AdmissionModel(case=Case(max_staleness=1, batch=1), policy=policy))
    assert found.broken == POSITION
    assert [str(action) for action in found.way] == ["admit"] * 3
