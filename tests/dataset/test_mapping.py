"""Templates of `data.mapping`: columns are put in, and nothing else happens."""

from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from asyncrl.config import ColumnMapping
from asyncrl.dataset.mapping import fill, map_ground_truth, map_prompt
from asyncrl.dataset.readers import SourceRow
from asyncrl.errors import DataError
from asyncrl.ports import Json


def row(**values: Json) -> SourceRow:
    return SourceRow("f, row 1", values, Path("f"))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{question}", "1 + 1?"),
        ("Q: {question} {question}\nPut it in \\boxed{}.", "Q: 1 + 1? 1 + 1?\nPut it in \\boxed{}."),
        ("{{question}} is {question}", "{question} is 1 + 1?"),
        ('{{"n": {number}}}', '{"n": 7}'),
        ("{ratio} {flag} {day} {price}", "0.5 True 2024-02-29 1.10"),
        ("{two words}", "ok"),
        ("{braces}", "{question} {{x}}"),
        ("no columns, a lone } and {", "no columns, a lone } and {"),
    ],
)
def test_columns_are_put_in_and_nothing_else_happens(template: str, text: str) -> None:
    values = {
        "question": "1 + 1?",
        "number": 7,
        "ratio": 0.5,
        "flag": True,
        "day": date(2024, 2, 29),
        "price": Decimal("1.10"),
        "two words": "ok",
        "braces": "{question} {{x}}",
    }
    assert fill(template, row(**values), key="data.mapping.prompt") == text


@pytest.mark.parametrize("name", ["Question", "question.__class__", "question[0]", "question!r", "question:>10", " question"])
def test_an_unknown_column_is_an_error_with_those_that_exist(name: str) -> None:
    with pytest.raises(DataError) as caught:
        fill(f"{{{name}}}", row(question="x", answer="y"), key="data.mapping.prompt")
    assert str(caught.value).startswith(f"f, row 1: data.mapping.prompt names a column {name!r} that the row does not have;")
    assert "columns: 'question', 'answer'" in str(caught.value)


@pytest.mark.parametrize(("value", "kind"), [(None, "null"), (["a"], "a list"), ({"a": 1}, "an object"), (b"x", "a bytes")])
def test_a_column_without_a_plain_value_is_an_error(value: Json, kind: str) -> None:
    with pytest.raises(DataError, match=f"needs a text or a number in column 'question', got {kind}"):
        fill("{question}", row(question=value), key="data.mapping.prompt")


def test_the_system_message_comes_first_when_there_is_one() -> None:
    mapping = ColumnMapping(prompt="{question}", system="You know {topic}.")
    assert map_prompt(mapping, row(question="x", topic="birds")) == [
        {"role": "system", "content": "You know birds."},
        {"role": "user", "content": "x"},
    ]


def test_the_ground_truth_is_what_follows_the_last_marker() -> None:
    mapping = ColumnMapping(ground_truth="{answer}", ground_truth_after="####")
    assert map_ground_truth(mapping, row(answer="a #### 1\n#### 1,234 \n"), None) == "1,234"


def test_the_marker_also_cuts_the_rows_own_ground_truth() -> None:
    assert map_ground_truth(ColumnMapping(ground_truth_after="="), row(), "1 + 1 = 2") == "2"


@pytest.mark.parametrize("given", [None, 7, "no marker"])
def test_a_ground_truth_without_the_marker_is_an_error(given: Json) -> None:
    with pytest.raises(DataError, match=r"f, row 1: the ground truth .* has no '####' \(data.mapping.ground_truth_after\)"):
        map_ground_truth(ColumnMapping(ground_truth_after="####"), row(), given)


def test_without_mapping_the_ground_truth_is_the_rows_own() -> None:
    given = {"any": ["json"]}
    assert map_ground_truth(ColumnMapping(), row(), given) is given
