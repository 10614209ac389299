"""What an agent loop is, what it is given, and what it gives back.

Place: session -> AgentLoop.run(prompt, context) -> list[AgentLoopOutput] -> reward -> trajectory rows. A loop holds no state
between sessions: one object serves all of them at once.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from asyncrl.agents.token_builder import TokenBuilder
from asyncrl.agents.tool_calls import ToolCall, ToolCallFormat
from asyncrl.agents.tool_runner import ToolAnswer, ToolRunner
from asyncrl.config import AgentConfig
from asyncrl.errors import PromptTooLongError
from asyncrl.observe.spans import NO_SPAN
from asyncrl.ports import (
    GenerateRequest,
    Generation,
    Json,
    Prompt,
    RolloutEngine,
    SamplingParams,
    Span,
    SpanKind,
    Template,
    World,
)
from asyncrl.waiting import within


class StopCause(StrEnum):
    """Why a session ended; `extra_fields["stop_reason"]`. What is the model's fault is scored as it stands."""

    ANSWER = "stop"  # the policy ended a turn without a call
    LENGTH = "length"  # data.max_response_length
    TURN_LENGTH = "turn_length"  # agent.max_tokens_per_turn, in a turn without a call
    CONTEXT = "context"  # the engine's context
    MAX_TURNS = "max_turns"
    MAX_PARSE_ERRORS = "max_parse_errors"
    RESULT_TOO_LONG = "tool_result_too_long"  # committed whole or not at all: it did not fit into what was left


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoopOutput:
    """One trajectory. Columns of the response have one length; mask 1 on sampled tokens; log-prob 0 and version -1 elsewhere.

    extra_fields: JSON values. Built-in loops write `stop_reason`, `messages` (the conversation after the prompt, as text),
    `num_tool_calls`, `used_tool`, `num_parse_errors`, `tool_outcomes`; a session adds `reward_extra_info`.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    response_logprobs: tuple[float, ...]
    token_versions: tuple[int, ...]
    num_turns: int
    """Assistant turns."""
    reward_score: float | None = None
    """Set by the session from the scorer; a loop that sets it itself is not scored again."""
    extra_fields: dict[str, Json] = field(default_factory=dict)

    @property
    def policy_len(self) -> int:
        return sum(self.response_mask)

    @property
    def last_assistant_text(self) -> str:
        """Content of the last assistant message in `extra_fields["messages"]`."""
        said = [message["content"] for message in self.extra_fields.get("messages", ()) if message["role"] == "assistant"]
        return said[-1] if said else ""


KeepTurn = Callable[[int, dict[str, Json]], Awaitable[None]]
"""(turn, fields of the catalogue): keeps a turn of one session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionContext:
    """What a loop may use. `sampling` has no stop tokens and no budget yet: those belong to each turn."""

    session_id: int
    engine: RolloutEngine
    template: Template
    tools: ToolRunner
    tool_format: ToolCallFormat
    world: World
    agent: AgentConfig
    sampling: SamplingParams
    max_response_length: int
    request_timeout_s: float
    prompt_ids: tuple[int, ...]
    """The prompt, rendered once for all sessions of the group."""
    span: Span = NO_SPAN
    """The session's, for the trace."""
    keep_turn: KeepTurn | None = None
    """Where turns are kept until the session settles."""

    def new_builder(self) -> TokenBuilder:
        return TokenBuilder(self.prompt_ids, end_token_id=self.template.end_token_id)

    def room(self, builder: TokenBuilder) -> int:
        """Tokens that the trajectory may still grow by: the smaller of its budget and what the engine's context holds."""
        return min(self.max_response_length, self.engine.context_len - len(builder.prompt_ids)) - len(builder)

    def is_context_bound(self, builder: TokenBuilder) -> bool:
        """Is it the engine's context, not the trajectory's budget, that ends first?"""
        return self.engine.context_len - len(builder.prompt_ids) < self.max_response_length

    async def generate(
        self,
        prompt: Prompt,
        builder: TokenBuilder,
        *,
        turn: int,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        stop_strings: tuple[str, ...] = (),
        position: int = 0,
    ) -> Generation:
        """Sample into `builder`. `turn` counts from 0; `position` is where in the turn this call begins, when it continues one.

        The seed is (run, "sample", uid, session, turn), so that a retry samples the same; a continuation has its own, since an
        engine counts the positions of each call from 0. Raises PromptTooLongError, EngineError, or DeadlineError.
        """
        if max_tokens < 1:
            raise PromptTooLongError(
                f"session {prompt.uid}_{self.session_id}: {len(builder.prompt_ids)} prompt tokens leave no room for a new one"
            )
        parts = ("sample", prompt.uid, self.session_id, turn)
        request = GenerateRequest(
            request_id="_".join(map(str, [prompt.uid, self.session_id, turn, *([position] if position else [])])),
            prompt_ids=builder.context_ids,
            sampling=replace(self.sampling, max_tokens=max_tokens, stop_token_ids=stop_token_ids, stop_strings=stop_strings),
            seed=self.world.seed(*parts, *(("position", position) if position else ())),
        )
        limit_s = self.request_timeout_s
        with self.span.span(SpanKind.TURN, f"turn {turn}") as span:
            async with within(limit_s, lambda: f"generate call {request.request_id} took longer than {limit_s:g} s"):
                generation = await self.engine.generate(request)
            if span.is_traced:
                span.note(**_facts_of(request, generation))
        builder.add_sampled(generation)
        return generation

    async def keep(self, turn: int, builder: TokenBuilder, **state: Json) -> None:
        """Keep turn `turn` (from 0) with its tools' answers: the tokens that are new in `builder`, and what else the loop would
        need to go on after it. Returns when a crash can no longer take them."""
        if self.keep_turn is not None:
            await self.keep_turn(turn, {**builder.take_new(), "extra_fields": state})

    async def call_tool(self, call: ToolCall, tools_kwargs: dict[str, Json]) -> ToolAnswer:
        """Run a tool. Raises infrastructure errors and cancellation only."""
        with self.span.span(SpanKind.TOOL, call.name) as span:
            answer = await self.tools.run(call, tools_kwargs)
            span.note(outcome=str(answer.outcome))
        return answer


def _facts_of(request: GenerateRequest, generation: Generation) -> dict[str, Json]:
    """What the trace says of a generate call."""
    return {
        "prompt_tokens": len(request.prompt_ids),
        "tokens": len(generation.token_ids),
        "versions": sorted({span.version for span in generation.version_spans}),
        "stop_reason": str(generation.stop_reason),
    }


class AgentLoop(Protocol):
    """One session of a prompt. Several outputs are several trajectories of the session (a forked history)."""

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        """What it raises fails the session; what the model does wrong is data on the trajectory."""
        ...


def output_of(
    builder: TokenBuilder, *, num_turns: int, stop: StopCause, messages: list[dict[str, Json]], **extra_fields: Json
) -> AgentLoopOutput:
    """The finished trajectory of a builder."""
    return AgentLoopOutput(
        prompt_ids=builder.prompt_ids,
        response_ids=builder.response_ids,
        response_mask=builder.response_mask,
        response_logprobs=builder.log_probs,
        token_versions=builder.versions,
        num_turns=num_turns,
        extra_fields={"stop_reason": str(stop), "messages": messages, **extra_fields},
    )
