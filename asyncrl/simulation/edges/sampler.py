"""What the policy says, by the scenario's distributions. It depends on (run, uid, session, turn) alone: a retry says the same."""

import zlib
from dataclasses import dataclass

from asyncrl.config.simulation import Scenario
from asyncrl.ports import GenerateRequest, StopReason
from asyncrl.simulation.draws import draw_count, unit
from asyncrl.simulation.edges.template import CALL_LEN, END, NUM_WORDS, WORDS, call_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """num_tokens, num_prompt_tokens: of the model; ids: the share of them that the store holds."""

    ids: list[int]
    num_tokens: int
    num_prompt_tokens: int
    log_prob: float
    stop_reason: StopReason


class Sampler:
    """Answers of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._sessions = scenario.sim.sessions
        self._tools = scenario.sim.tools if scenario.agent.name == "tool_agent" else ()
        self._weight = sum(tool.weight for tool in self._tools)

    def answer(self, request: GenerateRequest, room: int) -> Answer:
        """`room`: ids that the context still holds."""
        seed = request.seed
        uid, session_id, turn = request.request_id.split("_")[:3]
        session = zlib.crc32(f"{uid}_{session_id}".encode())
        calls = bool(self._tools) and int(turn) + 1 < draw_count(self._sessions.turns, unit(session, 4))
        end = call_ids(self._tool(unit(seed, 7)), unit(seed, 8)) if calls else [END]
        num_tokens = draw_count(self._sessions.turn_len, unit(seed, 5))
        wanted = max(CALL_LEN + 1, -(-num_tokens // self._sessions.tokens_per_id))
        limit = min(request.sampling.max_tokens, room)
        first = WORDS + seed % (NUM_WORDS - wanted)
        ids = [*range(first, first + wanted - len(end)), *end]
        reason = StopReason.STOP
        if wanted > limit:
            reason = StopReason.LENGTH if limit == request.sampling.max_tokens else StopReason.CONTEXT
            num_tokens = num_tokens * limit // wanted
        return Answer(
            ids=ids[:limit],
            num_tokens=max(num_tokens, 1),
            num_prompt_tokens=len(request.prompt_ids) * self._sessions.tokens_per_id,
            log_prob=-0.01 - unit(seed, 6),
            stop_reason=reason,
        )

    def _tool(self, u: float) -> int:
        rest = u * self._weight
        for number, tool in enumerate(self._tools):
            rest -= tool.weight
            if rest < 0:
                return number
        return len(self._tools) - 1
