"""What a reward function may return, and how errors are told."""

import pytest

from asyncrl.errors import RewardError
from asyncrl.ports import Json, RewardResult
from asyncrl.rewards.results import to_result
from asyncrl.wording import describe_error


@pytest.mark.parametrize("value", [0, 1, -2.5, {"score": 1}, {"score": 0.5, "acc": True, "note": "x", "loss": float("nan")}])
def test_finite_numbers_are_scores(value: Json) -> None:
    expected = value["score"] if isinstance(value, dict) else value
    result = to_result(value, "f")
    assert (result.score, type(result.score)) == (float(expected), float)
    assert "score" not in result.extra


def test_the_rest_of_a_dict_is_extra() -> None:
    assert to_result({"score": 1, "acc": 0.5}, "f") == RewardResult(score=1.0, extra={"acc": 0.5})


@pytest.mark.parametrize(
    "value",
    [None, "1.0", "", True, False, [1.0], [], {}, {"acc": 1.0}, float("nan"), float("inf"), -float("inf"), 10**400]
    + [{"score": bad} for bad in (None, "1", True, float("nan"), [1], {"score": 1})],
    ids=repr,
)
def test_nothing_else_becomes_a_number(value: Json) -> None:
    with pytest.raises(RewardError, match=r"reward function 'm:f' returned"):
        to_result(value, "m:f")


def nested(depth: int) -> Json:
    value: Json = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"x": 2**64}, "'x', which cannot be kept: an integer of more than 64 bits"),
        ({"x": {"y": [1, 10**400]}}, "'x', which cannot be kept: an integer of more than 64 bits"),
        ({"x": "half \ud800"}, "'x', which cannot be kept: a text with half a surrogate pair"),
        ({"\ud800": 1}, "which cannot be kept: a text with half a surrogate pair"),
        ({"x": {"\udfff": 1}}, "'x', which cannot be kept: a text with half a surrogate pair"),
        ({"x": nested(900)}, "'x', which cannot be kept: it is nested deeper than 32 levels"),
    ],
)
def test_what_no_store_can_keep_fails_its_session_alone(extra: dict[str, Json], why: str) -> None:
    with pytest.raises(RewardError) as caught:
        to_result({"score": 1.0, **extra}, "f")
    assert str(caught.value).startswith("reward function 'f' returned ")
    assert str(caught.value).endswith(why)
    assert to_result({"score": 1.0, "x": nested(20), "y": [2**63, "ü"]}, "f").score == 1.0


def test_an_error_is_told_in_one_line_with_its_place() -> None:
    def inner() -> None:
        raise KeyError("a\nb" + "x" * 10_000)

    with pytest.raises(KeyError) as caught:
        inner()
    text = describe_error(caught.value)
    assert text.startswith("KeyError: 'a\\nbxxx")
    assert "\n" not in text
    assert len(text) < 1000
    assert f"test_results.py:{inner.__code__.co_firstlineno + 1} in inner)" in text


def test_a_message_that_raises_does_not_hide_the_class() -> None:
    class BadError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_error(BadError()).endswith("BadError: <its message raised RuntimeError>")
