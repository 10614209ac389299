"""When a generation ends: stop ids, stop strings, the budget of new tokens, and the model's context."""

from collections.abc import Sequence
from functools import lru_cache

from asyncrl.ports import Decode, SamplingParams, StopReason

UNKNOWN_CHARACTER = "\ufffd"
"""What byte-level tokenizers show for a token that ends inside a character."""


class StopRule:
    """Says after each new token whether the generation ends, and why. Built by `StopRules.rule`."""

    def __init__(self, sampling: SamplingParams, *, num_prompt: int, context_len: int, strings: "StringStop | None") -> None:
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._strings = strings
        self._num_prompt = num_prompt
        fits = context_len - num_prompt
        self._max_len = num_prompt + min(sampling.max_tokens, fits)
        self._reason_at_max = StopReason.LENGTH if sampling.max_tokens <= fits else StopReason.CONTEXT

    def reason(self, ids: list[int]) -> StopReason | None:
        """ids: prompt and answer so far. A stop wins over a budget that ends with the same token."""
        if ids[-1] in self._stop_ids or (self._strings is not None and self._strings.completes(ids, self._num_prompt)):
            return StopReason.STOP
        return self._reason_at_max if len(ids) >= self._max_len else None


class StringStop:
    """Whether the newest token completes one of some strings.

    Only a few last tokens are decoded, and those only when the newest one's own text holds a last character of a stop string.
    A byte is at least one token's, so a string of n bytes lies within n tokens. Not covered: tokens without text in between.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self._num_tokens = max(len(string.encode()) for string in strings)
        self._last_characters = {string[-1] for string in strings} | {UNKNOWN_CHARACTER}
        self._may_complete: dict[int, bool] = {}

    def completes(self, ids: list[int], start: int) -> bool:
        """ids from `start` on are the answer; at least one stands before it."""
        last = ids[-1]
        if last not in self._may_complete:
            # Twice: the second one stands behind another token, and shows a space that the first may have lost.
            self._may_complete[last] = not self._last_characters.isdisjoint(self._decode([last, last]))
        if not self._may_complete[last]:
            return False
        text = self._text(ids, max(start, len(ids) - self._num_tokens))
        return any(string in text for string in self._strings)

    def _text(self, ids: list[int], start: int) -> str:
        """Text of the ids from `start` on, as it stands behind the one before: some tokenizers drop a space that begins a text."""
        before, whole = self._decode(ids[start - 1 : start]), self._decode(ids[start - 1 :])
        # Half a character before joins the rest of it, which is no space.
        return whole.removeprefix(before) if whole.startswith(before) else self._decode(ids[start:])


class StopRules:
    """Makes the rules of one engine; string matchers are shared between requests with the same strings."""

    def __init__(self, context_len: int, decode: Decode | None) -> None:
        self._context_len = context_len
        self._string_stop = None if decode is None else lru_cache(maxsize=64)(lambda strings: StringStop(strings, decode))

    @property
    def has_decode(self) -> bool:
        return self._string_stop is not None

    def rule(self, sampling: SamplingParams, num_prompt: int) -> StopRule:
        strings = self._string_stop(sampling.stop_strings) if sampling.stop_strings and self._string_stop else None
        return StopRule(sampling, num_prompt=num_prompt, context_len=self._context_len, strings=strings)
