"""An estimator or a loss of the user that is wrong is named: before the run where that can be seen, else at the step."""

from pathlib import Path

import pytest
import torch

from asyncrl.algorithms.advantages.inputs import AdvantageInputs
from asyncrl.chosen import check_choices, chosen_estimator, chosen_loss
from asyncrl.config import AlgorithmConfig, TrainRun, parse_run
from asyncrl.errors import AlgorithmError, ConfigError

ESTIMATOR = """
import torch
from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.advantages.registry import Estimator
def right(inputs):
    found = inputs.rewards_BR.sum(1, keepdim=True) * inputs.mask_BR
    return Advantages(advantages_BR=found, returns_BR=found)
def nothing(inputs): return None
def rows(inputs): return Advantages(advantages_BR=inputs.rewards_BR.sum(1), returns_BR=inputs.rewards_BR)
def wide(inputs): return Advantages(advantages_BR=inputs.rewards_BR.double(), returns_BR=inputs.rewards_BR)
def not_finite(inputs): return Advantages(advantages_BR=inputs.rewards_BR / 0, returns_BR=inputs.rewards_BR)
def raises(inputs): raise KeyError("one\\ntwo")
def leaves(inputs): raise SystemExit(1)
def takes_nothing(): pass
parts = Estimator(function=right, needs=frozenset({"components"}))
olds = Estimator(function=right, needs=frozenset({"old_log_probs"}))
def not_finite_without_signal(inputs):
    return Advantages(advantages_BR=inputs.rewards_BR / inputs.rewards_BR.sum(), returns_BR=inputs.rewards_BR)
"""
LOSS = """
import torch
from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss
from asyncrl.algorithms.losses.registry import LossSpec
def plain(inputs): return -inputs.advantages_n * inputs.log_prob_n
def scalar(inputs): return PolicyLoss(loss_n=plain(inputs).sum())
def flat(inputs): return PolicyLoss(loss_n=-inputs.advantages_n)
def wide(inputs): return PolicyLoss(loss_n=plain(inputs).double())
def number(inputs): return PolicyLoss(loss_n=plain(inputs), facts={"mine": 1.0})
def taken(inputs): return PolicyLoss(loss_n=plain(inputs), facts={"loss": inputs.advantages_n})
def raises(inputs): raise RuntimeError("no")
picks = LossSpec(function=lambda inputs: PolicyLoss(loss_n=plain(inputs)), select=lambda p, q, a, *, generator: a)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_estimators.py").write_text(ESTIMATOR, encoding="utf-8")
    (tmp_path / "own_losses.py").write_text(LOSS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def run_with(**keys: object) -> TrainRun:
    sections: dict[str, dict[str, object]] = {"algorithm": {}, "actor": {}}
    for key, value in keys.items():
        section, _, name = key.partition("__")
        sections[section][name] = value
    return parse_run(TrainRun, {"data": {"train_files": "rows.jsonl"}, "model": {"path": "m"}, **sections})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":right", "algorithm.adv_estimator = ':right' is not of the form module:function"),
        ("own_estimators:", "algorithm.adv_estimator = 'own_estimators:' is not of the form module:function"),
        ("builtins:dict", "algorithm.adv_estimator = 'builtins:dict' does not tell its parameters"),
        ("own_estimators:nothing", "estimator 'own_estimators:nothing' returned a NoneType; it must be Advantages("),
        (
            "own_estimators:rows",
            "returned advantages_BR=a tensor [4] of torch.float32; it must be a tensor [4, 3] of torch.float32",
        ),
        ("own_estimators:wide", "returned advantages_BR=a tensor [4, 3] of torch.float64; it must be a tensor [4, 3] of torch.fl"),
        ("own_estimators:not_finite", "returned advantages_BR that is not finite on every policy token"),
        ("own_estimators:raises", "estimator 'own_estimators:raises' raised KeyError: 'one\\ntwo' (own_estimators.py:"),
        ("own_estimators:leaves", "estimator 'own_estimators:leaves' raised SystemExit: 1"),
        ("own_estimators:takes_nothing", "estimator 'own_estimators:takes_nothing' raised TypeError: takes_nothing() takes 0"),
        ("own_estimators:olds", "algorithm.adv_estimator = 'own_estimators:olds' needs old_log_probs, which nothing in this run"),
    ],
)
def test_an_estimator_that_cannot_be_used_is_told_before_the_run(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_choices(run_with(algorithm__adv_estimator=name))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_estimator_that_needs_components_reads_their_names() -> None:
    check_choices(run_with(algorithm__adv_estimator="own_estimators:parts", algorithm__gdpo_reward_keys=["right"]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "loss 'own_losses:plain' returned a tensor [3] of torch.float32; it must be PolicyLoss("),
        ("scalar", "returned loss_n=a tensor [] of torch.float32; it must be a tensor [3] of torch.float32"),
        ("flat", "returned loss_n without a gradient; it must be made of log_prob_n"),
        ("wide", "returned loss_n=a tensor [3] of torch.float64; it must be a tensor [3] of torch.float32"),
        ("number", "returned facts['mine']=a float; it must be a tensor [3], one a token"),
        ("taken", "returned a fact 'loss', which the update tells itself; give it another name"),
        ("raises", "loss 'own_losses:raises' raised RuntimeError: no (own_losses.py:"),
        ("picks", "loss 'own_losses:picks' selected a tensor [3] of torch.float32; it must be a bool tensor [3], one a token"),
    ],
)
def test_a_loss_that_cannot_be_used_is_told_before_the_run(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen_loss(run_with(actor__loss_mode=f"own_losses:{name}"))
    assert message in str(caught.value)


def test_an_estimator_that_is_not_finite_in_one_step_is_named() -> None:
    chosen = chosen_estimator(AlgorithmConfig(adv_estimator="own_estimators:not_finite_without_signal"))
    nothing = torch.zeros(2, 2)
    inputs = AdvantageInputs(rewards_BR=nothing, mask_BR=nothing == 0, groups_B=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(
        AlgorithmError, match="estimator 'own_estimators:not_finite_without_signal' returned advantages_BR that is not"
    ):
        chosen(inputs)
