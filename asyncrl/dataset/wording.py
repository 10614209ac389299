"""Words for error messages: JSON's names for Python's types, and foreign text on one line."""

import reprlib
from collections.abc import Iterable

from asyncrl.ports import Json

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def kind_of(value: Json) -> str:
    """`a text`, `a list`, `null`, ...: what a value is, in the words of someone who wrote JSON."""
    if value is None:
        return "null"
    names = {str: "a text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def shown(value: Json) -> str:
    """A value's repr, cut to about a line's share."""
    return one_line(_short.repr(value))


def one_line(text: object) -> str:
    """`str(text)` without line breaks: the messages of other libraries have them, ours are one line."""
    return " ".join(str(text).split())


def names_shown(names: Iterable[str]) -> str:
    """Names of columns, quoted, the first twenty of them."""
    listed = [shown(name) for name in names]
    return (", ".join(listed[:20]) or "none") + (f" and {len(listed) - 20} more" if len(listed) > 20 else "")
