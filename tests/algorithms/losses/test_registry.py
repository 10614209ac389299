"""The registry: what each loss reads, what it refuses, and that nothing leaks a gradient or a wider type."""

import pytest
import torch

from asyncrl.algorithms.losses import POLICY_LOSSES, LossInputs, LossSpec, PolicyLoss
from tests.algorithms.losses.cases import OPTIONS, batch, inputs_of, selection


def test_options_are_the_keyword_parameters_of_loss_and_selection() -> None:
    clip = {"clip_ratio_low", "clip_ratio_high"}
    assert POLICY_LOSSES["vanilla"].options == {*clip, "clip_ratio_c"}
    assert POLICY_LOSSES["clip_cov"].options == {*clip, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"}
    assert POLICY_LOSSES["kl_cov"].options == {"kl_cov_ratio", "ppo_kl_coef"}
    assert POLICY_LOSSES["gpg"].options == set()
    assert {name: spec.required for name, spec in POLICY_LOSSES.items() if spec.required} == {"dro": {"dro_beta"}}


def test_only_losses_that_are_defined_with_one_aggregation_fix_it() -> None:
    fixed = {name: spec.aggregation for name, spec in POLICY_LOSSES.items() if spec.aggregation}
    assert fixed == {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}


def test_a_loss_of_your_own_is_a_function_in_a_spec() -> None:
    def squared(inputs: LossInputs, *, power: float = 2.0) -> PolicyLoss:
        return PolicyLoss(loss_n=inputs.log_prob_n.abs() ** power)

    spec = LossSpec(function=squared)
    inputs = inputs_of(batch(1))
    assert spec.options == {"power"}
    assert torch.equal(spec.policy_loss(inputs, {"power": 3.0, "clip_ratio_low": 1.0}).loss_n, inputs.log_prob_n.abs() ** 3)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c = 1.0 must be greater than 1"),
        ("dppo_tv", {"clip_ratio_c": 1.0}, "clip_ratio_c = 1.0 must be greater than 1"),
        ("dppo_kl", {"clip_ratio_c": 0.5}, "clip_ratio_c = 0.5 must be greater than 1"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg = 0.0 must be positive"),
        ("dro", {"dro_beta": -1.0}, "dro_beta = -1.0 must be positive"),
        ("clip_cov", {}, "clip_cov needs selected_n"),
        ("kl_cov", {}, "kl_cov needs selected_n"),
    ],
)
def test_a_value_without_a_meaning_is_refused_by_name(name: str, options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        POLICY_LOSSES[name].policy_loss(inputs_of(batch(1)), options)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_facts_are_constants_a_token_and_types_stay(name: str) -> None:
    inputs = inputs_of(batch(2), selection(name, batch(2)))
    assert inputs.is_weights_n is not None
    for dtype in (torch.float32, torch.float64):
        cast = LossInputs(
            log_prob_n=inputs.log_prob_n.to(dtype).requires_grad_(),
            old_log_prob_n=inputs.old_log_prob_n.to(dtype),
            advantages_n=inputs.advantages_n.to(dtype),
            rows_n=inputs.rows_n,
            is_weights_n=inputs.is_weights_n.to(dtype),
            selected_n=inputs.selected_n,
        )
        result = POLICY_LOSSES[name].policy_loss(cast, OPTIONS[name])
        assert result.loss_n.dtype == dtype
        assert result.loss_n.requires_grad
        for fact_n in result.facts.values():
            assert (fact_n.shape, fact_n.dtype, fact_n.requires_grad) == (inputs.rows_n.shape, dtype, False)
