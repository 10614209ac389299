"""The sections: every key of a run with its type, its default and its help text.

The docstring under a key is its help text and its line in docs/configuration.md. What holds between keys is said in `runs.py` and
`idle_keys.py`.
"""

from math import inf
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from asyncrl.errors import ConfigError
from asyncrl.ports import Json

MOST = 2**31 - 1
"""Of a count: more is a slip of the finger, and torch and the file system stop at such sizes with words of their own."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(gt=0, le=MOST)]
Seed = Annotated[int, Field(ge=-MOST, le=MOST)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _as_list(value: Json) -> Json:
    return [value] if isinstance(value, str) else value


Paths = Annotated[list[str], BeforeValidator(_as_list)]
"""One path or several: a file, a directory, or a glob."""
Names = Annotated[list[str], BeforeValidator(_as_list)]
"""One name or several."""
KLEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]
"""k1, k2, k3 of http://joschu.net/blog/kl-approx.html; `+`: with the gradient of k2."""


class Section(BaseModel):
    """Base of every section: immutable, strict about types (an int is accepted where a float is meant), closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class ColumnMapping(Section):
    """Maps a plain table to rows. Braces name columns of the file: `prompt = "{question}"`; `{{` and `}}` are literal braces."""

    prompt: str = ""
    """Text of the user message. Empty: the file has a message list in `data.prompt_key`."""
    system: str = ""
    """Text of a system message before it. Empty: none."""
    ground_truth: str = ""
    """Text of the right answer. Empty: the file has `reward_model.ground_truth`."""
    ground_truth_after: str = ""
    """Keep only what follows the last occurrence of this marker in the answer, such as "####" for GSM8K."""
    data_source: str = ""
    """Name of the source, given to the reward function. Empty: the file has `data_source`."""


class DataConfig(Section):
    """Where the rows come from and which are kept."""

    train_files: Paths = []
    """Training rows: parquet, json or jsonl; a file, a list of files, a directory or a glob."""
    val_files: Paths = []
    """Held-out rows for evaluation. Empty: no evaluation."""
    prompt_key: str = "prompt"
    """Column with the message list (a column `raw_prompt` is taken as well)."""
    mapping: ColumnMapping = ColumnMapping()
    """For plain tables."""
    train_batch_size: Positive = 16
    """Prompts (groups) a training step."""
    max_prompt_length: Positive = 1024
    """Tokens of a prompt at most, chat template and tool schemas included."""
    filter_overlong_prompts: bool = True
    """Drop longer prompts and log their rows; false: a longer prompt is an error."""
    max_response_length: Positive = 1024
    """Tokens of a whole trajectory after the prompt at most, tool results included."""
    shuffle: bool = True
    """Visit the rows of each epoch in an order drawn from `trainer.seed` and the epoch."""
    max_rows: Count = 0
    """Read only the first rows of the training files. 0: all."""


class ModelConfig(Section):
    """The policy."""

    path: str
    """Local Hugging Face model directory (config, weights, tokenizer with chat template)."""
    tokenizer_path: str = ""
    """Directory of the tokenizer. Empty: the model's."""
    chat_template: str = ""
    """File with a Jinja chat template that replaces the tokenizer's own. Empty: the tokenizer's."""
    chat_template_kwargs: dict[str, str | int | float | bool] = {}
    """Variables for the chat template, such as enable_thinking = false."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights. On CPU float32 is the fast one."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention of the trainer's forward pass."""


class RolloutConfig(Section):
    """How trajectories are generated."""

    name: Literal["torch"] = "torch"
    """Engine: `torch` is embedded in this process."""
    n: Positive = 8
    """Sessions a prompt (the group's size)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature during training."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. 1: off."""
    top_k: Count = 0
    """Sample among the k likeliest tokens. 0: off."""
    max_num_seqs: Positive = 64
    """Rows that decode together (slots of the engine's cache)."""
    max_model_len: Count = 0
    """Tokens of prompt plus response that a slot holds. 0: max_prompt_length + max_response_length."""
    deterministic: bool = False
    """Make a session's tokens independent of its neighbours: full-width decode steps, one prompt a prefill. Costs speed."""
    request_timeout_s: Seconds = 600.0
    """A generate call that takes longer fails its session."""


