"""What estimators say of themselves: the columns they need, the options that have an effect; and inputs that do not fit."""

import inspect

import pytest
import torch

from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.advantages.registry import ESTIMATORS, OPTIONAL_COLUMNS, Estimator


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_an_estimator_needs_is_asked_for(name: str) -> None:
    estimator, mask = ESTIMATORS[name], torch.ones(2, 3, dtype=torch.bool)
    bare = AdvantageInputs(rewards_BR=torch.rand(2, 3), mask_BR=mask, groups_B=torch.tensor([0, 0]))
    if not estimator.needs:
        assert estimator(bare).advantages_BR.shape == (2, 3)
        return
    with pytest.raises(ValueError, match="needs (" + "|".join(estimator.needs) + ")"):
        estimator(bare)


def test_options_are_the_keyword_parameters_with_their_defaults() -> None:
    assert dict(ESTIMATORS["gae"].options) == {"gamma": 1.0, "lam": 1.0}
    assert not ESTIMATORS["rloo"].options
    assert list(ESTIMATORS["gdpo"].options) == ["norm_adv_by_std_in_grpo", "gdpo_reward_keys", "gdpo_reward_weights"]


def test_an_estimator_of_ones_own_says_what_it_needs() -> None:
    def mine(inputs: AdvantageInputs, *, strength: float = 2.0) -> Advantages:
        return Advantages(advantages_BR=inputs.rewards_BR * strength, returns_BR=inputs.rewards_BR)

    estimator = Estimator(function=mine, needs=frozenset({"values"}))
    assert dict(estimator.options) == {"strength": 2.0}
    with pytest.raises(ValueError, match="needs glory; there are only components"):
        Estimator(function=mine, needs=frozenset({"glory"}))


def test_needs_are_names_of_optional_columns() -> None:
    parameters = inspect.signature(AdvantageInputs).parameters.values()
    optional = {each.name.removesuffix("_BR").removesuffix("_B") for each in parameters if each.default is None}
    assert optional == OPTIONAL_COLUMNS


def test_shapes_that_do_not_fit_are_told() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    rewards, groups = torch.zeros(2, 3), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"mask_BR is torch.int64; it must be bool"):
        AdvantageInputs(rewards_BR=rewards, mask_BR=mask.long(), groups_B=groups)
    with pytest.raises(ValueError, match=r"groups_B has shape \(3,\); with rewards_BR \(2, 3\) it must be \(2,\)"):
        AdvantageInputs(rewards_BR=rewards, mask_BR=mask, groups_B=torch.zeros(3))
    with pytest.raises(ValueError, match=r"components\['a'\] has shape \(2, 3\)"):
        AdvantageInputs(rewards_BR=rewards, mask_BR=mask, groups_B=groups, components={"a": rewards})
