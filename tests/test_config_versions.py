"""What follows from the mode of a run: how old tokens may be, what corrects them, and which keys belong together."""

from typing import Any

import pytest

from asyncrl.config import TrainRun, idle_keys, parse_run
from asyncrl.config.simulation import Scenario
from asyncrl.errors import ConfigError
from asyncrl.preflight import describe_batch

ASYNC = {"mode": "async"}


def run_with(**sections: dict[str, Any]) -> TrainRun:
    return parse_run(TrainRun, {"data": {"train_files": "rows.jsonl"}, "model": {"path": "model"}, **sections})


def refusal(**sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        run_with(**sections)
    return str(caught.value).removeprefix("configuration: ")


# --- versions ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "max_staleness", "is_off_policy"),
    [
        ({}, 0, False),
        ({"publish_freq": 2}, 0, True),  # the second step of a version is trained by other weights than have sampled it
        (ASYNC, 1, True),
        ({**ASYNC, "max_staleness": 3}, 3, True),
        ({**ASYNC, "max_staleness": 0}, 0, False),
        ({**ASYNC, "max_staleness": 0, "publish_freq": 2}, 0, True),
    ],
)
def test_how_old_a_token_may_be(trainer: dict[str, Any], max_staleness: int, is_off_policy: bool) -> None:
    run = run_with(trainer=trainer)
    assert (run.max_staleness, run.publish_freq, run.is_off_policy) == (
        max_staleness,
        trainer.get("publish_freq", 1),
        is_off_policy,
    )


def test_checkpoints_fall_on_steps_that_publish() -> None:
    assert refusal(trainer={"publish_freq": 3}) == (
        "trainer.save_freq = 20 is not a multiple of trainer.publish_freq = 3: checkpoints fall on steps after which weights are "
        "published; set it to 21"
    )
    assert refusal(trainer={"publish_freq": 4, "save_freq": 2}).endswith("set it to 4")
    for save_freq in (0, 3, 21):
        assert run_with(trainer={"publish_freq": 3, "save_freq": save_freq}).trainer.save_freq == save_freq


def test_two_checkpoints_are_kept_at_least() -> None:
    assert refusal(trainer={"max_ckpt_to_keep": 1}) == "trainer.max_ckpt_to_keep = 1: input should be greater than or equal to 2"


def test_a_group_may_take_as_long_as_one_session() -> None:
    assert refusal(agent={"timeout_s": 7200}) == (
        "agent.group_timeout_s = 3600 is less than agent.timeout_s = 7200: a group lasts as long as its longest session"
    )
    assert run_with(agent={"timeout_s": 7200, "group_timeout_s": 7200}).agent.group_timeout_s == 7200


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        ({}, "4, one a training step; no token is behind"),
        ({**ASYNC, "max_staleness": 2}, "4, one a training step; tokens are 2 behind at most"),
        ({**ASYNC, "publish_freq": 2}, "2, one every 2 training steps; tokens are 1 behind at most"),
    ],
)
def test_a_dry_run_says_how_old_tokens_may_be(trainer: dict[str, Any], told: str) -> None:
    lines = describe_batch(run_with(trainer=trainer), num_rows=64).splitlines()
    assert f"# weight versions     {told}" in lines


# --- correction -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [{}, {"rollout_correction": {"rollout_is_threshold": 3.0}}])
@pytest.mark.parametrize("trainer", [ASYNC, {"publish_freq": 2}])
def test_tokens_of_other_weights_are_weighed_unless_something_was_chosen(
    trainer: dict[str, Any], algorithm: dict[str, Any]
) -> None:
    run = run_with(trainer=trainer, algorithm=algorithm)
    correction = run.algorithm.rollout_correction
    assert (correction.rollout_is, correction.is_on, run.old_log_probs) == ("token", True, "recompute")
    assert correction.rollout_is_threshold == algorithm.get("rollout_correction", {}).get("rollout_is_threshold", 2.0)