class AgentConfig(Section):
    """What a session is."""

    name: str = "single_turn"
    """Agent loop: `single_turn`, `tool_agent`, or `module:Class`."""
    tools: Names = []
    """Tools by registered name, or `module:function`."""
    tool_format: Literal["hermes"] = "hermes"
    """How the model writes a call: `hermes` is <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
    parallel_tool_calls: bool = False
    """Let a turn hold several calls. False: a turn ends with its first call."""
    max_tokens_per_turn: Count = 0
    """New tokens of one turn. 0: what is left of data.max_response_length."""
    max_turns: Positive = 8
    """Assistant turns of a session."""
    max_tool_calls: Positive = 16
    """Tool calls of a session; further ones are answered with a refusal."""
    max_parse_errors: Positive = 3
    """Malformed calls that are answered to the model before the session ends."""
    timeout_s: Seconds = 600.0
    """Seconds of a whole session, its reward included."""
    tool_timeout_s: Seconds = 30.0
    """Seconds of one tool call; afterwards the model is told that it timed out."""
    max_concurrent_tools: Positive = 64
    """Calls of one tool that run at once, over all sessions."""
    max_abandoned_tools: Positive = 16
    """Sync tool threads that may hang past their deadline before further sync calls are refused."""
    max_concurrent_sessions: Count = 0
    """Sessions in flight. 0: all that are admitted."""


class StoreConfig(Section):
    """Where trajectories wait between generation and training."""

    journal: bool = True
    """Keep admissions, turns, trajectories and steps in journal.db of the run's folder, so that they survive the process."""
    sync: Literal["normal", "full"] = "normal"
    """What survives a power loss: `full`, all that was acknowledged; `normal`, a consistent earlier state."""
    commit_timeout_s: Seconds = 60.0
    """Seconds that the journal may take to acknowledge a change before the run ends."""


class ReplayConfig(Section):
    """Groups between generation and training."""

    sample_timeout_s: Seconds = 3600.0
    """A step that waits longer for its groups ends the run and names them."""
    max_failed_groups_in_a_row: Positive = 32
    """Failed groups, with none finished in between, after which the run ends with the last error."""
    max_filtered_groups_in_a_row: Positive = 1024
    """Groups that algorithm.filter_groups drops, with none kept in between, after which the run ends."""


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


class RolloutCorrectionConfig(Section):
    """Importance weights and rejection for the gap between the engine that sampled and the policy that is trained."""

    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Importance weights trainer / engine, of each token or of each whole trajectory."""
    rollout_is_threshold: float | str = 2.0
    """A number u: weights are cut to u. A band "l_u" such as "0.5_2": weights outside count 0."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: Annotated[list[Rejection], BeforeValidator(_as_list)] = []
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


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    lr_warmup_steps: Count = 0
    """Optimizer steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Course after the warm-up, down to min_lr_ratio at the last step."""
    min_lr_ratio: Share = 0.0
    """Last learning rate as a share of the peak."""
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    """Norm to which gradients are clipped."""
    max_nonfinite_in_a_row: Positive = 3
    """Updates skipped in a row for a gradient that is not finite, after which the run ends."""

    @model_validator(mode="before")
    @classmethod
    def _toml_arrays_are_tuples(cls, data: Json) -> Json:
        if isinstance(data, dict) and isinstance(data.get("betas"), list):
            return {**data, "betas": tuple(data["betas"])}
        return data


class ActorConfig(Section):
    """The update."""

    ppo_mini_batch_size: Count = 0
    """Groups an optimizer step. 0: the whole batch."""
    ppo_epochs: Positive = 1
    """Passes over each batch."""
    ppo_max_token_len_per_gpu: Positive = 16384
    """Tokens (padding included) of a micro-batch at most; a longer row goes alone."""
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


