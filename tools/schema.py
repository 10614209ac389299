"""From a function's type hints and docstring to its JSON schema, and to the struct that checks the arguments of a call.

Place: inside asyncrl.tools. Supported hints: str, int, float, bool, None, list[T], dict[str, T], Literal, Optional and unions.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from asyncrl.errors import ToolSpecError
from asyncrl.ports import Json

HIDDEN = "tools_kwargs"
"""A parameter of this name belongs to the dataset row, not to the model."""

_PLAIN: dict[object, Json] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}


def function_schema(function: Callable[..., object], name: str) -> Json:
    """OpenAI function format. Raises ToolSpecError that names the tool and the parameter."""
    summary, texts = parse_docstring(inspect.getdoc(function) or "")
    if not summary:
        raise ToolSpecError(f"tool {name!r} has no docstring: its first paragraph tells the model what the tool does")
    properties: dict[str, Json] = {}
    required: list[str] = []
    for parameter, hint in _parameters(function, name):
        properties[parameter.name] = {**_hint_schema(hint, name, parameter.name), **_described(texts.get(parameter.name))}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def argument_struct(function: Callable[..., object], name: str) -> type[msgspec.Struct]:
    """A struct type with the function's parameters: unknown, missing or mistyped arguments fail its conversion."""
    fields: list[tuple[str, object] | tuple[str, object, object]] = [
        (parameter.name, hint) if parameter.default is inspect.Parameter.empty else (parameter.name, hint, _default(parameter))
        for parameter, hint in _parameters(function, name)
    ]
    try:
        return msgspec.defstruct(f"{name}_arguments", typing.cast("Any", fields), kw_only=True, forbid_unknown_fields=True)
    except TypeError as error:
        raise ToolSpecError(f"tool {name!r} cannot be described: {error}") from error


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph on one line, and the texts below `Args:` by parameter."""
    body, _, arguments = text.partition("\nArgs:\n")
    summary = " ".join(body.strip().partition("\n\n")[0].split())
    texts: dict[str, str] = {}
    indent, current = "", ""
    for line in arguments.splitlines():
        if line and not line.startswith(" "):
            break  # the next section
        entry = re.match(r"( +)(\w+)(?: *\([^)]*\))?:\s*(.*)", line)
        if entry and (not indent or entry[1] == indent):
            indent, current = entry[1], entry[2]
            texts[current] = entry[3]
        elif current:
            texts[current] = f"{texts[current]} {line.strip()}".strip()
    return summary, texts


def _parameters(function: Callable[..., object], name: str) -> list[tuple[inspect.Parameter, Json]]:
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ToolSpecError(f"tool {name!r}: its type hints cannot be read: {error}") from error
    shown = [parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != HIDDEN]
    for parameter in shown:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolSpecError(f"tool {name!r}: parameter {parameter} must be an ordinary named one")
        if parameter.name not in hints:
            raise ToolSpecError(f"tool {name!r}: parameter {parameter.name!r} has no type hint; the model is told types")
    return [(parameter, hints[parameter.name]) for parameter in shown]


def _default(parameter: inspect.Parameter) -> object:
    # msgspec refuses mutable defaults; a call must not share them either.
    value = parameter.default
    return msgspec.field(default_factory=lambda: type(value)(value)) if isinstance(value, (list, dict)) else value


def _hint_schema(hint: Json, tool: str, parameter: str) -> dict[str, Json]:
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    origin: object = get_origin(hint)
    arguments: tuple[Json, ...] = get_args(hint)
    if origin is Literal:
        return _literal_schema(arguments, tool, parameter)
    if origin in (Union, types.UnionType):
        return _union_schema(arguments, tool, parameter)
    if origin is list:
        return {"type": "array", "items": _hint_schema(arguments[0], tool, parameter)}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _hint_schema(arguments[1], tool, parameter)}
    raise ToolSpecError(
        f"tool {tool!r}: parameter {parameter!r} has type {hint}; use str, int, float, bool, list, dict, Literal or Optional"
    )


def _literal_schema(values: tuple[object, ...], tool: str, parameter: str) -> dict[str, Json]:
    kinds = {type(value) for value in values}
    if len(kinds) == 1 and (kind := kinds.pop()) in (str, int):
        return {**_PLAIN[kind], "enum": list(values)}
    raise ToolSpecError(f"tool {tool!r}: parameter {parameter!r}: the values of a Literal must be all strings or all ints")


def _union_schema(members: tuple[Json, ...], tool: str, parameter: str) -> dict[str, Json]:
    schemas = [_hint_schema(member, tool, parameter) for member in members]
    if all(set(schema) == {"type"} for schema in schemas):
        return {"type": [schema["type"] for schema in schemas]}
    return {"anyOf": schemas}


def _described(text: str | None) -> dict[str, str]:
    return {"description": text} if text else {}
