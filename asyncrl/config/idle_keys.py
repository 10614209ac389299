"""Keys without effect: a key that the user set while its switch says otherwise is a mistake that nobody would see.

Each rule is one line of a table, with a test. `resolved` leaves the same keys out, so what a run's folder keeps loads again.
"""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from asyncrl.config.algorithms import idle_algorithm_keys
from asyncrl.config.keys import leaves
from asyncrl.config.rewards import JudgeConfig, LimitsConfig
from asyncrl.config.rollout import OpenAIConfig, VLLMConfig
from asyncrl.config.runs import SFTRun, TrainRun
from asyncrl.config.simulation import Scenario
from asyncrl.errors import ConfigError
from asyncrl.ports import Json

Run = TypeVar("Run", TrainRun, SFTRun, Scenario)


class Switch(NamedTuple, Generic[Run]):
    """`keys`, when the user set one of them, do nothing because `reason` holds. A section stands for all its keys."""

    reason: str
    holds: Callable[[Run], bool]
    keys: str


LIMITS, JUDGE, VLLM, OPENAI = (
    " ".join(f"{section}.{key}" for key in kind.model_fields)
    for section, kind in (
        ("reward.limits", LimitsConfig),
        ("reward.judge", JudgeConfig),
        ("rollout.vllm", VLLMConfig),
        ("rollout.openai", OpenAIConfig),
    )
)


def _shared(reason: str, holds: Callable[[TrainRun | Scenario], bool], keys: str) -> tuple[Switch[TrainRun], Switch[Scenario]]:
    return Switch(reason, holds, keys), Switch(reason, holds, keys)


