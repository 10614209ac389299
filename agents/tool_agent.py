"""tool_agent: turns and tool calls until the policy answers or a budget ends.

Place: an AgentLoop: sample a turn -> parse -> run its calls -> render the answers -> next turn.

Invariants:
1. A turn stops where its call ends (or, with parallel calls, where it would write a tool's answer itself): text that the model
   writes as if it were the tool is never taken for the tool's.
2. A tool's answer is committed whole or not at all, and only where a further token can be sampled after it.
3. Budgets are separate: tokens a turn, tokens a trajectory, turns, tool calls, malformed calls; seconds belong to the session.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.agents.loop import AgentLoopOutput, SessionContext, StopCause, output_of
from asyncrl.agents.resuming import KeptTurn
from asyncrl.agents.single_turn import out_of_room, turn_budget, why_ended
from asyncrl.agents.token_builder import TokenBuilder
from asyncrl.agents.tool_calls import ParsedTurn, ParseError, ToolCall
from asyncrl.agents.tool_runner import Outcome
from asyncrl.ports import Generation, Json, Messages, Prompt, StopReason

MAX_CONTINUATIONS = 8
"""Times that one turn goes on after a close tag inside an argument; each costs a generate call, and a page of them is babble."""
LONG_ANSWER_CHARS = 1024
"""Above this many characters the answers of a turn are tokenised off the loop (up to 1 ms on it)."""
LONG_TURN_TOKENS = 1024
"""Above this many tokens a turn is decoded and parsed off the loop."""
MAX_CHARS_PER_TOKEN = 512
"""No vocabulary known to us has a longer token: an answer above this many characters a token of room is not even tokenised."""


class ToolAgent:
    """The loop; what one session remembers is in `_Session`, and all of it is in the turns that it keeps."""

    can_resume = True

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        session = _Session(prompt=prompt, context=context, builder=context.new_builder())
        stop = session.take_up(context.kept)
        while stop is None:
            stop = await session.take_turn()
            await session.keep_turn(stop)
        return [session.output(stop)]


@dataclass(slots=True, kw_only=True)
class _Session:
    prompt: Prompt
    context: SessionContext
    builder: TokenBuilder
    messages: Messages = field(default_factory=list)
    num_kept: int = 0
    """Messages that are kept already."""
    num_turns: int = 0
    num_tool_calls: int = 0
    num_parse_errors: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def take_up(self, kept: Sequence[KeptTurn]) -> StopCause | None:
        """Be where the session was after its kept turns. Returns why it had ended, None when it goes on."""
        if not kept:
            return None
        last = kept[-1].state
        self.messages = [message for turn in kept for message in turn.state["messages"]]
        self.num_kept, self.num_turns = len(self.messages), len(kept)
        self.num_tool_calls, self.num_parse_errors = last["num_tool_calls"], last["num_parse_errors"]
        self.outcomes = Counter(last["tool_outcomes"])
        return StopCause(last["stop_reason"]) if last["stop_reason"] else None

    async def take_turn(self) -> StopCause | None:
        """One turn and the answers to its calls. Returns why the session ends, None when it goes on."""
        parsed, generation = await self._sample()
        calls = parsed.calls if self.context.agent.parallel_tool_calls else parsed.calls[:1]
        if not calls:
            return why_ended(generation.stop_reason, self.context, self.builder)
        if self.num_turns >= self.context.agent.max_turns:
            return StopCause.MAX_TURNS
        if self.context.room(self.builder) <= 1:
            return out_of_room(self.context, self.builder)
        self.num_parse_errors += sum(isinstance(call, ParseError) for call in calls)
        if self.num_parse_errors > self.context.agent.max_parse_errors:
            return StopCause.MAX_PARSE_ERRORS
        return await self._commit(await self._answer_all(calls))

    async def keep_turn(self, stop: StopCause | None) -> None:
        """Keep what the last turn added."""
        messages, self.num_kept = self.messages[self.num_kept :], len(self.messages)
        stopped = "" if stop is None else str(stop)
        await self.context.keep(self.num_turns - 1, self.builder, messages=messages, stop_reason=stopped, **self._counts_so_far())

    def _counts_so_far(self) -> dict[str, Json]:
        return {
            "num_tool_calls": self.num_tool_calls,
            "num_parse_errors": self.num_parse_errors,
            "tool_outcomes": dict(self.outcomes),
        }

    # --- a turn -----------------------------------------------------------------------------------------------------------------

    async def _sample(self) -> tuple[ParsedTurn, Generation]:
        """Sample a turn; where it stopped at a close tag that belongs to an argument, go on in the same turn."""
        ids: list[int] = []
        budget = turn_budget(self.context, self.builder)
        stop_ids, stop_strings = self._stops()
        for _ in range(1 + MAX_CONTINUATIONS):
            generation = await self.context.generate(
                self.prompt,
                self.builder,
                turn=self.num_turns,
                position=len(ids),
                max_tokens=budget - len(ids),
                stop_token_ids=stop_ids,
                stop_strings=stop_strings,
            )
            ids += generation.token_ids
            parsed = await self._parse(ids)
            if not (parsed.is_open and self._can_go_on(generation, budget - len(ids))):
                break
        self.num_turns += 1
        self.messages.append({"role": "assistant", "content": self.context.template.decode(ids, skip_special=True)})
        return parsed, generation

    async def _parse(self, ids: list[int]) -> ParsedTurn:
        parse, decode = self.context.tool_format.parse, self.context.template.decode_turn
        if len(ids) > LONG_TURN_TOKENS:
            return await self.context.world.offload(lambda: parse(decode(ids)), pool="files")
        return parse(decode(ids))

    def _can_go_on(self, generation: Generation, room: int) -> bool:
        ended = not generation.token_ids or generation.token_ids[-1] in self.context.template.stop_token_ids
        return generation.stop_reason is StopReason.STOP and not ended and room > 0

    def _stops(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The tag as a stop token where it is one token of the model's, as a stop string otherwise."""
        parallel = self.context.agent.parallel_tool_calls
        tag = self.context.tool_format.response_tag if parallel else self.context.tool_format.close_tag
        token = self.context.template.token_id(tag)
        ends = self.context.template.stop_token_ids
        return (ends, (tag,)) if token is None else ((*ends, token), ())

    # --- its calls --------------------------------------------------------------------------------------------------------------

    async def _answer_all(self, calls: tuple[ToolCall | ParseError, ...]) -> Messages:
        """Answers in the order of the calls, which run at the same time."""
        allowed = [self._count_call(call) for call in calls]
        if len(calls) == 1:  # most turns: no task of its own, and no turn of the loop before the tool starts
            return [await self._answer(calls[0], allowed=allowed[0])]
        async with asyncio.TaskGroup() as together:
            tasks = [together.create_task(self._answer(call, allowed=may)) for call, may in zip(calls, allowed, strict=True)]
        # A task that was cancelled from inside raises here; the group itself passes over it.
        return [task.result() for task in tasks]

    def _count_call(self, call: ToolCall | ParseError) -> bool:
        """Does the budget of calls allow this one? It is counted if so."""
        if isinstance(call, ParseError) or self.num_tool_calls >= self.context.agent.max_tool_calls:
            return False
        self.num_tool_calls += 1
        return True

    async def _answer(self, call: ToolCall | ParseError, *, allowed: bool) -> dict[str, Json]:
        if isinstance(call, ParseError):
            return {"role": "tool", "content": f"error: {call.message}"}
        if not allowed:
            limit = self.context.agent.max_tool_calls
            return {"role": "tool", "name": call.name, "content": f"error: no more than {limit} tool calls; answer now"}
        answer = await self.context.call_tool(call, self.prompt.tools_kwargs)
        self.outcomes[str(answer.outcome)] += 1
        return {"role": "tool", "name": call.name, "content": answer.text}

    async def _commit(self, answers: Messages) -> StopCause | None:
        room, chars = self.context.room(self.builder), sum(len(answer["content"]) for answer in answers)
        if chars > MAX_CHARS_PER_TOKEN * room:
            return StopCause.RESULT_TOO_LONG
        ids = await self._environment_ids(answers, chars)
        if self.builder.environment_cost(ids) >= room:
            return StopCause.RESULT_TOO_LONG
        self.builder.add_environment(ids)
        self.messages += answers
        return None

    async def _environment_ids(self, answers: Messages, chars: int) -> list[int]:
        render = self.context.template.environment_ids
        if chars > LONG_ANSWER_CHARS:
            return await self.context.world.offload(render, answers, pool="files")
        return render(answers)

    def output(self, stop: StopCause) -> AgentLoopOutput:
        return output_of(
            self.builder,
            num_turns=self.num_turns,
            stop=stop,
            messages=self.messages,
            used_tool=self.outcomes[Outcome.OK] > 0,
            **self._counts_so_far(),
        )
