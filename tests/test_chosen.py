"""The chosen estimator, loss and correction: what the tables of the configuration say is what the functions take."""

import inspect
from typing import Any

import pytest

from asyncrl.algorithms.advantages.registry import ESTIMATORS
from asyncrl.algorithms.losses.registry import POLICY_LOSSES
from asyncrl.chosen import chosen_correction, chosen_estimator, chosen_loss
from asyncrl.config import ActorConfig, AlgorithmConfig, TrainRun, parse_run
from asyncrl.config import algorithms as tables
from asyncrl.errors import ConfigError


def run_with(algorithm: dict[str, Any] | None = None, actor: dict[str, Any] | None = None) -> TrainRun:
    tree = {"data": {"train_files": "rows.jsonl"}, "model": {"path": "m"}, "algorithm": algorithm or {}, "actor": actor or {}}
    return parse_run(TrainRun, tree)


def test_the_configuration_knows_the_options_of_every_function() -> None:
    assert {name: set(each.options) for name, each in ESTIMATORS.items()} == {
        name: reads.keys | reads.options for name, reads in tables.ESTIMATORS.items()
    }
    losses = {name: set(spec.options) for name, spec in POLICY_LOSSES.items() if name != "reinforce"}
    assert losses == {name: reads.keys | reads.options for name, reads in tables.LOSSES.items()}
    for functions, reads_of in ((ESTIMATORS, tables.ESTIMATORS), (POLICY_LOSSES, tables.LOSSES)):
        assert {name: reads.required for name, reads in reads_of.items()} == {name: functions[name].required for name in reads_of}


def test_keys_are_of_the_section_and_further_options_are_not() -> None:
    for reads, section in ((tables.ESTIMATORS, AlgorithmConfig), (tables.LOSSES, ActorConfig)):
        for each in reads.values():
            assert each.keys <= set(section.model_fields)
            assert not each.options & set(section.model_fields)


def test_the_configuration_knows_the_losses_with_one_aggregation() -> None:
    fixed = {name: spec.aggregation for name, spec in POLICY_LOSSES.items() if spec.aggregation}
    assert fixed == tables.FIXED_AGGREGATION


def test_defaults_of_the_configuration_are_those_of_the_functions() -> None:
    config = AlgorithmConfig()
    for each in ESTIMATORS.values():
        for name, default in each.options.items():
            if name in AlgorithmConfig.model_fields:
                got = getattr(config, name)
                assert (tuple(got) if isinstance(got, list) else got) == default, name


def test_a_key_of_the_section_reaches_the_function() -> None:
    loss = chosen_loss(run_with(actor={"loss_mode": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.3}))
    assert (loss.spec, loss.options) == (POLICY_LOSSES["gspo"], {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3})
    estimator = chosen_estimator(AlgorithmConfig(adv_estimator="gae", gamma=0.9))
    assert estimator.options == {"gamma": 0.9, "lam": 1.0}


@pytest.mark.parametrize(("loss", "cap"), [("vanilla", 3.0), ("dppo_tv", 20.0), ("dppo_kl", 20.0)])
def test_the_cap_of_the_ratio_is_the_losses_own_unless_it_is_set(loss: str, cap: float) -> None:
    assert "clip_ratio_c" not in chosen_loss(run_with(actor={"loss_mode": loss})).options
    assert inspect.signature(POLICY_LOSSES[loss].function).parameters["clip_ratio_c"].default == cap
    assert chosen_loss(run_with(actor={"loss_mode": loss, "clip_ratio_c": 5.0})).options["clip_ratio_c"] == 5.0


def test_a_further_option_reaches_the_function_and_others_keep_their_defaults() -> None:
    assert chosen_loss(run_with(actor={"loss_mode": "sapo", "loss_options": {"tau_pos": 2.0}})).options == {"tau_pos": 2.0}
    assert chosen_loss(run_with(actor={"loss_mode": "sapo"})).options == {}


@pytest.mark.parametrize(
    ("algorithm", "actor", "message"),
    [
        ({}, {"loss_mode": "dro", "loss_options": {"dro_beta": -1.0}}, "dro_beta"),
        ({}, {"clip_ratio_c": 0.5}, "clip_ratio_c"),
        ({}, {"loss_mode": "clip_cov", "loss_options": {"clip_cov_ratio": -0.1}}, "clip_cov_ratio = -0.1 must be a share"),
        ({}, {"loss_mode": "clip_cov", "loss_options": {"clip_cov_lb": 6.0}}, "clip_cov_lb = 6.0 must be less than clip_cov_ub"),
        ({}, {"loss_mode": "kl_cov", "loss_options": {"kl_cov_ratio": 2.0}}, "kl_cov_ratio = 2.0 must be a share"),
        ({"adv_estimator": "gpg", "adv_options": {"gpg_f_norm": 0.0}}, {}, "gpg_f_norm"),
        ({"adv_estimator": "gpg", "adv_options": {"gpg_f_norm": "much"}}, {}, "gpg_f_norm"),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"], "adv_options": {"gdpo_reward_weights": [1.0]}},
            {},
            "gdpo_reward_weights",
        ),
    ],
)
def test_a_value_that_the_function_refuses_is_told_before_the_run(
    algorithm: dict[str, Any], actor: dict[str, Any], message: str
) -> None:
    run = run_with(algorithm, actor)
    with pytest.raises(ConfigError, match=message) as caught:
        (chosen_estimator(run.algorithm), chosen_loss(run))
    assert "\n" not in str(caught.value)


def test_the_correction_is_that_of_the_configuration() -> None:
    section = {"rollout_is": "token", "rollout_is_threshold": "0.5_2", "rollout_rs": ["token_k2", "seq_sum_k1"]}
    run = run_with({"rollout_correction": {**section, "rollout_rs_threshold": [0.1, "0.5_2"]}})
    options = chosen_correction(run.algorithm)
    assert (options.rollout_is, options.rollout_is_threshold) == ("token", "0.5_2")
    assert [(each.name, round(each.high, 3)) for each in options.rejections] == [("token_k2", 0.1), ("seq_sum_k1", 0.693)]
    assert chosen_correction(AlgorithmConfig()).rollout_is is None


def test_what_the_correction_refuses_is_told_with_its_section() -> None:
    run = run_with({"rollout_correction": {"rollout_rs": ["token_k1"], "rollout_rs_threshold": [0.5]}})
    with pytest.raises(ConfigError, match=r"^algorithm\.rollout_correction: .*token_k1"):
        chosen_correction(run.algorithm)


def test_reinforce_against_the_engine_takes_the_place_of_the_loss() -> None:
    loss = chosen_loss(run_with({"old_log_probs": "bypass", "rollout_correction": {"loss_type": "reinforce"}}))
    assert loss.spec is POLICY_LOSSES["reinforce"]