SHARED_SWITCHES = (
    _shared('trainer.mode is "sync"', lambda run: run.trainer.mode == "sync", "trainer.max_staleness rollout.in_flight_updates"),
    _shared("agent.max_attempts is 1", lambda run: run.agent.max_attempts == 1, "agent.retry_backoff_s"),
    _shared(
        'replay.failed_groups is "abort"',
        lambda run: run.replay.failed_groups == "abort",
        "replay.quarantine_after replay.max_failed_groups_in_a_row",
    ),
)
SWITCHES: tuple[Switch[TrainRun], ...] = (
    *(of_training for of_training, _ in SHARED_SWITCHES),
    Switch("actor.use_kl_loss is false", lambda run: not run.actor.use_kl_loss, "actor.kl_loss_coef actor.kl_loss_type"),
    Switch(
        "algorithm.use_kl_in_reward is false",
        lambda run: not run.algorithm.use_kl_in_reward,
        "algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.target_kl"
        " algorithm.kl_ctrl.horizon",
    ),
    Switch(
        'algorithm.adv_estimator is "gdpo", whose advantages are made of the components of the reward alone',
        lambda run: run.algorithm.adv_estimator == "gdpo",
        "algorithm.use_kl_in_reward",
    ),
    Switch(
        'algorithm.kl_ctrl.type is "fixed"',
        lambda run: run.algorithm.kl_ctrl.type == "fixed",
        "algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon",
    ),
    Switch(
        'algorithm.rollout_correction.rollout_is is "none"',
        lambda run: run.algorithm.rollout_correction.rollout_is == "none",
        "algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_correction.rollout_is_batch_normalize",
    ),
    Switch(
        "the ratio of the clipped loss is that weight already (algorithm.old_log_probs, algorithm.rollout_correction.loss_type)",
        lambda run: run.old_log_probs == "bypass" and not run.reinforces,
        "algorithm.rollout_correction.rollout_is",
    ),
    Switch(
        "algorithm.rollout_correction.rollout_rs is empty",
        lambda run: not run.algorithm.rollout_correction.rollout_rs,
        "algorithm.rollout_correction.rollout_rs_threshold",
    ),
    Switch(
        'algorithm.old_log_probs is not "bypass"',
        lambda run: run.algorithm.old_log_probs != "bypass",
        "algorithm.rollout_correction.loss_type",
    ),
    Switch("algorithm.filter_groups is false", lambda run: not run.algorithm.filter_groups, "replay.max_filtered_groups_in_a_row"),
    Switch(
        'actor.loss_agg_mode is not "seq-mean-token-sum-norm"',
        lambda run: run.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        "actor.loss_scale_factor",
    ),
    Switch(
        'agent.name is "single_turn"',
        lambda run: run.agent.name == "single_turn",
        "agent.tools agent.tool_format agent.parallel_tool_calls agent.max_turns agent.max_tool_calls agent.max_parse_errors"
        " agent.tool_timeout_s agent.max_concurrent_tools agent.max_abandoned_tools",
    ),
    Switch(
        'cluster.kind is "process"',
        lambda run: run.cluster.kind == "process",
        "cluster.num_ranks cluster.rank_timeout_s actor.fsdp_config.fsdp_size actor.fsdp_config.ulysses_sequence_parallel_size"
        " actor.fsdp_config.tensor_model_parallel_size actor.fsdp_config.reshard_after_forward",
    ),
    Switch("model.lora_rank is 0", lambda run: not run.model.lora_rank, "model.lora_alpha model.target_modules model.lora_publish"),
    Switch('rollout.name is not "vllm"', lambda run: run.rollout.name != "vllm", VLLM),
    Switch('rollout.name is not "openai"', lambda run: run.rollout.name != "openai", OPENAI),
    Switch('rollout.name is "torch"', lambda run: run.rollout.name == "torch", "rollout.weight_transfer"),
    Switch(
        'rollout.name is "openai", whose engines are rollout.openai.base_urls',
        lambda run: run.rollout.name == "openai",
        "rollout.num_engines",
    ),
    Switch(
        "the only engine is in this process (rollout.name, rollout.num_engines)",
        lambda run: not run.rollout.has_pool,
        "rollout.start_timeout_s rollout.slow_after_s rollout.max_restarts",
    ),
    Switch(
        'rollout.weight_transfer is not "directory"',
        lambda run: run.rollout.transfer != "directory",
        "rollout.openai.weights_dir",
    ),
    Switch(
        'algorithm.adv_estimator is not "gae"',
        lambda run: not run.has_critic,
        "critic.model_path critic.cliprange_value critic.ppo_max_token_len_per_gpu critic.optim.lr critic.optim.betas"
        " critic.optim.weight_decay critic.optim.lr_warmup_steps critic.optim.lr_scheduler_type critic.optim.min_lr_ratio"
        " critic.optim.clip_grad critic.optim.max_nonfinite_in_a_row trainer.critic_warmup",
    ),
    Switch(
        'critic.optim.lr_scheduler_type is "constant"',
        lambda run: run.critic.optim.lr_scheduler_type == "constant",
        "critic.optim.min_lr_ratio",
    ),
    Switch(
        'actor.optim.lr_scheduler_type is "constant"',
        lambda run: run.actor.optim.lr_scheduler_type == "constant",
        "actor.optim.min_lr_ratio",
    ),
    Switch("data.mapping.prompt is set", lambda run: bool(run.data.mapping.prompt), "data.prompt_key"),
    Switch("data.mapping.prompt is empty", lambda run: not run.data.mapping.prompt, "data.mapping.system"),
    Switch("trainer.total_training_steps is set", lambda run: run.trainer.total_training_steps > 0, "trainer.total_epochs"),
    Switch(
        "data.val_files is empty",
        lambda run: not run.data.val_files,
        "trainer.test_freq trainer.val_before_train eval.sampled eval.greedy eval.temperature eval.n eval.max_rows eval.where"
        " eval.timeout_s",
    ),
    Switch(
        'reward.manager is not "dapo"',
        lambda run: run.reward.manager != "dapo",
        "reward.overlong_buffer_len reward.overlong_penalty_factor",
    ),
    Switch(
        'reward.manager is not "rate_limited" or "judge"',
        lambda run: run.reward.manager not in ("rate_limited", "judge"),
        LIMITS,
    ),
    Switch(
        "there is no limit to wait for: reward.limits has neither max_concurrent, max_rpm nor max_tpm",
        lambda run: not run.reward.limits.are_set,
        "reward.limits.queue_timeout_s",
    ),
    Switch(
        "reward.limits.max_tpm is 0",
        lambda run: not run.reward.limits.max_tpm,
        "reward.limits.estimated_tokens_per_request",
    ),
    Switch(
        'reward.manager is not "judge"',
        lambda run: run.reward.manager != "judge",
        JUDGE,
    ),
    Switch('reward.manager is "judge"', lambda run: run.reward.manager == "judge", "reward.function reward.num_workers"),
    Switch(
        "store.journal is false",
        lambda run: not run.store.journal,
        "store.sync store.commit_timeout_s trainer.max_step_tries",
    ),
    Switch("eval.sampled is false", lambda run: not run.eval.sampled, "eval.temperature eval.n"),
    Switch("eval.sampled and eval.greedy are false", lambda run: not (run.eval.sampled or run.eval.greedy), "data.val_files"),
)
SFT_SWITCHES: tuple[Switch[SFTRun], ...] = (
    Switch("model.lora_rank is 0", lambda run: not run.model.lora_rank, "model.lora_alpha model.target_modules"),
    Switch("a warm start publishes nothing", lambda run: True, "model.lora_publish"),
    Switch(
        'sft.optim.lr_scheduler_type is "constant"',
        lambda run: run.sft.optim.lr_scheduler_type == "constant",
        "sft.optim.min_lr_ratio",
    ),
)

