"""Stored advantages of verl 0.9.1 and of its corrected cases; and that a wrong number among them is noticed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms.check_advantages import CHECKS
from asyncrl.algorithms.checking import Case

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"


def _case(raw: dict[str, Any]) -> Case:
    parts = {name: raw.get(name, {}) for name in ("params", "inputs", "outputs")}
    return Case(id=raw["id"], kind=raw.get("kind", ""), raw=raw, **parts)


def _stored(name: str) -> list[Any]:
    """(check, case) of a file of the fixtures, as far as it is ours; one that skips with its reason without the folder."""
    path = FIXTURES / f"{name}.json"
    if not path.is_file():
        return [pytest.param("", {}, id=f"no-{name}", marks=pytest.mark.skip(reason=f"no {name}.json in ../shared/fixtures"))]
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    keyed = [(f"{name}/{case['kind']}" if "kind" in case else name, case) for case in cases]
    return [pytest.param(key, case, id=case["id"]) for key, case in keyed if key in CHECKS]


@pytest.mark.parametrize(("key", "raw"), [*_stored("advantages"), *_stored("corrected")])
def test_stored_numbers(key: str, raw: dict[str, Any]) -> None:
    compared = list(CHECKS[key](_case(raw)))
    assert compared
    assert [each for each in compared if not each.passed] == []


GRPO: dict[str, Any] = {
    "id": "mine",
    "estimator": "grpo",
    "params": {"norm_adv_by_std_in_grpo": False},
    "inputs": {
        "token_level_rewards": [[0.0, 1.0], [0.0, 0.0], [0.97, 0.0], [0.97, 0.0]],
        "response_mask": [[1, 1], [1, 1], [1, 0], [1, 0]],
        "index": [0, 0, 1, 1],
    },
    "outputs": {name: [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0], [0.0, 0.0]] for name in ("advantages", "returns")},
}


@pytest.mark.parametrize("key", ["advantages", "corrected/advantage"])
def test_a_right_case_passes(key: str) -> None:
    assert all(each.passed for each in CHECKS[key](_case(GRPO)))


@pytest.mark.parametrize("name", ["advantages", "returns"])
def test_a_wrong_number_is_noticed(name: str) -> None:
    wrong = copy.deepcopy(GRPO)
    wrong["outputs"][name][1][1] = -0.50001
    (failed,) = [each for each in CHECKS["advantages"](_case(wrong)) if not each.passed]
    assert failed.what.startswith(f"{name}[1, 1]")
    assert failed.worst == pytest.approx(1e-5 / 6e-6, rel=1e-2)


def test_rows_without_signal_must_be_zero_to_the_last_bit() -> None:
    almost = copy.deepcopy(GRPO)
    almost["inputs"]["token_level_rewards"][3][0] = 0.97 + 1e-7  # float32 can tell them apart, the tolerance cannot
    assert torch.tensor(0.97) != torch.tensor(0.97 + 1e-7)
    assert all(each.passed for each in CHECKS["advantages"](_case(almost)))
    assert [each.what.split(":")[0] for each in CHECKS["corrected/advantage"](_case(almost)) if not each.passed] == [
        "rows without signal[0, 0]"
    ]


def test_groups_without_variance() -> None:
    groups = [[0.1, 0.1, 0.1], [0.1, 0.2], [5.0], [0.3] * 12]
    raw = {"id": "mine", "inputs": {"groups": groups}, "outputs": {"degenerate": [1, 0, 1, 1]}}
    check = CHECKS["corrected/zero_variance_filter"]
    assert all(each.passed for each in check(_case(raw)))
    raw["outputs"] = {"degenerate": [1, 1, 1, 1]}
    assert not all(each.passed for each in check(_case(raw)))