class CriticConfig(Section):
    """The value model of `algorithm.adv_estimator = "gae"`. Its mini-batches and passes are the actor's, its loss is a mean."""

    model_path: str = ""
    """Model directory from which the critic starts, of the policy's vocabulary; its head is not used. Empty: `model.path`."""
    cliprange_value: Annotated[float, Field(gt=0)] = 0.5
    """A prediction that has moved further than this from the old one, towards the return, is not pushed on."""
    ppo_max_token_len_per_gpu: Positive = 16384
    """Tokens (padding included) of a micro-batch at most; a longer row goes alone."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Optimizer."""


class EvalConfig(Section):
    """Evaluation on `data.val_files`."""

    sampled: bool = True
    """Report eval/sampled/*: at `temperature`."""
    greedy: bool = True
    """Report eval/greedy/*: at temperature 0."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the sampled evaluation."""
    n: Positive = 1
    """Sampled sessions a prompt."""
    max_rows: Count = 0
    """Rows of the held-out files. 0: all."""


class TrainerConfig(Section):
    """The run."""

    experiment_name: str = "run"
    """Name of the run's folder; a second run of the name gets `-2`."""
    default_local_dir: str = "runs"
    """Folder of all runs."""
    total_training_steps: Count = 0
    """Training steps. 0: total_epochs decides."""
    total_epochs: Positive = 1
    """Passes over the training rows, when total_training_steps is 0."""
    critic_warmup: Count = 0
    """First training steps in which only the critic is updated."""
    save_freq: Count = 0
    """Steps between checkpoints. 0: only at the end."""
    max_ckpt_to_keep: Positive = 2
    """Whole checkpoints kept."""
    test_freq: Count = 0
    """Steps between evaluations. 0: only before and after."""
    val_before_train: bool = True
    """Evaluate before the first step."""
    seed: Seed = 1
    """Seed of data order, sampling and initialisation."""
    num_threads: Threads = 1
    """Torch threads. Small models are fastest with one."""
    invariants: Literal["off", "sampled", "all"] = "sampled"
    """Steps that check every field invariant: none, one in ten, all. Names, lengths, groups and staleness tags: always."""
    log_trajectories: Count = 2
    """Trajectories a step that are written as readable text."""
    trace_groups: Count = 1
    """Prompt groups a step whose lineage and spans are recorded in trace.jsonl. 0: none."""
    stage_timeout_s: Seconds = 3600.0
    """Seconds that a stage of a step, a copy of the weights, or a checkpoint may take before the run ends with its name."""
    no_signal_patience: Positive = 10
    """Steps in a row without any non-zero advantage before a warning."""
    tensorboard: bool = True
    """Write TensorBoard events."""


class SFTConfig(Section):
    """Supervised warm start."""

    batch_size: Positive = 64
    """Conversations an optimizer step."""
    total_steps: Positive = 100
    """Optimizer steps; the rows repeat when they run out."""
    max_length: Positive = 1024
    """Tokens of a conversation at most; a longer one is an error."""
    max_token_len_per_gpu: Positive = 16384
    """Tokens (padding included) of a micro-batch at most; a longer conversation goes alone."""
    stages: list[Paths] = []
    """Files of each stage, in order, in place of data.train_files: learn the mechanics first, then the style."""
    stage_shares: list[Share] = []
    """Share of the steps of each stage. Empty: equal."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Optimizer."""


class SFTDataConfig(Section):
    """Rows with `messages` (a conversation whose assistant turns are learned)."""

    train_files: Paths = []
    """Conversations: parquet, json or jsonl."""
    messages_key: str = "messages"
    """Column with the message list."""


class SFTTrainerConfig(Section):
    """The run."""

    experiment_name: str = "sft"
    """Name of the run's folder; a second run of the name gets `-2`."""
    default_local_dir: str = "runs"
    """Folder of all runs."""
    seed: Seed = 1
    """Seed of data order and initialisation."""
    num_threads: Threads = 1
    """Torch threads."""
    tensorboard: bool = True
    """Write TensorBoard events."""


class SFTAgentConfig(Section):
    """Tools whose schemas the chat template shows."""

    tools: Names = []
    """Tools by registered name, or `module:function`."""
