"""The built-in rules: what counts as right, and that reading an answer is linear."""

from collections.abc import Callable

import pytest

from asyncrl.ports import Json
from asyncrl.rewards.rules import RULES, exact_match, gsm8k, read_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", "42"),
        ("so 3 of them.\n#### 1,234", "1234"),
        ("####$1,234.50 dollars", "1234.50"),
        ("#### $ -5", "-5"),
        ("#### -$5", "-5"),
        ("#### \u22127", "-7"),
        ("#### 1 then #### 2", "2"),
        ("#### 42.", "42"),
        ("It costs $18 in total.", "18"),
        ("between 3 and 1,000.", "1000"),
        ("the list 1,2,3", "3"),
        ("10-5", "5"),
        ("10 - 5 is -5", "-5"),
        ("about 0.5 or .25", ".25"),
        ("1,0000", "0"),
        ("007", "7"),
    ],
)
def test_reads_the_marked_number_or_the_last(text: str, number: str) -> None:
    assert gsm8k("", text, number, {})["score"] == 1.0
    assert gsm8k("", text, f"{number}1", {})["score"] == 0.0


@pytest.mark.parametrize("text", ["", "no number", "12 #### twelve", "12 ####", "#### x 12", "#### \u0664\u0662", "12 #### #### "])
def test_no_readable_answer_scores_zero(text: str) -> None:
    assert gsm8k("", text, "12", {}) == {"score": 0.0, "pred": ""}


def test_the_truth_may_be_a_number_or_a_whole_solution() -> None:
    assert gsm8k("", "1000000", 1e6, {})["score"] == 1.0
    assert gsm8k("", "100000000000000000000", 1e20, {})["score"] == 1.0
    assert gsm8k("", "9", "she has 16 - 7 = <<16-7=9>>9.\n#### 9", {}) == {"score": 1.0, "pred": "9"}


@pytest.mark.parametrize("truth", [None, True, [], {}, "", "none", float("nan"), float("inf")])
def test_a_truth_without_number_is_an_error_and_not_zero(truth: Json) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        gsm8k("", "#### 1", truth, {})


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (" 46\n", "46", 1.0),
        ("46", 46, 1.0),
        ("46", "46.0", 0.0),
        ("The answer is 46", "46", 0.0),
        ("b", ["a", "b"], 1.0),
        ("", "x", 0.0),
        ("Paris", "paris", 0.0),
    ],
)
def test_exact_match(text: str, truth: Json, score: float) -> None:
    assert exact_match("", text, truth, {}) == score


@pytest.mark.parametrize("truth", [None, True, [], [None], {"a": 1}])
def test_exact_match_refuses_a_truth_it_cannot_compare(truth: Json) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        exact_match("", "", truth, {})


@pytest.mark.parametrize(
    "piece", ["1", "1,", "1,111", ",111", "-", "-$", "$", " ", "#", "#### ", "####1", ".", "1.", "\u2212 ", "$ "], ids=repr
)
@pytest.mark.parametrize("before", ["", "####", "####1,11"])
def test_reading_is_linear_in_the_text(piece: str, before: str) -> None:
    """Steps of the regex engine cannot be counted, so: far longer than any answer, under the suite's timeout (quadratic:
    minutes)."""
    read_number(before + piece * (300_000 // len(piece)) + "x")


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_rules_take_the_arguments_by_keyword(rule: Callable[..., Json]) -> None:
    rule(data_source="s", solution_str="1", ground_truth="1", extra_info={})
