"""The scanner is linear, respects JSON strings, and turns every malformed call into data."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.agents.tool_calls import HermesFormat, ParseError, ToolCall, parse_call, tool_call_format
from asyncrl.errors import ConfigError
from asyncrl.ports import Json

HERMES = HermesFormat()


def wrapped(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.text(min_size=1),
    st.dictionaries(st.text() | st.just("</tool_call>"), JSON_VALUES | st.just("a </tool_call> b"), max_size=3),
    st.booleans(),
)
def test_a_well_formed_call_comes_back_as_it_was_written(name: str, arguments: dict[str, Json], ascii_only: bool) -> None:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    parsed = HERMES.parse("I look. " + wrapped(body) + " and then " + wrapped(body))
    assert parsed.calls == (ToolCall(name=name, arguments=arguments),) * 2
    assert not parsed.is_open


PIECES = [
    "<tool_call>",
    "</tool_call>",
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '{"name": "a", "arguments": {',
    "NaN",
    "1e999",
    "\n",
    "\ud800",
    "\\ud800",
    "é",
    "x",
]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text())
def test_any_text_gives_calls_or_parse_errors_and_never_raises(text: str) -> None:
    for parsed in (HERMES.parse(text), HERMES.parse("<tool_call>" + text), HERMES.parse(wrapped(text))):
        assert all(isinstance(call, ToolCall | ParseError) for call in parsed.calls)
    assert isinstance(parse_call(text), ToolCall | ParseError)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 200_000,
        '<tool_call>{"a' * 200_000,
        '<tool_call>"\\"' * 200_000,
        '<tool_call>"' + '\\"' * 1_000_000,
        '<tool_call>{"a": "' + "</tool_call>" * 200_000,
        '<tool_call>x"</tool_call>' * 200_000,
        "<tool_call>" + "[" * 1_000_000 + "</tool_call>",
    ],
    ids=lambda text: text[:24],
)
def test_hostile_text_is_scanned_in_linear_time(text: str) -> None:
    assert HERMES.parse(text).calls  # a quadratic scanner runs into the suite's time limit


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "not valid JSON"),
        ("not json", "not valid JSON"),
        ('{"name": "a", "arguments": {"x": 1,}}', "not valid JSON"),
        ('{"name": "a", "arguments": {"x": "raw\nbreak"}}', "not valid JSON"),
        ('{"name": "a", "arguments": {}} {}', "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": 3, "arguments": {}}', '"name"'),
        ('{"name": "a"}', '"arguments"'),
        ('{"name": "a", "arguments": "{}"}', '"arguments"'),
        ('{"name": "a", "arguments": {}, "extra": 1}', '"extra" is unknown'),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN"),
        ('{"name": "a", "arguments": {"x": -Infinity}}', "Infinity"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "too large"),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "too large"),
        ('{"name": "a", "arguments": {"x": 1, "x": 2}}', "same key twice"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}', "surrogate"),
        ('{"name": "a", "arguments": {"\\udc00": 1}}', "surrogate"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}", "nested"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 40 + "]" * 40 + "}}", "nested"),
    ],
)
def test_a_malformed_call_is_a_sentence_for_the_model(body: str, message: str) -> None:
    (call,) = HERMES.parse(wrapped(body)).calls
    assert isinstance(call, ParseError)
    assert message in call.message


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert parse_call('{"name": "a", "arguments": {"x": "\\ud83d\\ude00"}}') == ToolCall(name="a", arguments={"x": "😀"})


def test_a_close_tag_inside_an_open_string_leaves_the_call_open() -> None:
    parsed = HERMES.parse('<tool_call>{"name": "a", "arguments": {"x": "see </tool_call>')
    assert parsed.is_open
    assert HERMES.parse('<tool_call>{"name": "a", "arguments": {"x": "see </tool_call>"}}</tool_call>').calls == (
        ToolCall(name="a", arguments={"x": "see </tool_call>"}),
    )


def test_a_missing_quote_is_malformed_and_not_open() -> None:
    parsed = HERMES.parse('<tool_call>{"name": "a, "arguments": {"x": "1"}}</tool_call>')
    assert not parsed.is_open
    assert isinstance(parsed.calls[0], ParseError)
    assert "not valid JSON" in parsed.calls[0].message


def test_a_stray_quote_ends_at_the_line_and_spares_the_next_call() -> None:
    good = '{"name": "a", "arguments": {}}'
    first, second = HERMES.parse(wrapped('"oops') + wrapped(good)).calls
    assert isinstance(first, ParseError)
    assert second == ToolCall(name="a", arguments={})


def test_an_unclosed_call_is_an_error_and_the_next_one_counts() -> None:
    first, second = HERMES.parse('<tool_call>{"name"' + "<tool_call>" + '{"name": "a", "arguments": {}}</tool_call>').calls
    assert first == ParseError(message="the call is not closed by </tool_call>")
    assert second == ToolCall(name="a", arguments={})


def test_text_without_a_call_has_none() -> None:
    assert HERMES.parse('no call "here" </tool_call>').calls == ()


def test_formats_are_found_by_name() -> None:
    assert isinstance(tool_call_format("hermes"), HermesFormat)
    with pytest.raises(ConfigError, match="choose one of hermes"):
        tool_call_format("herms")
