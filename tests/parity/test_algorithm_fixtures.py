"""Our algorithms against stored numbers of verl 0.9.1 (`../shared/fixtures`), as far as they are built.

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
from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.kl import kl_penalty
from asyncrl.algorithms.losses import ppo_clip_loss
from asyncrl.algorithms.token_log_probs import logits_log_probs

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
ESTIMATORS = ("kl", "k2", "low_var_kl")
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


@_cases("policy_losses.json", lambda case: case["loss_mode"] == "vanilla" and case["loss_agg_mode"] in MODES)
def test_clipped_policy_loss(case: Case) -> None:
    table = _read("policy_losses.json")["inputs"][case["inputs"]]
    mask = torch.tensor(table["response_mask"], dtype=torch.bool)
    log_prob = torch.tensor(table["log_prob"], requires_grad=True)
    terms = ppo_clip_loss(log_prob, torch.tensor(table["old_log_prob"]), torch.tensor(table["advantages"]), **case["params"])
    per_token = terms.loss * torch.tensor(table["rollout_is_weights"]) if case["use_rollout_is_weights"] else terms.loss
    totals = case["global"] or {}
    weights = token_weights(
        mask, case["loss_agg_mode"], num_tokens=totals.get("batch_num_tokens"), num_rows=totals.get("global_batch_size")
    )
    loss = torch.where(mask, per_token * weights, 0).sum() * totals.get("dp_size", 1)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    _close(loss, case["outputs"]["loss"])
    _close(gradient, case["outputs"]["grad_log_prob"], mask)
    metrics = case["outputs"]["metrics"]
    _close(terms.is_clipped[mask].float().mean(), metrics["pg_clipfrac"])
    _close(terms.is_clipped_lower[mask].float().mean(), metrics["pg_clipfrac_lower"])
    _close(-terms.log_ratio[mask].mean(), metrics["ppo_kl"])


@_cases("kl.json", lambda case: case["kind"] == "penalty" and case["estimator"] in ESTIMATORS)
def test_kl_estimators(case: Case) -> None:
    log_prob = torch.tensor(case["inputs"]["logprob"], requires_grad=True)
    value = kl_penalty(log_prob, torch.tensor(case["inputs"]["ref_logprob"]), case["estimator"])
    (gradient,) = torch.autograd.grad(value.sum(), log_prob)
    _close(value, case["outputs"]["value"])
    _close(gradient, case["outputs"]["grad_logprob"])


@_cases("kl.json", lambda case: case["kind"] == "loss" and case["estimator"] in ESTIMATORS and case["loss_agg_mode"] in MODES)
def test_kl_losses(case: Case) -> None:
    mask = torch.tensor(case["inputs"]["response_mask"], dtype=torch.bool)
    log_prob = torch.tensor(case["inputs"]["logprob"], requires_grad=True)
    penalty = kl_penalty(log_prob, torch.tensor(case["inputs"]["ref_logprob"]), case["estimator"])
    loss = (penalty * token_weights(mask, case["loss_agg_mode"])).sum()
    (gradient,) = torch.autograd.grad(loss, log_prob)
    _close(loss, case["outputs"]["loss"])
    _close(gradient, case["outputs"]["grad_logprob"], mask)


@_cases("values.json", lambda case: case["kind"] == "agg_loss" and case["loss_agg_mode"] in MODES)
def test_aggregation(case: Case) -> None:
    mask = torch.tensor(case["inputs"]["loss_mask"], dtype=torch.bool)
    values = next(tensor for name, tensor in case["inputs"].items() if name != "loss_mask")
    loss = torch.tensor(values, requires_grad=True)
    totals = case.get("global") or {}
    weights = token_weights(
        mask, case["loss_agg_mode"], num_tokens=totals.get("batch_num_tokens"), num_rows=totals.get("global_batch_size")
    )
    total = (loss * weights).sum() * totals.get("dp_size", 1)
    (gradient,) = torch.autograd.grad(total, loss)
    _close(total, case["outputs"]["loss"])
    _close(gradient, case["outputs"]["grad"], mask)


@_cases("values.json", lambda case: case["kind"] == "entropy" and case["loss_agg_mode"] in MODES)
def test_entropy_and_log_probs(case: Case) -> None:
    inputs, outputs = case["inputs"], case["outputs"]
    logits = torch.tensor(inputs["logits"], requires_grad=True)
    labels = torch.tensor(inputs["labels"])
    mask = torch.tensor(inputs["response_mask"], dtype=torch.bool)
    log_probs, entropy = logits_log_probs(logits.flatten(0, 1), labels.flatten())
    entropy = entropy.view(labels.shape)
    total = (entropy * token_weights(mask, case["loss_agg_mode"])).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    _close(log_probs.view(labels.shape), outputs["log_prob"], mask)
    _close(entropy, outputs["token_entropy"], mask)
    _close(total, outputs["entropy"])
    _close(gradient, outputs["grad_logits"], mask[..., None])
