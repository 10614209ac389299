"""Each check of losses, KL and values passes on right numbers and fails on wrong ones; and all stored cases pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms.check_losses import CHECKS
from asyncrl.algorithms.checking import Case

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"


def _stored(check: str) -> list[dict[str, Any]]:
    """The cases of a file and kind, with their inputs."""
    file, _, kind = check.partition("/")
    path = FIXTURES / f"{file}.json"
    if not path.is_file():
        pytest.skip(f"no {file}.json in ../shared/fixtures")
    stored = json.loads(path.read_text(encoding="utf-8"))
    cases = [raw for raw in stored["cases"] if raw.get("kind", "") == kind]
    return [raw if isinstance(raw["inputs"], dict) else raw | {"inputs": stored["inputs"][raw["inputs"]]} for raw in cases]


def _case(raw: dict[str, Any]) -> Case:
    return Case(
        id=raw.get("id", ""),
        kind=raw.get("kind", ""),
        params=raw.get("params") or {},
        inputs=raw["inputs"],
        outputs=raw["outputs"],
        raw=raw,
    )


@pytest.mark.parametrize("check", CHECKS)
def test_stored_cases(check: str) -> None:
    found = {raw["id"]: list(CHECKS[check](_case(raw))) for raw in _stored(check)}
    assert found
    assert all(found.values())
    assert [f"{name}: {each.what}" for name, compared in found.items() for each in compared if not each.passed] == []


LOSS_CASE: dict[str, Any] = {
    "loss_mode": "vanilla",
    "loss_agg_mode": "token-mean",
    "params": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0},
    "use_rollout_is_weights": True,
    "global": {"dp_size": 2, "batch_num_tokens": 4, "global_batch_size": 2, "loss_scale_factor": 100},
    "inputs": {
        "log_prob": [[-1.0, -2.0], [-1.0, -3.0]],
        "old_log_prob": [[-1.0, -2.0], [-1.0, -1.0]],
        "advantages": [[1.0, -1.0], [2.0, 9.0]],
        "response_mask": [[1, 1], [1, 0]],
        "rollout_is_weights": [[1.0, 0.5], [0.25, 7.0]],
    },
    "outputs": {
        "loss": 2 * (-1.0 + 0.5 - 0.5) / 4,
        "grad_log_prob": [[-0.5, 0.25], [-0.25, 0.0]],
        "metrics": {"pg_clipfrac": 0.0, "ppo_kl": 0.0, "pg_clipfrac_lower": 0.0},
    },
}
VALUE_CASE: dict[str, Any] = {
    "kind": "value_loss",
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "global": None,
    "params": {"cliprange_value": 0.5},
    "inputs": {"vpreds": [[1.0, 2.0]], "values": [[1.0, 1.0]], "returns": [[3.0, 3.0]], "response_mask": [[1, 1]]},
    "outputs": {"vf_loss": 0.5 * (4 + 2.25) / 2, "vf_clipfrac": 0.5, "grad_vpreds": [[-1.0, 0.0]]},
}
NORM_CASE: dict[str, Any] = {
    "kind": "agg_loss",
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "global": {"dp_size": 2, "batch_num_tokens": 4, "global_batch_size": 5, "loss_scale_factor": 100},
    "inputs": {"loss_mat": [[1.0, 2.0], [3.0, 9.0]], "loss_mask": [[1, 1], [1, 0]]},
    "outputs": {"loss": 2 * 6 / 500, "grad": [[0.004, 0.004], [0.004, 0.0]]},
}
CONTROLLER_CASE: dict[str, Any] = {
    "kind": "controller",
    "params": {"type": "adaptive", "kl_coef": 1.0, "target_kl": 1.0, "horizon": 10},
    "inputs": {"current_kl": [2.0, 0.0], "n_steps": [10, 5]},
    "outputs": {"coef_after": [1.2, 1.08]},
}


@pytest.mark.parametrize(
    ("check", "raw"),
    [
        ("policy_losses", LOSS_CASE),
        ("values/value_loss", VALUE_CASE),
        ("values/agg_loss", NORM_CASE),
        ("kl/controller", CONTROLLER_CASE),
    ],
)
def test_a_right_case_passes_and_each_wrong_number_is_found(check: str, raw: dict[str, Any]) -> None:
    found = list(CHECKS[check](_case(raw)))
    assert [each.what for each in found if not each.passed] == []
    for name in raw["outputs"]:
        wrong = raw | {"outputs": raw["outputs"] | {name: _moved(raw["outputs"][name])}}
        assert not all(each.passed for each in CHECKS[check](_case(wrong))), name


def _moved(numbers: Any) -> Any:
    """Each number a little larger."""
    if isinstance(numbers, dict):
        return {name: value + 1e-3 for name, value in numbers.items()}
    return (torch.tensor(numbers, dtype=torch.float64) + 1e-3).tolist()


def test_the_global_random_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    options = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.0, "clip_cov_ub": 50.0}
    list(CHECKS["policy_losses"](_case(LOSS_CASE | {"loss_mode": "clip_cov", "params": options})))
    assert torch.equal(torch.random.get_rng_state(), before)