@pytest.mark.parametrize(
    ("algorithm", "rollout_is"),
    [
        ({"rollout_correction": {"rollout_is": "none"}}, "none"),
        ({"rollout_correction": {"rollout_is": "sequence"}}, "sequence"),
        ({"rollout_correction": {"rollout_rs": ["token_k2"], "rollout_rs_threshold": [0.5]}}, "none"),
        ({"old_log_probs": "bypass"}, "none"),
    ],
)
def test_what_the_user_has_chosen_stays(algorithm: dict[str, Any], rollout_is: str) -> None:
    assert run_with(trainer=ASYNC, algorithm=algorithm).algorithm.rollout_correction.rollout_is == rollout_is


def test_nothing_is_weighed_where_all_tokens_are_of_the_weights_that_train() -> None:
    for trainer in ({}, {**ASYNC, "max_staleness": 0}):
        run = run_with(trainer=trainer)
        assert (run.algorithm.rollout_correction.rollout_is, run.old_log_probs) == ("none", "elide")


def test_the_default_is_written_down_and_is_nobody_elses() -> None:
    """It is in the run's folder, loads again, counts as no choice of the user's, and does not leak into other runs."""
    run = run_with(trainer=ASYNC)
    tree = idle_keys.resolved(run)
    assert tree["algorithm"]["rollout_correction"]["rollout_is"] == "token"
    assert parse_run(TrainRun, tree) == run
    assert "algorithm" not in run.model_dump(exclude_unset=True)
    section = {"norm_adv_by_std_in_grpo": False, "rollout_correction": {"rollout_is_threshold": 3.0}}
    given = run_with(trainer=ASYNC, algorithm=section).model_dump(exclude_unset=True)
    assert given["algorithm"] == section
    assert run_with().algorithm.rollout_correction.rollout_is == "none"


# --- combinations -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"eval": {"where": "snapshot"}}, "eval.where has no effect because data.val_files is empty"),
        ({"trainer": {"max_staleness": 2}}, 'trainer.max_staleness has no effect because trainer.mode is "sync"'),
        ({"rollout": {"in_flight_updates": False}}, 'rollout.in_flight_updates has no effect because trainer.mode is "sync"'),
        (
            {"replay": {"failed_groups": "abort", "quarantine_after": 0}},
            'replay.quarantine_after has no effect because replay.failed_groups is "abort"',
        ),
        (
            {"store": {"journal": False}, "trainer": {"max_step_tries": 3}},
            "trainer.max_step_tries has no effect because store.journal is false",
        ),
    ],
)
def test_keys_of_the_other_mode_are_refused(sections: dict[str, Any], message: str) -> None:
    assert refusal(**sections).startswith(message)


@pytest.mark.parametrize(
    "sections",
    [
        {"store": {"journal": False}},  # only --resume needs it
        {"eval": {"where": "snapshot"}, "data": {"train_files": "rows.jsonl", "val_files": "held_out.jsonl"}},
        {"rollout": {"in_flight_updates": False}},
        {"replay": {"failed_groups": "train_partial"}, "algorithm": {"adv_estimator": "remax"}},
    ],
)
def test_async_goes_with(sections: dict[str, Any]) -> None:
    assert run_with(trainer=ASYNC, **sections).max_staleness == 1


def test_a_scenario_has_the_modes_of_a_run() -> None:
    trainer = {"total_training_steps": 2, "save_freq": 2}
    scenario = parse_run(Scenario, {"trainer": {**trainer, **ASYNC, "max_staleness": 2, "publish_freq": 2}})
    run = scenario.train_run()
    assert (run.max_staleness, run.publish_freq, run.algorithm.rollout_correction.rollout_is) == (2, 2, "token")
    assert scenario.algorithm.rollout_correction.rollout_is == "none", "the scenario's own sections stay as they were given"
    for section, key in (("trainer", "max_staleness"), ("rollout", "in_flight_updates")):
        given = {
            "trainer": trainer,
            section: {**(trainer if section == "trainer" else {}), key: 0 if section == "trainer" else True},
        }
        with pytest.raises(ConfigError, match=rf'{section}\.{key} has no effect because trainer\.mode is "sync"'):
            parse_run(Scenario, given)
    with pytest.raises(ConfigError, match="max_loop_lag_s has no effect because time in a scenario is virtual"):
        parse_run(Scenario, {"trainer": {**trainer, "max_loop_lag_s": 2.0}})
