"""Supervised warm start: learn the assistant turns of conversations, as the very ids that a rollout would have.

    rows -> conversations -> ids and mask -> batches -> micro-batches -> AdamW -> <run folder>/hf

Invariants:
1. Ids come from the same ChatTemplate and TokenBuilder as a rollout's: a policy learns on what it will be asked to continue.
2. Only what a policy would sample is learned. Generation stops at the end of a call, so a turn with one call ends there and its end
   token belongs to the environment; every other turn ends with the end token, which is learned.
3. The loss is the mean over the assistant tokens of a whole batch, however the batch is split into micro-batches.
4. A stop request ends the run after the update in flight; what was learned so far is exported.
"""

import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from asyncrl.agents.chat_template import ChatTemplate, load_chat_template
from asyncrl.agents.token_builder import TokenBuilder
from asyncrl.config import SFTConfig, SFTRun
from asyncrl.dataset import SourceRow, check_messages, read_table
from asyncrl.errors import DataError, ModelError
from asyncrl.observe.metrics import MetricsLog
from asyncrl.observe.run_folder import RunFolder, create_run_folder
from asyncrl.ports import Generation, Json, Messages, StopReason, VersionSpan
from asyncrl.stopping import Stop, on_signals
from asyncrl.tools import load_tools
from asyncrl.training.export import export_model
from asyncrl.training.learner import Learner
from asyncrl.training.microbatch import pack_micro_batches
from asyncrl.training.token_batch import token_batch
from asyncrl.world import RealWorld, derive_seed

log = logging.getLogger(__name__)

# --- conversations to ids ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """input_ids: int64 [L]. mask: bool [R], True on learned tokens among the last R, as `token_batch` takes it."""

    input_ids: torch.Tensor
    mask: torch.Tensor


def encode_conversation(messages: Messages, template: ChatTemplate) -> Conversation:
    """A conversation as the trajectory that a policy with these turns would have.

    Raises DataError when it does not begin with another role and end with an assistant message, or has two of them in a row.
    """
    first = _first_assistant(messages)
    builder = TokenBuilder(template.prompt_ids(messages[:first]), end_token_id=template.end_token_id)
    environment: Messages = []
    for message in messages[first:]:
        if message["role"] != "assistant":
            environment.append(message)
            continue
        if environment:
            builder.add_environment(template.environment_ids(environment))
        elif len(builder):
            raise DataError("two assistant messages follow one another; join them")
        environment = []
        builder.add_sampled(_as_sampled(_turn_ids(message, template)))
    return Conversation(
        input_ids=torch.tensor(builder.context_ids, dtype=torch.int64),
        mask=torch.tensor(builder.response_mask, dtype=torch.bool),
    )


def _first_assistant(messages: Messages) -> int:
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        raise DataError(f"the conversation ends with a message of role {roles[-1]!r}; the last one must be the assistant's")
    if roles[0] == "assistant":
        raise DataError("the conversation begins with an assistant message; something must come before it")
    return roles.index("assistant")


def _turn_ids(message: dict[str, Json], template: ChatTemplate) -> list[int]:
    calls = message.get("tool_calls") or []
    text = "\n".join(part for part in (message["content"], *map(_hermes, calls)) if part)
    return template.encode_assistant(text, end=len(calls) != 1)


def _hermes(call: Json) -> str:
    """A call as the policy is to write it."""
    try:
        function = call["function"]
        content = {"name": function["name"], "arguments": _arguments(function["arguments"])}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError('a tool call must be {"function": {"name": ..., "arguments": {...}}}') from error
    return f"<tool_call>\n{json.dumps(content, ensure_ascii=False)}\n</tool_call>"


def _arguments(arguments: Json) -> Json:
    """An object; the OpenAI form writes it as JSON text."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_sampled(ids: list[int]) -> Generation:
    span = VersionSpan(start=0, end=len(ids), version=0)
    return Generation(token_ids=ids, log_probs=[0.0] * len(ids), version_spans=[span], stop_reason=StopReason.STOP)


def load_stages(run: SFTRun, template: ChatTemplate) -> list[list[Conversation]]:
    """The conversations of each stage. Raises DataError that names file and row."""
    if not run.sft.stages:
        return [_encode_files(run, run.data.train_files, "data.train_files", template)]
    return [_encode_files(run, files, "sft.stages", template) for files in run.sft.stages]


def _encode_files(run: SFTRun, files: Sequence[str], key: str, template: ChatTemplate) -> list[Conversation]:
    return [_encode_row(row, run, template) for row in read_table(files, key=key)]


def _encode_row(row: SourceRow, run: SFTRun, template: ChatTemplate) -> Conversation:
    key = run.data.messages_key
    if key not in row.values:
        raise DataError(f"{row.place}: no column {key!r} (data.messages_key); columns: {', '.join(sorted(row.values))}")
    messages = [_with_text(message) for message in check_messages(row.values[key], place=row.place, key=key)]
    try:
        conversation = encode_conversation(messages, template)
    except (DataError, ModelError) as error:
        raise DataError(f"{row.place}: {key}: {error}") from error
    if len(conversation.input_ids) > run.sft.max_length:
        raise DataError(
            f"{row.place}: {key} has {len(conversation.input_ids)} tokens, more than sft.max_length = {run.sft.max_length}"
        )
    return conversation


def _with_text(message: dict[str, Json]) -> dict[str, Json]:
    """Content as one string: templates take no null, and not all take parts."""
    content = message.get("content") or ""
    return {**message, "content": content if isinstance(content, str) else "".join(part["text"] for part in content)}


# --- the order of the batches -----------------------------------------------------------------------------------------------------


def plan_stages(sft: SFTConfig) -> list[int]:
    """Steps of each stage; they add up to `sft.total_steps`."""
    count = max(len(sft.stages), 1)
    shares = sft.stage_shares or [1 / count] * count
    ends = [round(sft.total_steps * sum(shares[: stage + 1])) for stage in range(count)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def batches_of(num_rows: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Row numbers of each batch, for ever: every epoch in a new order, and a batch may span two epochs."""
    order = _rows_for_ever(num_rows, seed)
    while True:
        yield [next(order) for _ in range(batch_size)]


