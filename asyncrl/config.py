"""Typed configuration: one section a room, one TOML file a run.

The docstring under a key is its help text and its line in docs/configuration.md. Unknown keys are errors that suggest the nearest
name; so are keys without effect (`_INEFFECTIVE` below). Loads no torch.
"""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Generic, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from asyncrl.errors import ConfigError
from asyncrl.ports import Json

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _as_list(value: Json) -> Json:
    return [value] if isinstance(value, str) else value


Paths = Annotated[list[str], BeforeValidator(_as_list)]
"""One path or several: a file, a directory, or a glob."""


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
    tools: list[str] = []
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


class RewardConfig(Section):
    """How a finished session is scored."""

    manager: Literal["naive"] = "naive"
    """Reward manager: `naive` scores each session on its own with one function."""
    function: str = "exact_match"
    """Rule: `exact_match`, `gsm8k`, or `module:function` called as f(data_source, solution_str, ground_truth, extra_info)."""
    timeout_s: Seconds = 30.0
    """Deadline of one scoring; a worker that exceeds it is killed and the session fails."""
    num_workers: Positive = 1
    """Processes that run sync reward functions."""


class ReplayConfig(Section):
    """Groups between generation and training."""

    sample_timeout_s: Seconds = 3600.0
    """A step that waits longer for its groups ends the run and names them."""
    max_failed_groups_in_a_row: Positive = 32
    """Failed groups, with none finished in between, after which the run ends with the last error."""


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: Literal["grpo"] = "grpo"
    """Advantage estimator."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (GRPO); false: Dr. GRPO."""
    old_log_probs: Literal["auto", "recompute", "bypass"] = "auto"
    """`auto`: left out when each batch gets one update, else recomputed; `bypass`: the engine's own log-probs."""


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
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip of the importance ratio: 1 - low."""
    clip_ratio_high: Annotated[float, Field(gt=0)] = 0.2
    """Upper clip of the importance ratio: 1 + high."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses become one number."""
    use_kl_loss: bool = False
    """Add a KL term to a frozen reference, the model at `model.path`."""
    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term."""
    kl_loss_type: Literal["kl", "k2", "low_var_kl"] = "low_var_kl"
    """Estimator: k1, k2 or k3 of http://joschu.net/blog/kl-approx.html."""
    entropy_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    optim: OptimConfig = OptimConfig()
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
    save_freq: Count = 0
    """Steps between checkpoints. 0: only at the end."""
    max_ckpt_to_keep: Positive = 2
    """Whole checkpoints kept."""
    test_freq: Count = 0
    """Steps between evaluations. 0: only before and after."""
    val_before_train: bool = True
    """Evaluate before the first step."""
    seed: int = 1
    """Seed of data order, sampling and initialisation."""
    num_threads: Positive = 1
    """Torch threads. Small models are fastest with one."""
    invariants: Literal["off", "sampled", "all"] = "sampled"
    """Which stage borders check the field invariants: none, one step in ten, every one."""
    log_trajectories: Count = 2
    """Trajectories a step that are written as readable text."""
    no_signal_patience: Positive = 10
    """Steps in a row without any non-zero advantage before a warning."""
    tensorboard: bool = True
    """Write TensorBoard events."""


class TrainRun(Section):
    """`asyncrl train`: reinforcement learning."""

    data: DataConfig
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    replay: ReplayConfig = ReplayConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    eval: EvalConfig = EvalConfig()
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_batch_arithmetic(self)
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
    def old_log_probs(self) -> Literal["elide", "recompute", "bypass"]:
        """What the old_log_probs stage does, `auto` resolved."""
        if self.algorithm.old_log_probs == "auto":
            return "elide" if self.updates_per_batch == 1 else "recompute"
        return self.algorithm.old_log_probs

    @property
    def max_model_len(self) -> int:
        return self.rollout.max_model_len or self.data.max_prompt_length + self.data.max_response_length


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
    seed: int = 1
    """Seed of data order and initialisation."""
    num_threads: Positive = 1
    """Torch threads."""
    tensorboard: bool = True
    """Write TensorBoard events."""


class SFTAgentConfig(Section):
    """Tools whose schemas the chat template shows."""

    tools: list[str] = []
    """Tools by registered name, or `module:function`."""


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


Run = TypeVar("Run", TrainRun, SFTRun)


# --- rules across keys ----------------------------------------------------------------------------------------------------------


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


class _Switch(NamedTuple, Generic[Run]):
    """`keys`, when the user set one of them, do nothing because `reason` holds."""

    reason: str
    holds: Callable[[Run], bool]
    keys: str


