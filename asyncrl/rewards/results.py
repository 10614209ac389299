"""What a reward function may return."""

import math

from asyncrl.errors import RewardError
from asyncrl.ports import Json, RewardResult
from asyncrl.wording import names_shown, shown

MAX_DEPTH = 32
"""Of what a reward returns beside its score; what copies and writes it down calls itself for each level."""


def to_result(value: Json, function: str) -> RewardResult:
    """A finite number, or a dict with such a `score`, as a RewardResult; the rest of the dict is `extra`.

    value: as JSON gives it, so a bool is a bool and numpy's numbers are plain ones.
    Raises RewardError for anything else: None, text, a bool, NaN or infinity are mistakes of the function, not scores.
    """
    if not isinstance(value, dict):
        return RewardResult(score=_finite(value, function, "returned"))
    if "score" not in value:
        raise RewardError(f"reward function {function!r} returned a dict without 'score'; its keys: {names_shown(value)}")
    score = _finite(value["score"], function, "returned 'score':")
    for name, entry in value.items():
        if why := _not_kept([name, entry]):
            raise RewardError(f"reward function {function!r} returned {shown(name)}, which cannot be kept: {why}")
    return RewardResult(score=score, extra={name: entry for name, entry in value.items() if name != "score"})


def _not_kept(value: Json) -> str:
    """Why the store, or whoever walks through it, could not hold a value; "": it can. A judge writes what it likes."""
    level = [value]
    for _ in range(MAX_DEPTH):
        for entry in level:
            if isinstance(entry, int) and not -(2**63) <= entry < 2**64:
                return "an integer of more than 64 bits"
            if isinstance(entry, str) and not entry.isascii() and any("\ud800" <= char <= "\udfff" for char in entry):
                return "a text with half a surrogate pair"
        nested = [entry for entry in level if isinstance(entry, list | dict)]
        level = [inner for entry in nested for inner in (entry if isinstance(entry, list) else [*entry, *entry.values()])]
        if not level:
            return ""
    return f"it is nested deeper than {MAX_DEPTH} levels"


def _finite(value: Json, function: str, verb: str) -> float:
    number = finite_number(value)
    if number is None:
        raise RewardError(
            f"reward function {function!r} {verb} {shown(value)}; it must be a finite number, alone or as 'score' of a dict"
        )
    return number


def finite_number(value: Json) -> float | None:
    """The number, or None for what is none: a bool, NaN, infinity and an integer beyond a float's range are none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            return None
        if math.isfinite(number):
            return number
    return None
