"""Conversations as the trajectories that a policy with these turns would have.

rows -> [conversations] -> warm_start. Invariants:
1. Ids come from the same ChatTemplate and TokenBuilder as a rollout's: a policy learns on what it will be asked to continue.
2. Only what a policy would sample is learned. Generation stops at the end of a call, so a turn with one call ends there and its end
   token belongs to the environment; every other turn ends with the end token, which is learned.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrl.agents.chat_template import ChatTemplate
from asyncrl.agents.token_builder import TokenBuilder, as_sampled
from asyncrl.config import SFTRun
from asyncrl.dataset import SourceRow, check_messages, read_table
from asyncrl.errors import DataError, ModelError
from asyncrl.ports import Json, Messages


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
        builder.add_sampled(as_sampled(_turn_ids(message, template)))
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