def _rows_for_ever(num_rows: int, seed: int) -> Iterator[int]:
    source = random.Random(seed)
    while True:
        yield from source.sample(range(num_rows), num_rows)


# --- learning ---------------------------------------------------------------------------------------------------------------------


class WarmStart:
    """Model, rows and order of one run. Built and called in one thread; `steps` is the run."""

    def __init__(self, run: SFTRun) -> None:
        """Reads rows and model. Raises UserError for what is wrong with them."""
        torch.set_num_threads(run.trainer.num_threads)
        torch.manual_seed(derive_seed(run.trainer.seed, "sft"))
        self._run = run
        schemas = [tool.schema for tool in load_tools(run.agent.tools).values()]
        self._stages = load_stages(run, load_chat_template(run.model, schemas))
        self._learner = Learner(run.model, run.sft.optim, total_updates=run.sft.total_steps)
        self._batches = self._all_batches()

    def _all_batches(self) -> Iterator[tuple[int, list[Conversation]]]:
        for stage, (rows, steps) in enumerate(zip(self._stages, plan_stages(self._run.sft), strict=True)):
            order = batches_of(len(rows), self._run.sft.batch_size, derive_seed(self._run.trainer.seed, "sft", stage))
            for _ in range(steps):
                yield stage, [rows[number] for number in next(order)]

    def step(self) -> dict[str, float]:
        """One optimizer step on the next batch; its metrics."""
        stage, batch = next(self._batches)
        num_tokens = sum(int(row.mask.sum()) for row in batch)
        lengths = [len(row.input_ids) for row in batch]
        loss = 0.0
        for numbers in pack_micro_batches(lengths, self._run.sft.max_token_len_per_gpu):
            loss += self._accumulate([batch[number] for number in numbers], num_tokens)
        report = self._learner.step(lambda: f"stage {stage}, {len(batch)} conversations")
        return {
            "sft/loss": loss,
            "sft/stage": float(stage),
            "sft/lr": report.lr,
            "sft/grad_norm": report.grad_norm,
            "sft/num_tokens": float(sum(lengths)),
            "sft/num_learned_tokens": float(num_tokens),
        }

    def _accumulate(self, rows: Sequence[Conversation], num_tokens: int) -> float:
        """Gradient of one micro-batch's share of the batch's mean."""
        micro = token_batch([row.input_ids for row in rows], [row.mask for row in rows])
        log_probs_n, _ = self._learner.policy(micro)
        loss = -log_probs_n.sum() / num_tokens
        self._learner.backward(loss)
        return float(loss.detach())

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory."""
        policy = self._learner.policy
        export_model(folder, self._learner.snapshot(0).tensors, policy.lm.config.to_json_string(), self._run.model)


# --- the run ----------------------------------------------------------------------------------------------------------------------


async def run_sft(run: SFTRun, *, stop: Stop | None = None) -> Path:
    """Train, and return the run's folder: config.toml, metrics.jsonl and the model in `hf`. Ctrl-C counts as `stop`.

    Raises UserError for what is wrong with files, rows or model, NonFiniteGradientError when updates keep failing.
    """
    stop = stop or Stop()
    async with RealWorld(run_seed=run.trainer.seed) as world:
        with on_signals(stop):
            warm_start = await world.offload(WarmStart, run, pool="model")
            folder = await world.offload(_open_folder, run)
            num_steps = await _learn(run, warm_start, folder, world, stop)
            await world.offload(warm_start.export, folder.export, pool="model")
    if num_steps < run.sft.total_steps:
        log.warning("stopped after %d of %d steps; %s has the model so far", num_steps, run.sft.total_steps, folder.export)
    return folder.path


def _open_folder(run: SFTRun) -> RunFolder:
    folder = create_run_folder(run.trainer.default_local_dir, run.trainer.experiment_name)
    folder.write_config(run)
    return folder


async def _learn(run: SFTRun, warm_start: WarmStart, folder: RunFolder, world: RealWorld, stop: Stop) -> int:
    """All steps, or those before a stop; returns how many."""
    total = run.sft.total_steps
    metrics = await world.offload(partial(MetricsLog, folder, tensorboard=run.trainer.tensorboard))
    with LossBar(total) as bar:
        try:
            for step in range(1, total + 1):
                if stop.is_requested:
                    return step - 1
                numbers = await world.offload(warm_start.step, pool="model")
                await world.offload(metrics.log, step, numbers)
                bar.step(step, numbers["sft/loss"])
        finally:
            await world.offload(metrics.close)
    return total


class LossBar:
    """Progress for the eye, on stderr: a bar on a terminal, elsewhere a line at every twentieth of the way. A context manager."""

    def __init__(self, total: int, *, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = total
        self._bar = Progress(
            TextColumn("warm start"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,  # drawn by nobody's thread
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        text = f"loss {loss:.3f}"
        self._bar.update(self._task, completed=step, description=text, refresh=True)
        if not self._console.is_terminal and (step * 20 // self._total != (step - 1) * 20 // self._total):
            self._console.print(f"warm start step {step}/{self._total}  {text}", markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
