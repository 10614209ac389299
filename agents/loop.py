"""What an agent loop is, what it is given, and what it gives back.

Place: session -> AgentLoop.run(prompt, context) -> list[AgentLoopOutput] -> reward -> trajectory rows. A loop holds no state
between sessions: one object serves all of them at once.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from asyncrl.agents.alarm import Alarm
from asyncrl.agents.live import Live
from asyncrl.agents.resuming import KeptTurn
from asyncrl.agents.token_builder import TokenBuilder
from asyncrl.agents.tool_calls import ToolCall, ToolCallFormat
from asyncrl.agents.tool_runner import Outcome, ToolAnswer, ToolRunner
from asyncrl.config import AgentConfig
from asyncrl.errors import PromptTooLongError
from asyncrl.observe.spans import NO_SPAN
from asyncrl.ports import (
    GenerateRequest,
    Generation,
    IncidentKind,
    Json,
    Prompt,
    Report,
    RolloutEngine,
    SamplingParams,
    Span,
    SpanKind,
    Template,
    World,
    ignore_incident,
)


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
    live: Live
    """What the session is at, for reports."""
    report: Report = ignore_incident
    span: Span = NO_SPAN
    """The session's, for the trace."""
    keep_turn: KeepTurn | None = None
    """Where turns are kept until the session settles."""
    kept: tuple[KeptTurn, ...] = ()
    """Turns that were kept before a restart, for a loop with `can_resume`: the session goes on with the next one, or, when the last
    of these had ended it, not at all."""

    def new_builder(self) -> TokenBuilder:
        """With the tokens of the kept turns."""
        builder = TokenBuilder(self.prompt_ids, end_token_id=self.template.end_token_id)
        for turn in self.kept:
            builder.add_kept(turn.ids, turn.mask, turn.log_probs, turn.versions)
        return builder

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
        engine counts the positions of each call from 0. Raises PromptTooLongError, EngineError, or DeadlineError when the engine
        makes no step for `request_timeout_s`; the call itself may take as long as the session.
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
            session=f"{prompt.uid}_{self.session_id}",
        )
        self.live.turn = turn
        with self.span.span(SpanKind.TURN, f"turn {turn}") as span, self.live.at("generate"):
            async with Alarm(self.request_timeout_s, self._listen(request.request_id)):
                generation = await self.engine.generate(request)
            if span.is_traced:
                span.note(**_facts_of(request, generation))
        builder.add_sampled(generation)
        return generation

    def _listen(self, request_id: str) -> Callable[[], str]:
        """For the alarm: has the engine made a step since the last look? It looks once in `request_timeout_s`, so what stands is
        told after one to two of them."""
        heard = self.engine.beats

        def look() -> str:
            nonlocal heard
            before, heard = heard, self.engine.beats
            if heard > before:
                return ""
            limit = "rollout.request_timeout_s"
            text = f"generate call {request_id}: the engine has made no step for {limit} = {self.request_timeout_s:g} s"
            self.report(self.live.incident(IncidentKind.DEADLINE, "generate", text, limit=limit))
            return text

        return look

    async def keep(self, turn: int, builder: TokenBuilder, **state: Json) -> None:
        """Keep turn `turn` (from 0) with its tools' answers: the tokens that are new in `builder`, and what else the loop would
        need to go on after it. Returns when a crash can no longer take them."""
        if self.keep_turn is not None:
            with self.live.at("keep"):
                await self.keep_turn(turn, {**builder.take_new(), "extra_fields": state})

    async def call_tool(self, call: ToolCall, tools_kwargs: dict[str, Json]) -> ToolAnswer:
        """Run a tool. Raises infrastructure errors and cancellation only."""
        with self.span.span(SpanKind.TOOL, call.name) as span, self.live.at(f"tool {call.name[:80]}"):
            answer = await self.tools.run(call, tools_kwargs)
            span.note(outcome=str(answer.outcome))
            if answer.outcome is Outcome.TIMEOUT:
                self.report(self.live.incident(IncidentKind.DEADLINE, "tool", answer.text, limit="agent.tool_timeout_s"))
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
    """One session of a prompt. Several outputs are several trajectories of the session (a forked history).

    A loop that goes on from `context.kept` has an attribute `can_resume = True`; any other begins again after a restart.
    """

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
