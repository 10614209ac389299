"""run_session: one session from prompt to scored trajectories, or to a failure with its class. Writes nothing anywhere.

Place: runner, evaluation -> [session] -> AgentLoop, RewardScorer. The deadline of the session covers its turns, tools and reward.

Invariants:
1. It ends within `agent.timeout_s`, with outputs that all have a reward, or with a failure; never with an invented reward. A loop
   or reward that holds on to its cancellation is left behind.
2. A cancellation that nobody asked for (a tool or client that raises CancelledError) is a failure; one that was asked for goes on.
"""

import asyncio
import re
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.agents.guests import Guests
from asyncrl.agents.live import Live
from asyncrl.agents.loop import AgentLoop, AgentLoopOutput, KeepTurn, SessionContext
from asyncrl.agents.registry import load_agent_loop
from asyncrl.agents.resuming import KeptTurn
from asyncrl.agents.tool_calls import ToolCallFormat, tool_call_format
from asyncrl.agents.tool_runner import ToolRunner
from asyncrl.config import TrainRun
from asyncrl.errors import DeadlineError, EmptySessionError, FieldError, PromptTooLongError, TaskEndedError
from asyncrl.observe.spans import untraced
from asyncrl.ports import (
    FailureClass,
    IncidentKind,
    Json,
    Prompt,
    Report,
    RewardRequest,
    RewardResult,
    RewardScorer,
    RolloutEngine,
    SamplingParams,
    SessionSpan,
    Span,
    SpanKind,
    Template,
    World,
    ignore_incident,
)
from asyncrl.waiting import is_asked_to_end
from asyncrl.wording import first_of, message_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailure:
    """Why a session failed: whose fault, the error's class, its message, and where it was raised."""

    kind: FailureClass
    error: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.error} ({self.kind}): {self.message}{f' [{self.where}]' if self.where else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """Scored trajectories, or a failure; never both and never neither."""

    session_id: int
    outputs: tuple[AgentLoopOutput, ...] = ()
    failure: SessionFailure | None = None

    def __post_init__(self) -> None:
        assert bool(self.outputs) != (self.failure is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What all sessions of a run, or of an evaluation, share."""

    loop: AgentLoop
    engine: RolloutEngine
    scorer: RewardScorer
    template: Template
    tools: ToolRunner
    tool_format: ToolCallFormat
    sampling: SamplingParams
    run: TrainRun
    world: World
    guests: Guests = field(default_factory=Guests)
    """The sessions under way; whoever made the parts closes them in the end."""
    session_span: SessionSpan = untraced
    report: Report = ignore_incident
    """Told of each deadline that passes in a session."""

    def context(
        self,
        live: Live,
        prompt_ids: tuple[int, ...],
        span: Span,
        keep_turn: KeepTurn | None,
        kept: tuple[KeptTurn, ...] = (),
    ) -> SessionContext:
        return SessionContext(
            session_id=live.session_id,
            engine=self.engine,
            template=self.template,
            tools=self.tools,
            tool_format=self.tool_format,
            world=self.world,
            agent=self.run.agent,
            sampling=self.sampling,
            max_response_length=self.run.data.max_response_length,
            request_timeout_s=self.run.rollout.request_timeout_s,
            prompt_ids=prompt_ids,
            live=live,
            report=self.report,
            span=span,
            keep_turn=keep_turn,
            kept=kept,
        )


def session_parts(
    run: TrainRun,
    *,
    engine: RolloutEngine,
    scorer: RewardScorer,
    template: Template,
    tools: ToolRunner,
    world: World,
    sampling: SamplingParams | None = None,
    session_span: SessionSpan = untraced,
    report: Report = ignore_incident,
) -> SessionParts:
    """The shared parts by configuration. `sampling` None: that of training. Raises ConfigError for an unknown loop or format."""
    rollout = run.rollout
    trained = SamplingParams(temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p)
    return SessionParts(
        loop=load_agent_loop(run.agent.name),
        engine=engine,
        scorer=scorer,
        template=template,
        tools=tools,
        tool_format=tool_call_format(run.agent.tool_format),
        sampling=sampling or trained,
        run=run,
        world=world,
        session_span=session_span,
        report=report,
    )


async def run_session(
    prompt: Prompt,
    session_id: int,
    parts: SessionParts,
    *,
    prompt_ids: tuple[int, ...] | None = None,
    keep_turn: KeepTurn | None = None,
    kept: tuple[KeptTurn, ...] = (),
    live: Live | None = None,
) -> SessionResult:
    """Run and score one session. `prompt_ids`: the rendered prompt, when the caller has it already. `keep_turn`: where its turns
    are kept until it settles; None: nowhere. `kept`: turns to go on from. `live`: told what it is at.

    Raises CancelledError only when its task was asked to end; everything else is in the result.
    """
    live = live or Live(prompt.uid, session_id, parts.world.now)
    with parts.session_span(prompt.uid, session_id) as span:
        running = _run(prompt, parts, prompt_ids, live, span, keep_turn, kept)
        result = await _end(running, parts, live)
        if span.is_traced:
            span.note(outcome="" if result.failure is None else result.failure.error, **_facts_of(result))
    return result


async def _end(session: Coroutine[Any, Any, tuple[AgentLoopOutput, ...]], parts: SessionParts, live: Live) -> SessionResult:
    name, timeout_s = f"session {live.uid}_{live.session_id}", parts.run.agent.timeout_s
    try:
        outputs = await parts.guests.run(session, name=name, timeout_s=timeout_s, limit="agent.timeout_s")
    except asyncio.CancelledError as error:
        if is_asked_to_end():
            raise
        return _failed(live.session_id, error, "cancelled from inside")
    except Exception as error:  # whatever it is, it costs this session and is told by its class
        if isinstance(error, DeadlineError) and not live.has_ended:
            text = f"{error}: {live.describe()}"
            parts.report(live.incident(IncidentKind.DEADLINE, "session", text, limit="agent.timeout_s"))
        return _failed(live.session_id, error)
    return SessionResult(session_id=live.session_id, outputs=outputs)


async def _run(
    prompt: Prompt,
    parts: SessionParts,
    prompt_ids: tuple[int, ...] | None,
    live: Live,
    span: Span,
    keep_turn: KeepTurn | None,
    kept: tuple[KeptTurn, ...],
) -> tuple[AgentLoopOutput, ...]:
    try:
        if prompt_ids is None:
            prompt_ids = tuple(await parts.world.offload(parts.template.prompt_ids, prompt.messages))
        outputs = await parts.loop.run(prompt, parts.context(live, prompt_ids, span, keep_turn, kept))
        if not outputs:
            raise EmptySessionError(f"agent loop {parts.run.agent.name!r} gave no trajectory")
        for output in outputs:
            check_output(output)
        return await _scored(outputs, prompt, parts, live, span)
    finally:
        live.has_ended = True


def check_output(output: AgentLoopOutput) -> None:
    """Columns of one length, at least one sampled token. Raises FieldError or EmptySessionError."""
    lengths = {
        "response_ids": len(output.response_ids),
        "response_mask": len(output.response_mask),
        "response_logprobs": len(output.response_logprobs),
        "token_versions": len(output.token_versions),
    }
    if len(set(lengths.values())) != 1:
        raise FieldError(f"columns of a trajectory differ in length: {lengths}")
    if not output.policy_len:
        raise EmptySessionError("the policy sampled no token")


async def _scored(
    outputs: Sequence[AgentLoopOutput], prompt: Prompt, parts: SessionParts, live: Live, session: Span
) -> tuple[AgentLoopOutput, ...]:
    """The last trajectory is scored, once, and the others of the session carry the same score, except where the loop set one."""
    *_, last = outputs
    if last.reward_score is None:
        with session.span(SpanKind.REWARD, "reward") as span, live.at("reward"):
            result = await _score(reward_request(outputs, prompt), parts, live)
            span.note(score=result.score)
        last = _with(last, result.score, result.extra)
    score, extra = last.reward_score, last.extra_fields.get("reward_extra_info")
    assert score is not None
    return tuple(output if output.reward_score is not None else _with(output, score, extra) for output in (*outputs[:-1], last))


async def _score(request: RewardRequest, parts: SessionParts, live: Live) -> RewardResult:
    try:
        return await parts.scorer.score(request)
    except DeadlineError as error:
        parts.report(live.incident(IncidentKind.DEADLINE, "reward", str(error), limit=_key_in(str(error))))
        raise


def _key_in(text: str) -> str:
    """The key of `[reward]` whose limit the message of a deadline names."""
    found = re.search(r"\breward\.[a-z_.]*[a-z]", text)
    return "" if found is None else found[0]


def _with(output: AgentLoopOutput, score: float, extra: dict[str, Json] | None) -> AgentLoopOutput:
    told = {} if extra is None else {"reward_extra_info": extra}
    return replace(output, reward_score=score, extra_fields={**output.extra_fields, **told})


def _facts_of(result: SessionResult) -> dict[str, Json]:
    """What the trace says of a session."""
    if result.failure is not None:
        return {"failure": str(result.failure)}
    last = result.outputs[-1]
    return {"num_turns": last.num_turns, "stop_reason": str(last.extra_fields.get("stop_reason", ""))}


def reward_request(outputs: Sequence[AgentLoopOutput], prompt: Prompt) -> RewardRequest:
    """What the reward function sees of a session: its last trajectory, and the tokens of all."""
    output = outputs[-1]
    told = output.extra_fields
    extra = {
        **prompt.extra_info,
        "num_turns": output.num_turns,
        "num_tool_calls": told.get("num_tool_calls", 0),
        "messages": [*prompt.messages, *told.get("messages", ())],
    }
    return RewardRequest(
        data_source=prompt.data_source,
        solution_str=output.last_assistant_text,
        ground_truth=prompt.ground_truth,
        extra_info=extra,
        response_len=sum(len(row.response_ids) for row in outputs),
    )


# --- failures ---------------------------------------------------------------------------------------------------------------------


def _failed(session_id: int, error: BaseException, message: str = "") -> SessionResult:
    return SessionResult(session_id=session_id, failure=failure_of(error, message))


def failure_of(error: BaseException, message: str = "") -> SessionFailure:
    """Class, name and message of an error; of a group of errors, of its first."""
    error = first_of(error)
    text = (message or message_of(error) or type(error).__name__).encode(errors="backslashreplace").decode()  # it becomes a tag
    return SessionFailure(kind=class_of(error), error=type(error).__name__, message=text, where=_place(error))


def class_of(error: BaseException) -> FailureClass:
    """Whose fault it is. What is not known to be the model's or its task's is the machinery's, a cancellation included."""
    if isinstance(error, TaskEndedError):
        return FailureClass.TASK
    return FailureClass.MODEL if isinstance(error, (PromptTooLongError, EmptySessionError)) else FailureClass.INFRA


def _place(error: BaseException) -> str:
    """File and line of the innermost frame, without the folder."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return "" if last is None else f"{last.tb_frame.f_code.co_filename.rpartition('/')[2]}:{last.tb_lineno}"
