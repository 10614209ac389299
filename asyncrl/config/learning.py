"""The sections of what is learned: advantages, correction, the actor's loss and the critic's. As `sections.py`."""

from math import inf
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from asyncrl.config.sections import Count, Names, OptimConfig, Positive, Section, Share, as_list
from asyncrl.errors import ConfigError
from asyncrl.ports import Json

KLEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]
"""k1, k2, k3 of http://joschu.net/blog/kl-approx.html; `+`: with the gradient of k2."""
Rejection = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip
"""What of a token or a trajectory must stay within its threshold."""


def _as_thresholds(value: Json) -> Json:
    return [value] if isinstance(value, int | float | str) else value


def _is_threshold(value: float | str, *, is_band: bool) -> bool:
    """A positive number, or its text; a band: two of them in order."""
    try:
        parts = [float(part) for part in str(value).split("_")]
    except ValueError:
        return False
    return len(parts) == 1 + is_band and all(0 < part < inf for part in parts) and parts == sorted(parts)


class KLControlConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive`: raised and lowered by at most a fifth of n / horizon a step, so that the KL nears the target."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.001
    """The coefficient; with `adaptive` the first one."""
    target_kl: Annotated[float, Field(gt=0)] = 0.1
    """KL a token that `adaptive` aims at, in nats."""
    horizon: Positive = 10000
    """Trajectories over which `adaptive` acts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "adaptive" and self.kl_coef == 0:
            raise ConfigError('kl_coef = 0 stays 0 with type = "adaptive", which multiplies it; give a first one > 0')
        return self


class RolloutCorrectionConfig(Section):
    """Importance weights and rejection for the gap between the engine that sampled and the policy that is trained."""

    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Importance weights trainer / engine, of each token or of each whole trajectory."""
    rollout_is_threshold: float | str = 2.0
    """A number u: weights are cut to u. A band "l_u" such as "0.5_2": weights outside count 0."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: Annotated[list[Rejection], BeforeValidator(as_list)] = []
    """Rejection: what must be within its threshold, such as token_k2, seq_mean_k1 or seq_max_k3; several must all hold."""
    rollout_rs_threshold: Annotated[list[float | str], BeforeValidator(_as_thresholds)] = []
    """One threshold for all, or one each. k2, k3: an upper bound. k1: a band "l_u" of the ratio engine / trainer."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """With old_log_probs = "bypass": the clipped loss against the engine, or -A log p with the weights."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not _is_threshold(self.rollout_is_threshold, is_band=isinstance(self.rollout_is_threshold, str)):
            raise ConfigError(
                f'rollout_is_threshold = {self.rollout_is_threshold!r}: give a number u > 0, or a band "l_u" with 0 < l <= u'
            )
        given = self.rollout_rs_threshold
        if len(given) not in {1, len(self.rollout_rs)} or (given and not self.rollout_rs):
            if self.rollout_rs or given:
                raise ConfigError(
                    f"rollout_rs_threshold = {given}: give one threshold, or one for each of rollout_rs = {self.rollout_rs}"
                )
            return self
        for name, threshold in zip(self.rollout_rs, given * len(self.rollout_rs) if len(given) == 1 else given, strict=True):
            if not _is_threshold(threshold, is_band=name.endswith("k1") and "_" in str(threshold)):
                form = 'a number u, or a band "l_u" with 0 < l <= u' if name.endswith("k1") else "a number u > 0"
                raise ConfigError(f"rollout_rs_threshold: {threshold!r} of {name} is not {form}")
        return self

    @property
    def is_on(self) -> bool:
        """Does anything weigh or reject?"""
        return self.rollout_is != "none" or bool(self.rollout_rs)


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: str = "grpo"
    """Advantage estimator: one of docs/algorithms.md, or `module:function`."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (GRPO); false: Dr. GRPO."""
    gamma: Share = 1.0
    """Discount a token."""
    lam: Share = 1.0
    """Lambda of GAE."""
    gdpo_reward_keys: Names = []
    """Components of the reward that GDPO normalises apart, by their names in what the reward function returns."""
    adv_options: dict[str, float | bool | str | list[float]] = {}
    """Further options of the estimator, such as gpg_f_norm; docs/algorithms.md lists them."""
    old_log_probs: Literal["auto", "recompute", "bypass"] = "auto"
    """`auto`: left out when each batch gets one update and nothing asks for them, else recomputed; `bypass`: the engine's own."""
    filter_groups: bool = False
    """Dynamic sampling: a group whose rewards are all the same is dropped and replaced."""
    use_kl_in_reward: bool = False
    """Take coefficient x KL(policy || reference) off the reward of each token."""
    kl_penalty: KLEstimator = "kl"
    """Estimator of the KL in the reward."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    """Its coefficient."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Off-policy correction."""


class FSDPConfig(Section):
    """How the ranks share a model and its work. The critic and the reference are cut as the actor is."""

    fsdp_size: Count = 0
    """Ranks among which each weight is cut; further ranks hold copies (HSDP). 0: all ranks of a tensor-parallel part."""
    ulysses_sequence_parallel_size: Positive = 1
    """Ranks that share the tokens of a micro-batch (sequence parallel)."""
    tensor_model_parallel_size: Positive = 1
    """Ranks that share each linear layer (tensor parallel)."""
    mixed_precision: bool = False
    """Forward and backward in bfloat16; weights, gradient sums and optimizer stay in model.dtype."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and gather them again in the backward: less memory, more traffic."""
    offload_policy: bool = False
    """Keep weights, gradients and optimizer in the CPU's memory, a layer on the GPU while it computes. Needs a GPU."""


class ActorConfig(Section):
    """The update."""

    ppo_mini_batch_size: Count = 0
    """Groups an optimizer step. 0: the whole batch."""
    ppo_epochs: Positive = 1
    """Passes over each batch."""
    ppo_max_token_len_per_gpu: Positive = 16384
    """Tokens (padding included) that a rank computes in a micro-batch at most; a whole trajectory must fit."""
    loss_mode: str = "vanilla"
    """Policy loss: one of docs/algorithms.md, or `module:function`."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip of the importance ratio: 1 - low. Of dppo_tv and dppo_kl: the bound of the divergence."""
    clip_ratio_high: Annotated[float, Field(gt=0)] = 0.2
    """Upper clip of the importance ratio: 1 + high. Of dppo_tv and dppo_kl: the bound of the divergence."""
    clip_ratio_c: Annotated[float, Field(ge=0)] = 0.0
    """Highest ratio that counts: where the advantage is negative, of dppo_tv and dppo_kl everywhere. 0: 3, and 20 for those two."""
    loss_options: dict[str, float] = {}
    """Further options of the loss, such as tau_pos; docs/algorithms.md lists them."""
    loss_agg_mode: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses become one number; a sequence is a session, however many trajectories it has."""
    loss_scale_factor: Annotated[float, Field(ge=0)] = 0.0
    """Divisor of seq-mean-token-sum-norm. 0: data.max_response_length."""
    use_kl_loss: bool = False
    """Add a KL term to a frozen reference, the model at `model.path`."""
    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term."""
    kl_loss_type: KLEstimator = "low_var_kl"
    """Estimator of the KL term."""
    entropy_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    fsdp_config: FSDPConfig = FSDPConfig()
    """How the ranks share the models."""


class CriticConfig(Section):
    """The value model of `algorithm.adv_estimator = "gae"`. Its mini-batches and passes are the actor's, its loss is a mean."""

    model_path: str = ""
    """Model directory from which the critic starts, of the policy's vocabulary; its head is not used. Empty: `model.path`."""
    cliprange_value: Annotated[float, Field(gt=0)] = 0.5
    """A prediction that has moved further than this from the old one, towards the return, is not pushed on."""
    ppo_max_token_len_per_gpu: Positive = 16384
    """Tokens (padding included) that a rank computes in a micro-batch at most; a whole trajectory must fit."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Optimizer."""