SCENARIO_SWITCHES: tuple[Switch[Scenario], ...] = (
    *(of_scenario for _, of_scenario in SHARED_SWITCHES),
    Switch("time in a scenario is virtual", lambda run: True, "trainer.max_loop_lag_s"),
    Switch(
        "a scenario has no files",
        lambda run: True,
        "data.train_files data.val_files data.prompt_key data.mapping data.filter_overlong_prompts data.max_rows"
        " trainer.experiment_name trainer.default_local_dir trainer.tensorboard trainer.log_trajectories",
    ),
    Switch("a scenario has no critic", lambda run: True, "trainer.critic_warmup"),
    Switch(
        "sim.prompts.val_count is 0",
        lambda run: not run.sim.prompts.val_count,
        "trainer.test_freq trainer.val_before_train eval.sampled eval.greedy eval.n eval.where eval.timeout_s sim.faults.eval_hang",
    ),
    Switch(
        "a scenario's engines are sim.engine",
        lambda run: True,
        f"rollout.name rollout.num_engines rollout.weight_transfer {VLLM} {OPENAI}",
    ),
    Switch(
        "a scenario has no model",
        lambda run: True,
        "trainer.num_threads rollout.temperature rollout.top_p rollout.top_k rollout.deterministic eval.temperature eval.max_rows"
        " actor.optim actor.fsdp_config actor.ppo_max_token_len_per_gpu actor.loss_mode actor.loss_options"
        " actor.clip_ratio_low actor.clip_ratio_high actor.clip_ratio_c actor.loss_agg_mode actor.loss_scale_factor"
        " actor.entropy_coeff actor.kl_loss_coef actor.kl_loss_type",
    ),
    Switch(
        "rewards of a scenario are sim.reward",
        lambda run: True,
        "reward.manager reward.function reward.num_workers reward.overlong_buffer_len reward.overlong_penalty_factor"
        f" {LIMITS} {JUDGE}",
    ),
    Switch("the tools of a scenario are sim.tools", lambda run: True, "agent.tools"),
    Switch("trainer.total_training_steps says how many steps", lambda run: True, "trainer.total_epochs"),
    Switch(
        "store.journal is false",
        lambda run: not run.store.journal,
        "store.sync store.commit_timeout_s trainer.max_step_tries sim.journal sim.faults.journal_slow sim.faults.journal_fail",
    ),
    Switch(
        'agent.name is "single_turn"',
        lambda run: run.agent.name == "single_turn",
        "agent.tool_format agent.parallel_tool_calls agent.max_turns agent.max_tool_calls agent.max_parse_errors"
        " agent.tool_timeout_s agent.max_concurrent_tools agent.max_abandoned_tools sim.tools sim.sessions.turns"
        " sim.sessions.turns_alike sim.sessions.last_len sim.faults.tool_error sim.faults.tool_hang",
    ),
    Switch(
        "a turn has one tool call at most (agent.parallel_tool_calls)",
        lambda run: run.agent.name == "single_turn" or not run.agent.parallel_tool_calls,
        "sim.sessions.calls_a_turn",
    ),
)


def refuse_idle_keys(run: TrainRun | SFTRun | Scenario, where: str) -> None:
    """Raises ConfigError for the first key that was set and has no effect. A key counts as set at its default value too."""
    given = [key for key, _ in leaves(run.model_dump(exclude_unset=True))]
    for reason, keys in _idle_keys(run):
        idle = [one for key in keys for one in given if one == key or one.startswith(f"{key}.")]
        if idle:
            raise ConfigError(f"{where}: {idle[0]} has no effect because {reason}; remove the one or change the other")


def resolved(run: TrainRun | SFTRun | Scenario) -> dict[str, Json]:
    """Every key that has an effect, with its value, as a nested dict that loads again."""
    tree: dict[str, Json] = run.model_dump(mode="json")
    for _, keys in _idle_keys(run):
        for key in keys:
            _remove(tree, key.split("."))
    return tree


def _idle_keys(run: TrainRun | SFTRun | Scenario) -> list[tuple[str, list[str]]]:
    """Reason and keys of every switch that holds."""
    if isinstance(run, SFTRun):
        return _holding(SFT_SWITCHES, run)
    algorithms = idle_algorithm_keys(run.algorithm, run.actor)
    return [*(_holding(SWITCHES, run) if isinstance(run, TrainRun) else _holding(SCENARIO_SWITCHES, run)), *algorithms]


def _holding(switches: tuple[Switch[Run], ...], run: Run) -> list[tuple[str, list[str]]]:
    return [(switch.reason, switch.keys.split()) for switch in switches if switch.holds(run)]


def _remove(tree: dict[str, Json], path: Sequence[str]) -> None:
    """Take a key out, and a section that has none left."""
    name, *rest = path
    if not rest or name not in tree:
        tree.pop(name, None)
        return
    _remove(tree[name], rest)
    if not tree[name]:
        del tree[name]
