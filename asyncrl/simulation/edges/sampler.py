"""What the policy says, by the scenario's distributions. It depends on (run, uid, session, turn) alone: a retry says the same."""

import zlib
from dataclasses import dataclass

from asyncrl.config.distribution import constant
from asyncrl.config.simulation import Scenario
from asyncrl.ports import GenerateRequest, StopReason
from asyncrl.simulation.draws import draw_count, mix, unit
from asyncrl.simulation.edges.template import END, NUM_WORDS, WORDS, call_ids

LAST = [END]
"""The end of a turn that calls nothing."""


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
        self._tokens_per_id = scenario.sim.sessions.tokens_per_id
        self._tools = scenario.sim.tools if scenario.agent.name == "tool_agent" else ()
        self._weight = sum(tool.weight for tool in self._tools)
        self._is_parallel = scenario.agent.parallel_tool_calls
        has_own = bool(self._tools) and self._sessions.last_len != constant(0)
        self._last_len = self._sessions.last_len if has_own else self._sessions.turn_len

    def answer(self, request: GenerateRequest, room: int) -> Answer:
        """`room`: ids that the context still holds."""
        seed = request.seed
        budget = min(request.sampling.max_tokens, room)
        ids, num_tokens, reason = self._ids(request, budget)
        if (stop := _first_stop(ids, request.sampling.stop_token_ids)) is not None:
            ids, reason = ids[: stop + 1], StopReason.STOP
        elif reason is StopReason.LENGTH and budget < request.sampling.max_tokens:
            reason = StopReason.CONTEXT
        return Answer(
            ids=ids,
            num_tokens=min(num_tokens, len(ids) * self._tokens_per_id),
            num_prompt_tokens=len(request.prompt_ids) * self._tokens_per_id,
            log_prob=-0.01 - unit(seed, 6),
            stop_reason=reason,
        )

    def _ids(self, request: GenerateRequest, budget: int) -> tuple[list[int], int, StopReason]:
        """Words, then what ends the turn: its calls, or nothing but the end. No more than `budget`; and the tokens of the model
        that the whole turn stands for."""
        seed = request.seed
        end = self._end(request.request_id, seed)
        length = self._last_len if end == LAST else self._sessions.turn_len
        num_tokens = draw_count(length, unit(seed, 5))
        num_ids = max(len(end) + 1, -(-num_tokens // self._tokens_per_id))
        num_words = min(num_ids - len(end), budget, NUM_WORDS)
        first = WORDS + seed % NUM_WORDS
        ids = [*range(first, first + num_words), *end][:budget]
        reason = StopReason.LENGTH if num_ids > budget else StopReason.STOP
        return ids, max(num_tokens, (num_ids - 1) * self._tokens_per_id + 1), reason

    def _end(self, request_id: str, seed: int) -> list[int]:
        if not self._tools:
            return LAST
        session, _, turn = request_id.partition("_")[2].partition("_")
        uid = request_id.partition("_")[0]
        if int(turn.partition("_")[0] or 0) + 1 >= self._num_turns(uid, session):
            return LAST
        if not self._is_parallel:
            return self._call(seed)
        num_calls = draw_count(self._sessions.calls_a_turn, unit(seed, 9))
        return [number for call in range(num_calls) for number in self._call(mix(seed, 10 + call))] + [END]

    def _num_turns(self, uid: str, session: str) -> int:
        own, alike = zlib.crc32(f"{uid}_{session}".encode()), self._sessions.turns_alike
        drawn = zlib.crc32(uid.encode()) if alike and unit(own, 11) < alike else own
        return draw_count(self._sessions.turns, unit(drawn, 4))

    def _call(self, seed: int) -> list[int]:
        return call_ids(self._tool(unit(seed, 7)), unit(seed, 8))

    def _tool(self, u: float) -> int:
        rest = u * self._weight
        for number, tool in enumerate(self._tools):
            rest -= tool.weight
            if rest < 0:
                return number
        return len(self._tools) - 1


def _first_stop(ids: list[int], stops: tuple[int, ...]) -> int | None:
    """Where the first stop token is."""
    return min((ids.index(stop) for stop in stops if stop in ids), default=None)
