"""Tools from functions: schemas, checked arguments, texts; loading by name with helpful errors."""

import subprocess
import sys
from typing import Any, Literal, Optional

import pytest

from asyncrl.errors import ToolSpecError
from asyncrl.ports import Json
from asyncrl.tools import FunctionTool, ToolArgumentError, load_tools, tool
from asyncrl.tools.schema import parse_docstring


@tool
def weather(
    city: str,
    days: int,
    scale: float = 1.0,
    exact: bool = False,
    unit: Literal["C", "F"] = "C",
    tags: list[str] = [],  # noqa: B006  tools must cope with it
    options: dict[str, int] | None = None,
    level: Optional[Literal[1, 2]] = None,  # noqa: UP045  the older spelling counts too
    anything: Any = None,
) -> str:
    """Weather of a city,
    over some days.

    More that the model need not know.

    Args:
        city: Name in English.
        days: How many days,
            today included.
        unit (str): Unit: C or F.

    Returns:
        city: not an argument.
    """
    return f"{city} {days}"


def test_the_schema_comes_from_hints_and_docstring() -> None:
    function = weather.schema["function"]
    assert weather.schema["type"] == "function"
    assert function["name"] == "weather"
    assert function["description"] == "Weather of a city, over some days."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name in English."},
            "days": {"type": "integer", "description": "How many days, today included."},
            "scale": {"type": "number"},
            "exact": {"type": "boolean"},
            "unit": {"type": "string", "enum": ["C", "F"], "description": "Unit: C or F."},
            "tags": {"type": "array", "items": {"type": "string"}},
            "options": {"anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]},
            "level": {"anyOf": [{"type": "integer", "enum": [1, 2]}, {"type": "null"}]},
            "anything": {},
        },
        "required": ["city", "days"],
    }


def test_arguments_are_checked_and_defaults_filled_in() -> None:
    checked = weather.check({"city": "Rome", "days": 2, "scale": 3})
    assert (checked["city"], checked["days"], checked["scale"], checked["unit"], checked["tags"]) == ("Rome", 2, 3.0, "C", [])
    checked["tags"].append("x")
    assert weather.check({"city": "Rome", "days": 2})["tags"] == []  # no default is shared
    assert weather.call(weather.check({"city": "Rome", "days": 2}), {}) == "Rome 2"
    assert weather("Oslo", 1) == "Oslo 1"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"days": 1}, "city"),
        ({"city": "x", "days": "1"}, "days"),
        ({"city": "x", "days": 1.5}, "days"),
        ({"city": "x", "days": True}, "days"),
        ({"city": None, "days": 1}, "city"),
        ({"city": "x", "days": 1, "unit": "K"}, "unit"),
        ({"city": "x", "days": 1, "tags": [1]}, "tags"),
        ({"city": "x", "days": 1, "options": {"a": "b"}}, "options"),
        ({"city": "x", "days": 1, "planet": "Mars"}, "planet"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Json], named: str) -> None:
    with pytest.raises(ToolArgumentError, match=named):
        weather.check(arguments)


async def test_results_become_text() -> None:
    def count() -> dict[str, object]:
        """Count."""
        return {"é": [1, None]}

    async def later() -> float:
        """Later."""
        return 1.5

    assert FunctionTool(count).call({}, {}) == '{"é": [1, null]}'
    awaited = FunctionTool(later).call({}, {})
    assert not isinstance(awaited, str)
    assert await awaited == "1.5"
    assert (FunctionTool(count).is_async, FunctionTool(later).is_async) == (False, True)


def test_a_tool_may_have_another_name() -> None:
    @tool(name="look")
    def search(query: str) -> str:
        """Search."""
        return query

    assert (search.name, search.schema["function"]["name"]) == ("look", "look")


def no_docstring(x: int) -> str:
    return ""


def no_hint(x) -> str:  # type: ignore[no-untyped-def]
    """Text."""
    return ""


def odd_hint(x: complex) -> str:
    """Text."""
    return ""


def mixed_literal(x: Literal["a", 1]) -> str:
    """Text."""
    return ""


def star(*x: int) -> str:
    """Text."""
    return ""


def unresolved(x: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Text."""
    return ""


@pytest.mark.parametrize("function", [no_docstring, no_hint, odd_hint, mixed_literal, star, unresolved])
def test_a_function_that_cannot_be_described_is_refused_in_one_line(function: Any) -> None:
    with pytest.raises(ToolSpecError, match=function.__name__) as caught:
        FunctionTool(function)
    assert "\n" not in str(caught.value)


def test_docstrings_without_arguments_are_fine() -> None:
    assert parse_docstring("One line.") == ("One line.", {})
    assert parse_docstring("") == ("", {})


# --- loading ----------------------------------------------------------------------------------------------------------------------


def test_tools_are_loaded_by_name_and_by_path() -> None:
    loaded = load_tools(["calculator"])
    assert list(loaded) == ["calculator"]
    assert load_tools(["asyncrl.tools.calculator:calculator"])["calculator"] is loaded["calculator"]
    assert load_tools([]) == {}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("calculater", "did you mean calculator"),
        ("", "no tool named ''"),
        ("nowhere.at_all:tool", "no module named 'nowhere'"),
        ("asyncrl.tools.calculator:calculate", "did you mean calculator"),
        ("math:pi", "is a float"),
        ("decimal:Decimal", "is a type, not a function"),
        ("json:dumps", "'json:dumps': tool 'dumps': parameter 'obj' has no type hint"),
        ("asyncrl.tools:Tool", "Tool"),
    ],
)
def test_a_tool_that_does_not_exist_is_an_error_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(ToolSpecError, match=message) as caught:
        load_tools([spec])
    assert "\n" not in str(caught.value)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolSpecError, match="two tools are called 'calculator'"):
        load_tools(["calculator", "asyncrl.tools.calculator:calculator"])


def test_loading_tools_needs_no_torch() -> None:
    code = "import sys; from asyncrl.tools import load_tools; load_tools(['calculator']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- calculator -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("12 + 34", "46"),
        ("12+34", "46"),
        (" 5 - 8 ", "-3"),
        ("-5 * -3", "15"),
        ("5--3", "8"),
        ("7 / 2", "3.5"),
        ("6 / 3", "2"),
        ("2 / 3", "0.666666666667"),
        ("0.1 + 0.2", "0.3"),
        ("1.5 * 2", "3"),
        ("-0 * 5", "0"),
        ("100000000000000000000 / 2", "50000000000000000000"),
        (
            "999999999999999999999999999999 * 999999999999999999999999999999",
            "999999999999999999999999999998000000000000000000000000000001",
        ),
        ("4 / 0", "error: division by zero"),
    ],
)
def test_the_calculator_does_one_operation(expression: str, answer: str) -> None:
    calculator = load_tools(["calculator"])["calculator"]
    assert calculator.call(calculator.check({"expression": expression}), {}) == answer


@pytest.mark.parametrize(
    "expression",
    ["1 + 2 + 3", "1", "", "1 +", "2 ** 3", "1e5 + 2", "__import__('os')", "\u0661 + \u0662", "(1 + 2)", "9" * 31 + " + 1"],
)
def test_the_calculator_says_what_it_takes(expression: str) -> None:
    calculator = load_tools(["calculator"])["calculator"]
    answer = calculator.call({"expression": expression}, {})
    assert "one operation on two numbers at a time, such as 12 + 34" in str(answer)
