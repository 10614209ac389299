"""single_turn: one generate call a session; no tools.

Place: an AgentLoop. Prompt -> answer, within the smaller of the turn's and the trajectory's budget.
"""

from asyncrl.agents.loop import AgentLoopOutput, SessionContext, StopCause, output_of
from asyncrl.agents.token_builder import TokenBuilder
from asyncrl.ports import Messages, Prompt, StopReason


class SingleTurn:
    """Samples once and stops. A session whose turn is kept has ended."""

    can_resume = True

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        builder = context.new_builder()
        for turn in context.kept:
            stop = StopCause(turn.state["stop_reason"])
            return [output_of(builder, num_turns=1, stop=stop, messages=turn.state["messages"])]
        generation = await context.generate(
            prompt,
            builder,
            turn=0,
            max_tokens=turn_budget(context, builder),
            stop_token_ids=context.template.stop_token_ids,
        )
        text = context.template.decode(generation.token_ids, skip_special=True)
        stop = why_ended(generation.stop_reason, context, builder)
        messages: Messages = [{"role": "assistant", "content": text}]
        await context.keep(0, builder, messages=messages, stop_reason=str(stop))
        return [output_of(builder, num_turns=1, stop=stop, messages=messages)]


def turn_budget(context: SessionContext, builder: TokenBuilder) -> int:
    """New tokens that the next turn may take."""
    room = context.room(builder)
    return min(room, context.agent.max_tokens_per_turn) if context.agent.max_tokens_per_turn else room


def why_ended(reason: StopReason, context: SessionContext, builder: TokenBuilder) -> StopCause:
    """Why a session ends with a turn that holds no call."""
    if reason is StopReason.STOP:
        return StopCause.ANSWER
    if context.room(builder) > 0 and reason is StopReason.LENGTH:
        return StopCause.TURN_LENGTH
    return out_of_room(context, builder)


def out_of_room(context: SessionContext, builder: TokenBuilder) -> StopCause:
    return StopCause.CONTEXT if context.is_context_bound(builder) else StopCause.LENGTH
