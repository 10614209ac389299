"""Plain tables: the columns of `question, answer` files put into a prompt and a right answer by the templates of `data.mapping`.

`{name}` is the value of the column `name`, and nothing else: no attributes, indexes or formats. `{{` and `}}` are literal braces,
and so is `{}` (`\\boxed{}` needs no care). For GSM8K: prompt = "{question}", ground_truth = "{answer}", ground_truth_after = "####"
turns "... = 72 clips.\\n#### 72" into "72".
"""

import re
from datetime import date, time
from decimal import Decimal

from asyncrl.config import ColumnMapping
from asyncrl.dataset.readers import SourceRow
from asyncrl.errors import DataError
from asyncrl.ports import Json, Messages
from asyncrl.wording import kind_of, names_shown, shown

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")

_TEXT_LIKE = (str, int, float, Decimal, date, time)
"""What stands in a text as Python prints it (bool is an int, datetime is a date)."""


def map_prompt(mapping: ColumnMapping, source: SourceRow) -> Messages:
    """The system message, when there is one, and the user message."""
    turns = [("system", mapping.system), ("user", mapping.prompt)]
    return [
        {"role": role, "content": fill(template, source, key=f"data.mapping.{'prompt' if role == 'user' else role}")}
        for role, template in turns
        if template
    ]


def map_ground_truth(mapping: ColumnMapping, source: SourceRow, given: Json) -> Json:
    """The right answer: from its template, else `given` (the row's own), cut after the marker.

    Raises DataError when there is a marker and the answer is no text or lacks it.
    """
    answer = fill(mapping.ground_truth, source, key="data.mapping.ground_truth") if mapping.ground_truth else given
    marker = mapping.ground_truth_after
    if not marker:
        return answer
    if not isinstance(answer, str) or marker not in answer:
        raise DataError(f"{source.place}: the ground truth {shown(answer)} has no {marker!r} (data.mapping.ground_truth_after)")
    return answer.rpartition(marker)[2].strip()


def fill(template: str, source: SourceRow, *, key: str) -> str:
    """The template with the row's values in it. Raises DataError for a column that is not there, is null, or is no plain value."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        return match[0][0] if name is None else _text_of(source, name, key)

    return _BRACES.sub(replace, template)


def _text_of(source: SourceRow, name: str, key: str) -> str:
    if name not in source.values:
        raise DataError(
            f"{source.place}: {key} names a column {name!r} that the row does not have; columns: {names_shown(source.values)}"
            " (literal braces are written {{ and }})"
        )
    value = source.values[name]
    if isinstance(value, _TEXT_LIKE):
        return str(value)
    raise DataError(f"{source.place}: {key} needs a text or a number in column {name!r}, got {kind_of(value)}")
