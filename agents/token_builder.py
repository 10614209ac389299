"""TokenBuilder: the ids, mask, log-probs and versions of one trajectory, which grow in one operation and cannot come apart.

Place: engine and chat template -> [token_builder] -> trajectory rows.

Invariants:
1. The four columns have the same length at every moment.
2. Sampled ids enter verbatim and in order, with mask 1; nothing is decoded, re-encoded or rewritten.
3. Everything else has mask 0, log-prob 0 and version -1.
4. An assistant turn that did not end with the template's end token gets it (mask 0) before environment tokens follow, as a server
   would show it; an end token is never doubled, and nothing follows the last turn.
5. A builder that was given kept columns grows on as the one that they were taken from.
"""

import math
from collections.abc import Sequence

from asyncrl.errors import EngineError, FieldError
from asyncrl.ports import Generation, StopReason, VersionSpan

NO_VERSION = -1
"""Weight version of a token that no policy sampled."""


def as_sampled(ids: list[int]) -> Generation:
    """Given ids in the place of sampled ones, with log-prob 0 and version 0: for demonstrations and golden cases."""
    spans = [VersionSpan(start=0, end=len(ids), version=0)] if ids else []
    return Generation(token_ids=ids, log_probs=[0.0] * len(ids), version_spans=spans, stop_reason=StopReason.STOP)


class TokenBuilder:
    """One trajectory: a fixed prompt and a response that grows by sampled and environment tokens."""

    def __init__(self, prompt_ids: Sequence[int], *, end_token_id: int) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self._end_token_id = end_token_id
        self._last_sampled: int | None = None
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._num_taken = 0

    # --- growing ----------------------------------------------------------------------------------------------------------------

    def add_sampled(self, generation: Generation) -> None:
        """Append what the engine sampled. Raises EngineError when its log-probs or versions do not fit its tokens."""
        ids, log_probs, versions = generation.token_ids, generation.log_probs, generation.token_versions()
        if not len(ids) == len(log_probs) == len(versions):
            raise EngineError(f"the engine gave {len(ids)} tokens, {len(log_probs)} log-probs and {len(versions)} versions")
        if not all(map(math.isfinite, log_probs)):
            raise EngineError("the engine gave a log-prob that is not finite")
        self._grow(ids, 1, log_probs, versions)
        self._last_sampled = ids[-1] if ids else self._last_sampled

    def add_environment(self, ids: Sequence[int]) -> None:
        """Append rendered environment tokens, after the end token of the assistant's turn where it lacks one."""
        whole = self._with_end_token(ids)
        self._grow(whole, 0, [0.0] * len(whole), [NO_VERSION] * len(whole))
        self._last_sampled = None

    def add_kept(self, ids: Sequence[int], mask: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> None:
        """Append columns that `take_new` gave before: as they are, and not to be taken again. Raises FieldError when they differ in
        length."""
        if not len(ids) == len(mask) == len(log_probs) == len(versions):
            raise FieldError(
                f"kept columns differ in length: {len(ids)} ids, {len(mask)} of the mask, {len(log_probs)} log-probs, "
                f"{len(versions)} versions"
            )
        self._ids.extend(ids)
        self._mask.extend(mask)
        self._log_probs.extend(log_probs)
        self._versions.extend(versions)
        self._last_sampled = self._ids[-1] if self._mask and self._mask[-1] else None
        self._num_taken = len(self)

    def environment_cost(self, ids: Sequence[int]) -> int:
        """Response tokens that `add_environment(ids)` would take."""
        return len(self._with_end_token(ids))

    def _with_end_token(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self._last_sampled == self._end_token_id else [self._end_token_id, *ids]

    def _grow(self, ids: Sequence[int], mask: int, log_probs: Sequence[float], versions: Sequence[int]) -> None:
        self._ids.extend(ids)
        self._mask.extend([mask] * len(ids))
        self._log_probs.extend(log_probs)
        self._versions.extend(versions)

    # --- reading ----------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Response tokens so far, observations included."""
        return len(self._ids)

    def take_new(self) -> dict[str, list[int] | list[float]]:
        """The columns of what was added since the last call, under their catalogue names."""
        start, self._num_taken = self._num_taken, len(self)
        return {
            "responses": self._ids[start:],
            "response_mask": self._mask[start:],
            "rollout_log_probs": self._log_probs[start:],
            "token_versions": self._versions[start:],
        }

    @property
    def context_ids(self) -> list[int]:
        """What the next turn is generated from: prompt plus response."""
        return [*self.prompt_ids, *self._ids]

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    @property
    def response_mask(self) -> tuple[int, ...]:
        """1 on sampled tokens, 0 on all others."""
        return tuple(self._mask)

    @property
    def log_probs(self) -> tuple[float, ...]:
        return tuple(self._log_probs)

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(self._versions)
