"""Built-in reward rules: pure functions of a trajectory's last text, called in the worker process.

Each has verl's `compute_score` signature, runs in time linear in its input, and raises ValueError for a ground truth that it cannot
use: that is a fault of the row, not a wrong answer, and must not become reward 0.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from asyncrl.ports import Json
from asyncrl.wording import shown

# A thousands comma counts only between groups of three digits, so that the list "1,2,3" ends in 3 and not in 123. The sign is
# not one after a digit or letter ("10-5" ends in 5). No part can match the same digits in two ways, which keeps the search
# linear.
_DIGITS = r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_FRACTION = r"\.[0-9]+"
_NUMBER = rf"(?P<sign>(?<![0-9A-Za-z])[-\u2212])?\$?(?:{_DIGITS}(?P<fraction>{_FRACTION})?|(?P<bare>{_FRACTION}))"
_ANY_NUMBER = re.compile(_NUMBER)
_MARKED_NUMBER = re.compile(r"\s*(?:\$\s*)?" + _NUMBER)
_MARKER = "####"


def exact_match(data_source: str, solution_str: str, ground_truth: Json, extra_info: dict[str, Json]) -> float:
    """1.0 when the last assistant text equals the ground truth, white space at both ends aside; else 0.0.

    ground_truth: a string or number, or a list of them of which any may match. Numbers are compared as text: 46 matches "46",
    not "46.0".
    Raises ValueError for another ground truth.
    """
    answers = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    if not answers:
        raise ValueError("exact_match: the ground truth is an empty list")
    return float(solution_str.strip() in {_as_text(answer) for answer in answers})


def gsm8k(data_source: str, solution_str: str, ground_truth: Json, extra_info: dict[str, Json]) -> dict[str, Json]:
    """`score` 1.0 when the answer's number equals the ground truth's, else 0.0; `pred` is the number that was read, or "".

    The answer's number is the one right after the last "####", where the text has that marker; without it, the last number of
    the text. Commas between thousands and dollar signs are read over, and values are compared exactly: "$1,234.50" equals
    "1234.5". ground_truth: a number, its text, or a whole GSM8K solution that ends in "#### number". Raises ValueError when it
    has no number.

    Example: "3 x 4 = 12, so #### 12 apples" against "12" is 1.0; "#### twelve (12)" is 0.0: a marker must be followed by the
    number.
    Source: Cobbe et al., arXiv 2110.14168, and `extract_answer` of openai/grade-school-math. Differences: (1) an answer without
    the marker counts by its last number (verl's `flexible` method); (2) numbers are compared by value, not as text.
    """
    truth, answer = _true_number(ground_truth), read_number(solution_str)
    return {"score": float(answer == truth), "pred": "" if answer is None else str(answer)}


def _true_number(ground_truth: Json) -> Decimal:
    text = _as_text(ground_truth)
    number = read_number(text) if isinstance(ground_truth, str) else Decimal(text)  # a float may spell itself 1e+20
    if number is None or not number.is_finite():
        raise ValueError(f"gsm8k: the ground truth {shown(ground_truth)} has no number")
    return number


def read_number(text: str) -> Decimal | None:
    """The number after the last "####", else the last number of the text, else None. Linear in the text."""
    marker = text.rfind(_MARKER)
    if marker >= 0:
        found = _MARKED_NUMBER.match(text, marker + len(_MARKER))
    else:
        found = None
        for found in _ANY_NUMBER.finditer(text):  # noqa: B007  the last one is wanted
            pass
    return _value(found) if found else None


def _value(found: re.Match[str]) -> Decimal:
    text = found["bare"] or found["digits"].replace(",", "") + (found["fraction"] or "")
    number = Decimal(text)
    return -number if found["sign"] else number


def _as_text(answer: Json) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the ground truth {shown(answer)} is neither text nor a number")
    return str(answer).strip()


RULES: Mapping[str, Callable[[str, str, Json, dict[str, Json]], Json]] = {"exact_match": exact_match, "gsm8k": gsm8k}
"""Rules by the name that `reward.function` gives them."""
