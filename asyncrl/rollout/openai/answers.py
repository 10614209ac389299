"""An answer that grows by the events of a stream until it is a Generation. Its end is decided here, by the rules of all engines."""

from collections.abc import Sequence

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation, StopReason, VersionSpan
from asyncrl.rollout.openai.routes import Piece
from asyncrl.rollout.stopping import StopRule


class Answer:
    """Of one request. The server knows its stop ids and budget; a stop string it does not: what it samples after one is dropped."""

    def __init__(self, request: GenerateRequest, rule: StopRule, *, vocab_size: int) -> None:
        self._name = request.request_id
        self._has_strings = bool(request.sampling.stop_strings)
        self._rule = rule
        self._vocab_size = vocab_size
        self._num_prompt = len(request.prompt_ids)
        self._ids = list(request.prompt_ids)
        self._log_probs: list[float] = []
        self._reason: StopReason | None = None
        self._end: Piece | None = None

    @property
    def is_cut(self) -> bool:
        """It has ended, and the server goes on."""
        return self._reason is not None and self._end is None

    def add(self, piece: Piece) -> int:
        """Returns how many of its tokens belong to the answer. Raises EngineError for tokens that no answer has."""
        if piece.finish_reason is not None:
            self._end = piece
        for number, (token, log_prob) in enumerate(zip(piece.token_ids, piece.log_probs, strict=True)):
            if self._reason is not None:
                self._check_may_go_on()
                return number
            self._take(token, log_prob)
        return len(piece.token_ids)

    def _take(self, token: int, log_prob: float) -> None:
        if not 0 <= token < self._vocab_size:
            raise EngineError(f"request {self._name!r}: the server sampled token {token}; ids are 0..{self._vocab_size - 1}")
        self._ids.append(token)
        self._log_probs.append(log_prob)
        self._reason = self._rule.reason(self._ids)

    def _check_may_go_on(self) -> None:
        if not self._has_strings:
            raise EngineError(f"request {self._name!r}: the server went on after the token that ends the answer")

    def generation(self, version: int, *, tells_versions: bool) -> Generation:
        """What was sampled. version: of all tokens, unless the server tells the version of each.

        Raises EngineError when the server ended it before its end, or tells versions that cannot be.
        """
        num = len(self._log_probs)
        if self._reason is None:
            ended = "the stream ended" if self._end is None else f"finish_reason {self._end.finish_reason!r}"
            raise EngineError(f"request {self._name!r}: the server gave up the answer after {num} tokens: {ended}")
        if tells_versions:
            spans = spans_of(self._end.spans if self._end else None, num)
        else:
            spans = [VersionSpan(start=0, end=num, version=version)]
        return Generation(
            token_ids=self._ids[self._num_prompt :], log_probs=self._log_probs, version_spans=spans, stop_reason=self._reason
        )


def spans_of(told: Sequence[tuple[str, int, int]] | None, num_tokens: int) -> list[VersionSpan]:
    """Spans of the first `num_tokens` tokens, neighbours of one version joined.

    Raises EngineError when they do not cover them in order, and for versions that are no numbers.
    """
    if told is None:
        raise EngineError("the server did not tell the weight versions of its tokens")
    spans: list[VersionSpan] = []
    for name, start, end in told:
        if start != (spans[-1].end if spans else 0) or end <= start:
            raise EngineError(f"the server's spans of weight versions do not follow each other: {list(told)}")
        version, end = _number(name), min(end, num_tokens)
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(VersionSpan(start=start, end=end, version=version))
        if end == num_tokens:
            return spans
    raise EngineError(f"the server's spans of weight versions do not cover {num_tokens} tokens: {list(told)}")


def _number(version: str) -> int:
    try:
        return int(version)
    except ValueError:
        words = f"the server sampled from weights {version!r}, which this run did not publish; is it another's as well?"
        raise EngineError(words) from None
