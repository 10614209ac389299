"""The sections: every key of a run with its type, its default and its help text.

The docstring under a key is its help text and its line in docs/configuration.md. What holds between keys is said in `runs.py` and
`idle_keys.py`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from asyncrl.ports import Json

MOST = 2**31 - 1
"""Of a count: more is a slip of the finger, and torch and the file system stop at such sizes with words of their own."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(gt=0, le=MOST)]
Seed = Annotated[int, Field(ge=-MOST, le=MOST)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def as_list(value: Json) -> Json:
    """A single text stands for a list of one."""
    return [value] if isinstance(value, str) else value


Paths = Annotated[list[str], BeforeValidator(as_list)]
"""One path or several: a file, a directory, or a glob."""
Names = Annotated[list[str], BeforeValidator(as_list)]
"""One name or several."""


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
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights. On CPU float32 is the fast one; float64 is for comparisons."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention of the trainer's forward pass. The last two take packed rows, the others rows padded to equal length."""
    enable_gradient_checkpointing: bool = False
    """Keep of each layer only its input, and compute the rest again in the backward pass: less memory, a third more time."""
    lora_rank: Count = 0
    """Rank of the adapters that are trained in place of the weights. 0: no LoRA. Needs `pip install 'asyncrl[lora]'`."""
    lora_alpha: Positive = 16
    """Adapters count alpha / rank."""
    target_modules: Names = ["all-linear"]
    """Linear layers that get an adapter, by their last name; `all-linear`: all but the head."""
    lora_publish: Literal["merged", "adapter"] = "merged"
    """What the engine gets at each version: whole weights with the adapters merged in, or the adapters, which it merges itself."""


class ClusterConfig(Section):
    """The processes that hold the actor, the critic and the reference. The engine is in the run's own process in any case."""

    kind: Literal["process", "local"] = "process"
    """`process`: the run's own process. `local`: num_ranks further processes of this machine, each with a part of the models."""
    num_ranks: Positive = 1
    """Processes that share the models and the work of a step; how, says `actor.fsdp_config`."""
    rank_timeout_s: Seconds = 600.0
    """Seconds without a sign of life of any rank after which the run ends with an error that says what each was doing."""


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
    """Seconds of an attempt at a whole session, its reward included."""
    group_timeout_s: Seconds = 3600.0
    """Seconds of a group, from its start or from a restart of the run; its open sessions then fail, and it with them."""
    max_attempts: Positive = 3
    """Attempts at a session that fails, with the same seeds; one only where the model or its task is to blame."""
    retry_backoff_s: Annotated[float, Field(ge=0)] = 1.0
    """Seconds before the second attempt; twice as long before each further one."""
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
    failed_groups: Literal["refill", "train_partial", "abort"] = "refill"
    """A group with a failed session: replaced, trained with those that finished where these are two or more, or the run's end."""
    quarantine_after: Count = 3
    """Failed groups of one dataset row after which it is left out. 0: never."""


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
    where: Literal["between", "snapshot"] = "between"
    """`between`: training waits for it. `snapshot`: beside training, on a second engine with a copy of the weights."""
    timeout_s: Seconds = 3600.0
    """Seconds of an evaluation; one that takes longer has no result, and training goes on."""


class TrainerConfig(Section):
    """The run."""

    experiment_name: str = "run"
    """Name of the run's folder; a second run of the name gets `-2`."""
    default_local_dir: str = "runs"
    """Folder of all runs."""
    mode: Literal["sync", "async"] = "sync"
    """`async`: sessions run while a step trains, up to max_staleness versions ahead. `sync`: all are of the newest weights."""
    max_staleness: Count = 1
    """Weight versions that a trained token may be behind. 0: as with mode = "sync"."""
    publish_freq: Positive = 1
    """Steps that make a version: after so many the engine gets the new weights."""
    total_training_steps: Count = 0
    """Training steps. 0: total_epochs decides."""
    total_epochs: Positive = 1
    """Passes over the training rows, when total_training_steps is 0."""
    critic_warmup: Count = 0
    """First training steps in which only the critic is updated."""
    save_freq: Count = 20
    """Steps between checkpoints. 0: only at the end; a run that is killed before begins anew."""
    max_ckpt_to_keep: Annotated[int, Field(ge=2, le=MOST)] = 2
    """Whole checkpoints kept, the weights before step 1 among them while there are fewer."""
    max_step_tries: Positive = 5
    """Tries at one step's groups, over all restarts, before the run ends and names them."""
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
    max_loop_lag_s: Seconds = 1.0
    """Seconds that the event loop may stand still before the log says in which call."""
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
