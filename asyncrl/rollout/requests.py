"""Requests on their way through an engine: what is refused at the door, and a row that grows by a token a step."""

import math
from dataclasses import dataclass, field

from asyncrl.errors import EngineError, PromptTooLongError
from asyncrl.ports import GenerateRequest, Generation, SamplingParams, StopReason, VersionSpan
from asyncrl.rollout.stopping import StopRule


def check_request(request: GenerateRequest, *, context_len: int, vocab_size: int, has_decode: bool) -> None:
    """Refuse what would fail in the middle of a step that others share.

    Raises PromptTooLongError when no new token fits, EngineError for an empty prompt, ids outside the vocabulary, sampling
    parameters out of range, and stop strings without a decode function.
    """
    prompt, who = request.prompt_ids, f"request {request.request_id!r}"
    if not prompt:
        raise EngineError(f"{who}: the prompt is empty; a model needs at least one token to go on from")
    if len(prompt) >= context_len:
        raise PromptTooLongError(f"{who}: {len(prompt)} prompt tokens leave no room for a new one in a context of {context_len}")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise EngineError(f"{who}: prompt ids must be 0..{vocab_size - 1}, found {min(prompt)}..{max(prompt)}")
    if request.sampling.stop_strings and not has_decode:
        raise EngineError(f"{who}: stop_strings need an engine that was made with a decode function")
    if problem := _sampling_problem(request.sampling):
        raise EngineError(f"{who}: {problem}")


def _sampling_problem(sampling: SamplingParams) -> str:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature must be finite and not negative, is {sampling.temperature}"
    if not 0 < sampling.top_p <= 1:
        return f"top_p must be in (0, 1], is {sampling.top_p}"
    if sampling.top_k < 0 or sampling.max_tokens < 0:
        return f"top_k and max_tokens must not be negative, are {sampling.top_k} and {sampling.max_tokens}"
    if "" in sampling.stop_strings:
        return "a stop string is empty"
    return ""


@dataclass(slots=True, kw_only=True)
class Row:
    """A request in the engine. `ids`: prompt and answer so far. `in_cache`: its keys are there, up to the last id but one."""

    ticket: int
    request: GenerateRequest
    rule: StopRule
    ids: list[int]
    log_probs: list[float] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """(first token, version) of each span."""
    in_cache: bool = False

    @property
    def num_new(self) -> int:
        return len(self.log_probs)

    def append(self, token: int, log_prob: float, version: int) -> StopReason | None:
        """Take a sampled token, its log-prob and the version it came from, all at once. Returns why the row is done, if it is."""
        if not self.version_starts or self.version_starts[-1][1] != version:
            self.version_starts.append((self.num_new, version))
        self.ids.append(token)
        self.log_probs.append(log_prob)
        return self.rule.reason(self.ids)

    def generation(self, reason: StopReason) -> Generation:
        """What the row sampled."""
        ends = [start for start, _ in self.version_starts[1:]] + [self.num_new]
        spans = [
            VersionSpan(start=start, end=end, version=version)
            for (start, version), end in zip(self.version_starts, ends, strict=True)
        ]
        answer = self.ids[len(self.ids) - self.num_new :]
        return Generation(token_ids=answer, log_probs=self.log_probs, version_spans=spans, stop_reason=reason)
