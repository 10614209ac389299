"""An answer on its way: the parts that vLLM delivers become one Generation, ended by our own rules."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation, StopReason, VersionSpan
from asyncrl.rollout.stopping import StopRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request as vLLM is given it. request_id: unlike all others. max_tokens: >= 1, what fits. seed: >= 0, below 2**63."""

    request_id: str
    request: GenerateRequest
    max_tokens: int
    seed: int

    @property
    def has_strings(self) -> bool:
        """Tokens must come one by one, as vLLM knows no text."""
        return bool(self.request.sampling.stop_strings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """New tokens of an answer and their log-probs. spans: with the last part, of all tokens; None before, and when there are none.
    finish: why vLLM ended the answer, with the last part."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    spans: Sequence[VersionSpan] | None = None
    finish: str | None = None


class Answer:
    """Tokens so far. `reason` is why it is complete, once it is; later tokens are dropped."""

    def __init__(self, request: GenerateRequest, rule: StopRule, *, is_streamed: bool) -> None:
        self.reason: StopReason | None = None
        self._request = request
        self._rule = rule
        self._is_streamed = is_streamed
        self._ids = list(request.prompt_ids)
        self._log_probs: list[float] = []

    def take(self, part: Part) -> None:
        """The next tokens. Raises EngineError when their log-probs are not as many."""
        if len(part.token_ids) != len(part.log_probs):
            who = f"request {self._request.request_id!r}"
            raise EngineError(f"{who}: vLLM gave {len(part.token_ids)} tokens and {len(part.log_probs)} log-probs")
        if self._is_streamed:
            for token, log_prob in zip(part.token_ids, part.log_probs, strict=True):
                if self.reason is None:
                    self._ids.append(token)
                    self._log_probs.append(log_prob)
                    self.reason = self._rule.reason(self._ids)
        else:
            self._ids += part.token_ids
            self._log_probs += part.log_probs
            self.reason = self._rule.reason(self._ids) if self._log_probs else None

    def generation(self, last: Part) -> Generation:
        """Raises EngineError when vLLM ended it early, when versions do not cover it, and for log-probs that are no numbers: the
        weights are not finite."""
        who, num = f"request {self._request.request_id!r}", len(self._log_probs)
        if self.reason is None:
            raise EngineError(f"{who}: vLLM ended it after {num} tokens with {last.finish!r}, and no rule of ours ended it")
        token_ids = self._ids[len(self._ids) - num :]
        spans = clipped(last.spans or (), num)
        if (spans[-1].end if spans else 0) != num:
            raise EngineError(f"{who}: vLLM gave {num} tokens, and versions of others: {spans}")
        if not all(map(math.isfinite, self._log_probs)):
            raise EngineError(f"{who}: logits are not finite at weight version {spans[-1].version}")
        return Generation(token_ids=token_ids, log_probs=self._log_probs, version_spans=spans, stop_reason=self.reason)


def clipped(spans: Sequence[VersionSpan], num: int) -> list[VersionSpan]:
    """What lies within the first `num` tokens."""
    return [VersionSpan(start=each.start, end=min(each.end, num), version=each.version) for each in spans if each.start < num]
