"""Words for messages: one line, of bounded length, whatever they are made of."""

import pytest

from asyncrl.wording import MESSAGE_CHARS, first_of, kind_of, message_of, named_message_of, names_shown, nearest, shown


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\nlines"), "ValueError: two lines"),
        (TimeoutError(), "TimeoutError"),
        (Mute(), "Mute: <its message raised RuntimeError>"),
        (ValueError("x" * 10_000), f"ValueError: {'x' * MESSAGE_CHARS}..."),
    ],
)
def test_a_foreign_error_is_one_bounded_line(error: Exception, text: str) -> None:
    assert named_message_of(error) == text
    assert named_message_of(error).endswith(message_of(error))


def test_the_first_error_of_a_group_is_found_however_deep() -> None:
    error = KeyError("k")
    assert first_of(ExceptionGroup("outer", [ExceptionGroup("inner", [error]), ValueError()])) is error
    assert first_of(error) is error


def test_values_and_names_are_cut() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert len(shown(["x" * 1000] * 1000)) < 500
    assert names_shown(["a", "b", "c"], limit=2) == "'a', 'b' and 1 more"
    assert names_shown([]) == "none"
    assert (kind_of(None), kind_of(True), kind_of(1.5), kind_of({}), kind_of(b"")) == (
        "null",
        "a boolean",
        "a number",
        "an object",
        "a bytes",
    )


def test_the_nearest_name_is_suggested_and_nothing_far_off() -> None:
    assert nearest("calculater", ["calculator", "search"]) == "; did you mean calculator?"
    assert nearest("weather", ["calculator", "search"]) == ""
