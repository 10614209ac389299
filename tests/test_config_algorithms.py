"""Configuration of the algorithms: what does not belong to the chosen one is refused by name."""

import pytest

from asyncrl.config import TrainRun, idle_keys, parse_run
from asyncrl.preflight import describe_batch
from tests.test_config import Tree, refusal, tree


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm__adv_estimator": "gpro"}, "algorithm.adv_estimator = 'gpro' is neither one of grpo, gae, "),
        ({"algorithm__adv_estimator": "gpro"}, "; did you mean grpo?"),
        ({"actor__loss_mode": "gsop"}, "actor.loss_mode = 'gsop' is neither one of vanilla, gspo, "),
        ({"algorithm__adv_estimator": "rloo", "algorithm__norm_adv_by_std_in_grpo": True}, 'algorithm.adv_estimator is "rloo"'),
        ({"algorithm__lam": 0.9}, 'algorithm.lam has no effect because algorithm.adv_estimator is "grpo"'),
        ({"actor__loss_mode": "gpg", "actor__clip_ratio_high": 0.2}, "actor.clip_ratio_high has no effect because"),
        (
            {"actor__loss_mode": "sapo", "actor__loss_agg_mode": "token-mean"},
            "actor.loss_agg_mode has no effect because actor.loss",
        ),
        ({"actor__loss_options": {"tau_pos": 1.0}}, "actor.loss_options.tau_pos is no option of 'vanilla'; its own: none"),
        (
            {"actor__loss_mode": "sapo", "actor__loss_options": {"tau_po": 1.0}},
            "actor.loss_options.tau_po is no option of 'sapo'; its own: tau_neg, tau_pos; did you mean tau_pos?",
        ),
        ({"algorithm__adv_options": {"gpg_f_norm": 2.0}}, "algorithm.adv_options.gpg_f_norm is no option of 'grpo'"),
        ({"algorithm__adv_estimator": "gdpo"}, 'algorithm.adv_estimator = "gdpo" needs algorithm.gdpo_reward_keys'),
        ({"actor__loss_mode": "dro"}, "actor.loss_mode = 'dro' needs actor.loss_options.dro_beta; it has no default"),
        (
            {"algorithm__adv_estimator": "optimal_token_baseline", "algorithm__old_log_probs": "bypass"},
            "algorithm.old_log_probs = \"bypass\" leaves out the forward pass that 'optimal_token_baseline' takes",
        ),
        (
            {"algorithm__adv_estimator": "gdpo", "algorithm__gdpo_reward_keys": "format", "algorithm__use_kl_in_reward": True},
            'algorithm.use_kl_in_reward has no effect because algorithm.adv_estimator is "gdpo", whose advantages',
        ),
        (
            {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl": {"type": "adaptive", "kl_coef": 0.0}},
            'algorithm.kl_ctrl: kl_coef = 0 stays 0 with type = "adaptive"',
        ),
        (
            {
                "algorithm__old_log_probs": "bypass",
                "algorithm__rollout_correction__loss_type": "reinforce",
                "actor__loss_mode": "dro",
            },
            'actor.loss_mode has no effect because algorithm.rollout_correction.loss_type is "reinforce"',
        ),
        (
            {
                "algorithm__adv_estimator": "gdpo",
                "algorithm__gdpo_reward_keys": "format",
                "reward__manager": "dapo",
                "reward__overlong_buffer_len": 9,
            },
            "add \"overlong_reward\" to algorithm.gdpo_reward_keys = ['format']",
        ),
        (
            {"algorithm__adv_estimator": "gdpo", "algorithm__gdpo_reward_keys": ["a", "b", "a"]},
            "algorithm.gdpo_reward_keys = ['a', 'b', 'a']: name each component once",
        ),
        ({"algorithm__filter_groups": True, "rollout__n": 1}, "algorithm.filter_groups with rollout.n = 1 drops every group"),
        (
            {
                "algorithm__old_log_probs": "bypass",
                "algorithm__rollout_correction__loss_type": "reinforce",
                "actor__clip_ratio_low": 0.2,
            },
            'actor.clip_ratio_low has no effect because algorithm.rollout_correction.loss_type is "reinforce"',
        ),
        (
            {"algorithm__rollout_correction__rollout_is": "token", "algorithm__rollout_correction__rollout_is_threshold": "2_1"},
            "rollout_is_threshold = '2_1': give a number u > 0, or a band",
        ),
        (
            {
                "algorithm__rollout_correction__rollout_rs": ["token_k2", "seq_sum_k1"],
                "algorithm__rollout_correction__rollout_rs_threshold": [1.0, 2.0, 3.0],
            },
            "rollout_rs_threshold = [1.0, 2.0, 3.0]: give one threshold, or one for each of",
        ),
        (
            {
                "algorithm__rollout_correction__rollout_rs": ["token_k2"],
                "algorithm__rollout_correction__rollout_rs_threshold": ["0.5_2"],
            },
            "rollout_rs_threshold: '0.5_2' of token_k2 is not a number u > 0",
        ),
        ({"algorithm__rollout_correction__rollout_rs": ["token_k2"]}, "rollout_rs_threshold = []: give one threshold"),
        ({"algorithm__rollout_correction__rollout_rs": ["token_k4"]}, "algorithm.rollout_correction.rollout_rs.0 = 'token_k4'"),
    ],
)
def test_what_does_not_belong_to_the_chosen_algorithm_is_refused(settings: Tree, message: str) -> None:
    assert message in refusal(tree(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm__adv_estimator": "my_module:mine", "algorithm__lam": 0.9, "algorithm__adv_options": {"own": 1.0}},
        {"actor__loss_mode": "my_module:mine", "actor__clip_ratio_c": 2.0, "actor__loss_options": {"own": 1.0}},
        {"actor__loss_mode": "sapo", "actor__loss_options": {"tau_pos": 1.5}},
        {"algorithm__adv_estimator": "gdpo", "algorithm__gdpo_reward_keys": "format"},
    ],
)
def test_options_of_the_chosen_algorithm_are_taken(settings: Tree) -> None:
    run = parse_run(TrainRun, tree(**settings))
    assert parse_run(TrainRun, idle_keys.resolved(run)) == run


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm__use_kl_in_reward": True},
        {"algorithm__rollout_correction__rollout_is": "token"},
        {"algorithm__adv_estimator": "optimal_token_baseline"},
    ],
)
def test_what_asks_for_old_log_probs_gets_them(settings: Tree) -> None:
    assert parse_run(TrainRun, tree(**settings)).old_log_probs == "recompute"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "left out: one update a batch, so the ratio of the loss is 1, and its clips never act"),
        ({"actor__ppo_epochs": 2}, "a forward pass before the first update"),
        ({"algorithm__old_log_probs": "bypass"}, "the engine's own"),
    ],
)
def test_a_dry_run_says_where_old_log_probs_come_from(settings: Tree, told: str) -> None:
    lines = describe_batch(parse_run(TrainRun, tree(**settings)), num_rows=64).splitlines()
    assert f"# old_log_probs       {told}" in lines
