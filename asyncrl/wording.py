"""Words for messages: values, names and foreign errors on one line of bounded length. Every room may use them."""

import difflib
import os
import reprlib
from collections.abc import Iterable
from types import TracebackType

MESSAGE_CHARS = 500
"""Characters of a foreign error's message that are kept: a message may quote a whole trajectory."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def kind_of(value: object) -> str:
    """`a text`, `a list`, `null`, ...: what a value is, in the words of someone who wrote JSON."""
    if value is None:
        return "null"
    names = {str: "a text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def shown(value: object) -> str:
    """A value's repr, cut to about a line's share."""
    return " ".join(_short.repr(value).split())


def names_shown(names: Iterable[str], limit: int = 20) -> str:
    """Names, quoted, the first `limit` of them."""
    listed = [shown(name) for name in names]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(listed[:limit]) or "none") + more


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for a name that is close to a known one, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def message_of(error: BaseException) -> str:
    """The error's message as one line of bounded length; never raises, whatever its `__str__` does."""
    try:
        text = " ".join(str(error).split())
    except Exception as second:  # a __str__ of somebody's class that raises must not hide the class, nor take its place
        return f"<its message raised {type(second).__name__}>"
    return text if len(text) <= MESSAGE_CHARS else f"{text[:MESSAGE_CHARS]}..."


def named_message_of(error: BaseException) -> str:
    """`Class: message`, or the class alone."""
    return f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")


def describe_error(error: BaseException) -> str:
    """One line: class, message, and the file, line and function that raised."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    place = _last_line(error.__traceback__)
    return f"{name}: {message_of(error)}{f' ({place})' if place else ''}"


def _last_line(trace: TracebackType | None) -> str:
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name}"


def first_of(error: BaseException) -> BaseException:
    """The error itself; of a group, however deep, the first that was raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
