"""From the text of an assistant turn to tool calls: formats by name, `hermes` built in.

Place: sampled ids -> text -> [tool_calls] -> tool_runner. Everything here is data: a malformed call is a `ParseError` value that is
answered to the model, never an exception.

Invariants of the scanner:
1. Linear: each character is looked at a bounded number of times, whatever the text (a lazy regex is quadratic on unclosed tags).
2. JSON strings are respected: `</tool_call>` inside an argument does not end the call.
3. JSON is strict: no NaN or infinity, no duplicate keys, no lone surrogates, bounded depth and integers.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from asyncrl.errors import ConfigError
from asyncrl.ports import Json

MAX_DEPTH = 32
"""Nesting of a call's arguments; no schema made from type hints is deeper, and recursion elsewhere stays safe."""
MAX_INT_DIGITS = 308
"""Digits of an integer: what a float could still hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A well-formed call; whether the tool exists and takes these arguments is for the runner to say."""

    name: str
    arguments: dict[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseError:
    """A malformed call: one sentence for the model."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """Calls of a turn in order. `is_open`: the text ends inside a JSON string of an unclosed call, so that a close tag seen last
    was part of an argument and the turn should go on."""

    calls: tuple[ToolCall | ParseError, ...]
    is_open: bool = False


class ToolCallFormat(Protocol):
    """How a model writes a call."""

    name: str
    close_tag: str
    """Ends a call; a turn of one call stops there."""
    response_tag: str
    """Begins a tool's answer; a turn of several calls stops there, since what follows would be invented."""

    def parse(self, text: str) -> ParsedTurn:
        """Never raises, whatever the text."""
        ...


class HermesFormat:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it."""

    name = "hermes"
    open_tag = "<tool_call>"
    close_tag = "</tool_call>"
    response_tag = "<tool_response>"

    def parse(self, text: str) -> ParsedTurn:
        """A call is a call wherever it stands in the text. An unclosed one is a ParseError."""
        calls: list[ToolCall | ParseError] = []
        start = text.find(self.open_tag)
        while start >= 0:
            body = start + len(self.open_tag)
            end = _end_of_call(text, body)
            if end.kind is _IN_STRING:
                return _with_open_string(calls, text[body:])
            closed = end.kind is _CLOSED
            calls.append(parse_call(text[body : end.position]) if closed else _NOT_CLOSED)
            start = text.find(self.open_tag, end.position)
        return ParsedTurn(calls=tuple(calls))


_CLOSED, _UNCLOSED, _IN_STRING = "closed", "unclosed", "in string"
_NOT_CLOSED = ParseError(message=f"the call is not closed by {HermesFormat.close_tag}")


@dataclass(frozen=True, slots=True)
class _End:
    kind: str
    position: int


_OUTSIDE = re.compile(r'"|</?tool_call>')
_INSIDE = re.compile(r'\\.|"|[\x00-\x1f]', re.DOTALL)


def _end_of_call(text: str, position: int) -> _End:
    """Where the call whose body begins at `position` ends: at its close tag, at the next open tag, or nowhere."""
    while found := _OUTSIDE.search(text, position):
        if found[0] == HermesFormat.close_tag:
            return _End(_CLOSED, found.start())
        if found[0] == HermesFormat.open_tag:
            return _End(_UNCLOSED, found.start())
        closing = _end_of_string(text, found.end())
        if closing is None:
            return _End(_IN_STRING, len(text))
        position = closing
    return _End(_UNCLOSED, len(text))


def _end_of_string(text: str, position: int) -> int | None:
    """After the closing quote of a JSON string, or at a raw line break, which no JSON string may hold: the quote was a stray one
    and the next close tag counts again. None at the end of the text."""
    while found := _INSIDE.search(text, position):
        if found[0] == '"' or found[0] < " ":
            return found.end()
        position = found.end()
    return None


def _with_open_string(calls: list[ToolCall | ParseError], body: str) -> ParsedTurn:
    """The turn ends inside a string. Where the JSON is good so far, the turn should go on. Where it is not, a quote is missing
    further left and all later ones look swapped: the call is malformed as it stands, and going on would not mend it."""
    if _is_cut_in_string(body):
        return ParsedTurn(calls=(*calls, _NOT_CLOSED), is_open=True)
    head, closed, _ = body.partition(HermesFormat.close_tag)
    return ParsedTurn(calls=(*calls, parse_call(head) if closed else _NOT_CLOSED))


def _is_cut_in_string(body: str) -> bool:
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (RecursionError, ValueError):
        return False
    return False


# --- strict JSON ----------------------------------------------------------------------------------------------------------------


class _Malformed(ValueError):
    """The message is for the model."""


def parse_call(text: str) -> ToolCall | ParseError:
    """One call's JSON: an object with `name` (string) and `arguments` (object), and nothing else."""
    try:
        return _as_call(_strict_json(text))
    except _Malformed as error:
        return ParseError(message=str(error))


def _as_call(value: Json) -> ToolCall:
    if not isinstance(value, dict):
        raise _Malformed('a call must be a JSON object with "name" and "arguments"')
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise _Malformed('"name" must be the name of a tool')
    if not isinstance(arguments, dict):
        raise _Malformed('"arguments" must be a JSON object')
    if len(value) > 2:
        unknown = next(key for key in value if key not in ("name", "arguments"))
        raise _Malformed(f'{json.dumps(unknown[:40])} is unknown: a call has only "name" and "arguments"')
    return ToolCall(name=name, arguments=arguments)


def _strict_json(text: str) -> Json:
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite_float, parse_int=_bounded_int
        )
    except json.JSONDecodeError as error:
        raise _Malformed(f"the call is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _Malformed(f"the call is nested more than {MAX_DEPTH} deep") from None
    _check_values(value)
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise _Malformed("the call has the same key twice")
    return unique


def _no_constant(text: str) -> NoReturn:
    raise _Malformed(f"{text} is not valid JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Malformed("a number is too large")
    return value


def _bounded_int(text: str) -> int:
    if len(text) > MAX_INT_DIGITS:
        raise _Malformed("a number is too large")
    return int(text)


def _check_values(value: Json) -> None:
    """Depth and surrogates, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return
    raise _Malformed(f"the call is nested more than {MAX_DEPTH} deep")


def _children(value: Json) -> list[Json]:
    if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
        raise _Malformed("a string holds half of a surrogate pair")
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else []


_SURROGATE = re.compile("[\ud800-\udfff]")


# --- formats by name --------------------------------------------------------------------------------------------------------------

FORMATS: dict[str, Callable[[], ToolCallFormat]] = {HermesFormat.name: HermesFormat}
"""`agent.tool_format` -> the format. To add one: a class with the protocol above, a line here, and the fuzz test of the others."""


def tool_call_format(name: str) -> ToolCallFormat:
    """Raises ConfigError for a name that is not in the table."""
    if name not in FORMATS:
        raise ConfigError(f"agent.tool_format = {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[name]()
