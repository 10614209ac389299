"""What a judge said -> its score, or an error: a verdict that cannot be read is no score, and never 0.

Covered: one JSON object with a number `score`; or text with `score: number`, of which the last one counts. Not covered: whether the
judge is right, or was talked into its verdict by the answer that it read.
"""

import json
import re

from asyncrl.errors import RewardError
from asyncrl.ports import Json
from asyncrl.rewards.results import finite_number
from asyncrl.wording import shown

# Quotes and stars around the word, as in `"score": 1` inside a code fence, or **Score:** 1.
_MARKER = re.compile(r"\bscore[\"'*_`]*:[\"'*_`]*", re.IGNORECASE)
_WORD = re.compile(r"\s*(\S{1,40})")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_AROUND = "\"'*_`()[]{},;"


def read_verdict(text: str) -> dict[str, Json]:
    """`score`, a finite float, and whatever else a JSON verdict holds. Linear in the text.

    Example: `{"score": 0.5, "reason": "half"}`, `Fine. Score: 0.5` and `**Score:** 0.5.` are 0.5; `Score: 5/10` is no number.
    Raises RewardError for everything else.
    """
    try:
        verdict = json.loads(text)
    except (ValueError, RecursionError):
        return {"score": _number_in(text)}
    score = finite_number(verdict.get("score")) if isinstance(verdict, dict) else None
    if score is None:
        raise RewardError(f'the judge said {shown(text)}, which is no object with a finite number "score"')
    return {**verdict, "score": score}


def _number_in(text: str) -> float:
    marker = None
    for marker in _MARKER.finditer(text):  # noqa: B007  the last one is wanted
        pass
    word = _WORD.match(text, marker.end()) if marker else None
    number = _NUMBER.fullmatch(word[1].strip(_AROUND).removesuffix(".")) if word else None
    score = finite_number(float(number[0])) if number else None
    if score is None:
        raise RewardError(f'the judge said {shown(text)}, which has neither {{"score": number}} nor "score: number"')
    return score