_INEFFECTIVE: tuple[_Switch[TrainRun], ...] = (
    _Switch("actor.use_kl_loss is false", lambda run: not run.actor.use_kl_loss, "actor.kl_loss_coef actor.kl_loss_type"),
    _Switch(
        'agent.name is "single_turn"',
        lambda run: run.agent.name == "single_turn",
        "agent.tools agent.tool_format agent.parallel_tool_calls agent.max_turns agent.max_tool_calls agent.max_parse_errors"
        " agent.tool_timeout_s agent.max_concurrent_tools agent.max_abandoned_tools",
    ),
    _Switch(
        'actor.optim.lr_scheduler_type is "constant"',
        lambda run: run.actor.optim.lr_scheduler_type == "constant",
        "actor.optim.min_lr_ratio",
    ),
    _Switch("data.mapping.prompt is set", lambda run: bool(run.data.mapping.prompt), "data.prompt_key"),
    _Switch("data.mapping.prompt is empty", lambda run: not run.data.mapping.prompt, "data.mapping.system"),
    _Switch("trainer.total_training_steps is set", lambda run: run.trainer.total_training_steps > 0, "trainer.total_epochs"),
    _Switch(
        "data.val_files is empty",
        lambda run: not run.data.val_files,
        "trainer.test_freq trainer.val_before_train eval.sampled eval.greedy eval.temperature eval.n eval.max_rows",
    ),
    _Switch("eval.sampled is false", lambda run: not run.eval.sampled, "eval.temperature eval.n"),
    _Switch("eval.sampled and eval.greedy are false", lambda run: not (run.eval.sampled or run.eval.greedy), "data.val_files"),
)
_INEFFECTIVE_SFT: tuple[_Switch[SFTRun], ...] = (
    _Switch(
        'sft.optim.lr_scheduler_type is "constant"',
        lambda run: run.sft.optim.lr_scheduler_type == "constant",
        "sft.optim.min_lr_ratio",
    ),
)


# --- loading --------------------------------------------------------------------------------------------------------------------


def load_run(kind: type[Run], path: Path, overrides: Sequence[str] = ()) -> Run:
    """Read a TOML file, apply `section.key=value` overrides (values in TOML syntax, bare words are strings), and check it.

    Raises ConfigError with one line that names file, key, value and what is allowed.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    return parse_run(kind, tree, where=str(path))


def parse_run(kind: type[Run], tree: dict[str, Json], *, where: str = "configuration") -> Run:
    """Check a nested dict. Raises ConfigError as `load_run` does."""
    try:
        run = kind.model_validate(tree)
    except ValidationError as error:
        # A misspelt key first: it is often the cause of a missing one.
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        raise ConfigError(f"{where}: {_explain(kind, first)}") from None
    if isinstance(run, TrainRun):
        _refuse_ineffective(run, _INEFFECTIVE, where)
    else:
        _refuse_ineffective(run, _INEFFECTIVE_SFT, where)
    return run


def _refuse_ineffective(run: Run, switches: Iterable[_Switch[Run]], where: str) -> None:
    given = {key for key, _ in leaves(run.model_dump(exclude_unset=True))}
    for switch in switches:
        idle = [key for key in switch.keys.split() if key in given]
        if idle and switch.holds(run):
            raise ConfigError(f"{where}: {idle[0]} has no effect because {switch.reason}; remove the one or change the other")


def resolved(run: TrainRun | SFTRun) -> dict[str, Json]:
    """Every key that has an effect, with its value: the nested dict that a run's folder keeps, and that `parse_run` takes back."""
    tree: dict[str, Json] = run.model_dump(mode="json")
    if isinstance(run, TrainRun):
        idle = [switch.keys for switch in _INEFFECTIVE if switch.holds(run)]
    else:
        idle = [switch.keys for switch in _INEFFECTIVE_SFT if switch.holds(run)]
    for key in " ".join(idle).split():
        _remove(tree, key.split("."))
    return tree


def _remove(tree: dict[str, Json], path: Sequence[str]) -> None:
    for part in path[:-1]:
        tree = tree[part]
    tree.pop(path[-1], None)


def leaves(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """`section.key`, value of every leaf of a nested mapping."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _apply_override(tree: dict[str, Json], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    node = tree
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {part!r} is a value, not a section")
    node[parts[-1]] = _parse_value(text.strip())


def _parse_value(text: str) -> Json:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(kind: type[BaseModel], error: ErrorDetails) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}{_suggest(kind, location)}"
    if error["type"] == "missing":
        return f"{key} is missing; it has no default"
    if error["type"] == "value_error" and isinstance(error.get("ctx", {}).get("error"), ConfigError):
        return str(error["ctx"]["error"])
    return f"{key} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _suggest(kind: type[BaseModel], location: Sequence[str]) -> str:
    """The nearest name in the same section, else the same name in another section, else the nearest of all."""
    known = [key for key, _ in key_help(kind)]
    section = "".join(f"{part}." for part in location[:-1])
    siblings = sorted({key[len(section) :].partition(".")[0] for key in known if key.startswith(section)})
    near = [f"{section}{name}" for name in difflib.get_close_matches(location[-1], siblings, n=1, cutoff=0.6)]
    near = near or [key for key in known if key.rpartition(".")[2] == location[-1]]
    near = near or difflib.get_close_matches(".".join(location), known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(siblings)}"


def key_help(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`section.key`, help text of every key of a run, depth first."""
    return ((key, entry.description or "") for key, entry in keys_of(kind, prefix))


def keys_of(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """`section.key`, declaration of every key of a run, depth first."""
    for name, entry in kind.model_fields.items():
        if isinstance(entry.annotation, type) and issubclass(entry.annotation, BaseModel):
            yield from keys_of(entry.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", entry
