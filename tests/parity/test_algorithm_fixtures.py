"""Our GRPO advantages against stored numbers of verl 0.9.1 (`../shared/fixtures`).

Tolerance: rtol 1e-5, atol 1e-6, compared under the mask. `corrected.json` holds the right values for inputs on which
that release is wrong; rows of groups of one are compared against 0 (advantages.py, difference 1).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms.advantages import group_signal, grpo_advantages

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
GRPO = ("grpo", "grpo_vectorized")

Case = dict[str, Any]


def _read(name: str) -> Case:
    path = FIXTURES / name
    if not path.is_file():
        return {"cases": [], "inputs": {}}
    content: Case = json.loads(path.read_text(encoding="utf-8"))
    return content


def _cases(name: str, wanted: Callable[[Case], bool]) -> pytest.MarkDecorator:
    """The wanted cases as parameters; one that skips with its reason when the fixtures are not here."""
    cases = [case for case in _read(name)["cases"] if wanted(case)]
    missing = pytest.param({}, id="missing", marks=pytest.mark.skip(reason=f"no {name} in ../shared/fixtures"))
    return pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in cases] or [missing])


def _close(got: torch.Tensor, want: Any, mask: torch.Tensor | None = None) -> None:
    expected = torch.tensor(want)
    if mask is not None:
        got, expected = got * mask, expected * mask
    torch.testing.assert_close(got.detach(), expected, rtol=1e-5, atol=1e-6)


def _grpo(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = case["inputs"]
    mask = torch.tensor(inputs["response_mask"], dtype=torch.bool)
    groups = torch.tensor(inputs["index"])
    rewards = torch.tensor(inputs["token_level_rewards"]).sum(1)
    params = case["params"]
    got = grpo_advantages(rewards, groups, mask, norm_by_std=params["norm_adv_by_std_in_grpo"], epsilon=params["epsilon"])
    return got, mask, groups


@_cases("advantages.json", lambda case: case["estimator"] in GRPO)
def test_grpo_advantages(case: Case) -> None:
    got, mask, groups = _grpo(case)
    alone = (groups[:, None] == groups).sum(1) == 1
    assert not got[alone].any()
    _close(got[~alone], [row for row, single in zip(case["outputs"]["advantages"], alone, strict=True) if not single], mask[~alone])


@_cases("corrected.json", lambda case: case["kind"] == "advantage" and case["estimator"] in GRPO)
def test_corrected_advantages(case: Case) -> None:
    got, mask, _ = _grpo(case)
    want = torch.tensor(case["outputs"]["advantages"])
    _close(got, case["outputs"]["advantages"], mask)
    assert not got[(want == 0).all(1)].any()  # exactly zero: a tiny number would be blown up by Adam


@_cases("corrected.json", lambda case: case["kind"] == "zero_variance_filter")
def test_zero_variance_groups(case: Case) -> None:
    groups = case["inputs"]["groups"]
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    signal = group_signal(rewards, numbers)
    (wanted,) = case["outputs"].values()
    assert [int(not bool(signal[numbers == number].any())) for number in range(len(groups))] == wanted
