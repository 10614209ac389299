"""The two kinds of run: which sections they have, what must hold between keys, and what follows from them."""

from typing import Literal, Self

from pydantic import model_validator

from asyncrl.config.algorithms import TOKEN_BASELINES, check_algorithms, reinforces
from asyncrl.config.cluster import check_cluster
from asyncrl.config.learning import ActorConfig, AlgorithmConfig, CriticConfig, RolloutCorrectionConfig
from asyncrl.config.rewards import RewardConfig, check_reward
from asyncrl.config.rollout import RolloutConfig, check_rollout
from asyncrl.config.sections import (
    AgentConfig,
    ClusterConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    ReplayConfig,
    Section,
    SFTAgentConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
    StoreConfig,
    TrainerConfig,
)
from asyncrl.errors import ConfigError


class TrainRun(Section):
    """`asyncrl train`: reinforcement learning."""

    data: DataConfig
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    store: StoreConfig = StoreConfig()
    replay: ReplayConfig = ReplayConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    cluster: ClusterConfig = ClusterConfig()
    eval: EvalConfig = EvalConfig()
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        _correct_off_policy(self)
        _check_batch_arithmetic(self)
        _check_versions(self)
        check_algorithms(self.algorithm, self.actor, group_size=self.rollout.n)
        check_reward(self.reward, max_response_length=self.data.max_response_length, components=self.algorithm.gdpo_reward_keys)
        _check_penalty(self)
        check_cluster(self)
        check_rollout(self)
        return self

    @property
    def mini_batch_groups(self) -> int:
        """Groups an optimizer step."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps a training step."""
        return self.data.train_batch_size // self.mini_batch_groups * self.actor.ppo_epochs

    @property
    def max_staleness(self) -> int:
        """Weight versions that a trained token may be behind."""
        return self.trainer.max_staleness if self.trainer.mode == "async" else 0

    @property
    def publish_freq(self) -> int:
        """Steps that make a version."""
        return self.trainer.publish_freq

    @property
    def is_off_policy(self) -> bool:
        """May a token be trained by other weights than have sampled it?"""
        return self.max_staleness > 0 or self.publish_freq > 1

    @property
    def old_log_probs(self) -> Literal["elide", "recompute", "bypass"]:
        """What the old_log_probs stage does, `auto` resolved."""
        if self.algorithm.old_log_probs == "auto":
            is_wanted = self.algorithm.use_kl_in_reward or self.algorithm.rollout_correction.is_on or self.needs_sum_pi_squared
            return "recompute" if is_wanted or self.updates_per_batch > 1 else "elide"
        return self.algorithm.old_log_probs

    @property
    def needs_sum_pi_squared(self) -> bool:
        """Does the advantage want the sum of squared probabilities at each token?"""
        return self.algorithm.adv_estimator in TOKEN_BASELINES

    @property
    def needs_baseline(self) -> bool:
        """Does each group run one greedy session more, whose score is the baseline?"""
        return self.algorithm.adv_estimator == "remax"

    @property
    def needs_reference(self) -> bool:
        """Is there a KL term, in the loss or in the reward?"""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def has_critic(self) -> bool:
        """Does the advantage want values?"""
        return self.algorithm.adv_estimator == "gae"

    @property
    def critic_model(self) -> ModelConfig:
        """What the critic starts from: as the policy's, at `critic.model_path` where that is set."""
        return self.model.model_copy(update={"path": self.critic.model_path or self.model.path})

    @property
    def reinforces(self) -> bool:
        """Is the loss -A log p with weights against the engine, in place of `actor.loss_mode`?"""
        return reinforces(self.algorithm)

    @property
    def max_model_len(self) -> int:
        return self.rollout.max_model_len or self.data.max_prompt_length + self.data.max_response_length


def _correct_off_policy(run: TrainRun) -> None:
    """Token weights are the default where tokens may be of other weights and nothing else was chosen.

    The run is changed in place, before anybody has it; the key does not count as set by the user.
    """
    section = run.algorithm.rollout_correction
    is_chosen = bool({"rollout_is", "rollout_rs"} & section.model_fields_set) or run.algorithm.old_log_probs == "bypass"
    if is_chosen or not run.is_off_policy:
        return
    given = {name: getattr(section, name) for name in section.model_fields_set}
    correction = RolloutCorrectionConfig(**given)
    correction.__dict__["rollout_is"] = "token"
    algorithm = run.algorithm.model_copy()
    algorithm.__dict__["rollout_correction"] = correction
    run.__dict__["algorithm"] = algorithm


def _check_versions(run: TrainRun) -> None:
    save, publish = run.trainer.save_freq, run.publish_freq
    if save % publish:
        raise ConfigError(
            f"trainer.save_freq = {save} is not a multiple of trainer.publish_freq = {publish}: checkpoints fall on steps after "
            f"which weights are published; set it to {save + publish - save % publish}"
        )
    steps = run.trainer.total_training_steps
    if steps % publish:
        raise ConfigError(
            f"trainer.total_training_steps = {steps} is not a multiple of trainer.publish_freq = {publish}: the last version would "
            f"not be whole; set it to {steps + publish - steps % publish}"
        )
    if run.agent.group_timeout_s < run.agent.timeout_s:
        raise ConfigError(
            f"agent.group_timeout_s = {run.agent.group_timeout_s:g} is less than agent.timeout_s = {run.agent.timeout_s:g}: "
            "a group lasts as long as its longest session"
        )


def _check_batch_arithmetic(run: TrainRun) -> None:
    batch, mini = run.data.train_batch_size, run.mini_batch_groups
    if batch % mini:
        raise ConfigError(
            f"data.train_batch_size = {batch} is not a multiple of actor.ppo_mini_batch_size = {mini}: "
            f"{batch} / {mini} = {batch / mini:.3g}"
        )
    need = run.data.max_prompt_length + run.data.max_response_length
    if run.rollout.max_model_len and run.rollout.max_model_len < need:
        raise ConfigError(
            f"rollout.max_model_len = {run.rollout.max_model_len} is less than "
            f"data.max_prompt_length + data.max_response_length = {need}"
        )
    if not run.data.train_files:
        raise ConfigError("data.train_files is empty: name a file, a directory or a glob")
    if run.agent.name == "tool_agent" and not run.agent.tools:
        raise ConfigError('agent.name = "tool_agent" needs agent.tools, such as ["calculator"]')


def _check_penalty(run: TrainRun) -> None:
    """The penalty is in the score, and beside it as a component."""
    components = run.algorithm.gdpo_reward_keys
    if run.algorithm.adv_estimator == "gdpo" and run.reward.manager == "dapo" and "overlong_reward" not in components:
        raise ConfigError(
            'reward.manager = "dapo" takes its penalty off the score, which algorithm.adv_estimator = "gdpo" does not read; add '
            f'"overlong_reward" to algorithm.gdpo_reward_keys = {components}'
        )


class SFTRun(Section):
    """`asyncrl sft`: a supervised warm start."""

    data: SFTDataConfig = SFTDataConfig()
    model: ModelConfig
    agent: SFTAgentConfig = SFTAgentConfig()
    sft: SFTConfig = SFTConfig()
    trainer: SFTTrainerConfig = SFTTrainerConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.sft.stages) == bool(self.data.train_files):
            raise ConfigError("set either data.train_files or sft.stages, not both and not neither")
        shares = self.sft.stage_shares
        if shares and (len(shares) != len(self.sft.stages) or abs(sum(shares) - 1) > 1e-6):
            raise ConfigError(
                f"sft.stage_shares = {shares}: give one share for each of the {len(self.sft.stages)} sft.stages, summing to 1"
            )
        return self
