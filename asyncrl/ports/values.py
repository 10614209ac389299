"""Values that several ports speak of."""

import copy
from collections.abc import Callable
from typing import Any

Json = Any
"""A value that came from outside as JSON: None, bool, int, float, str, list or dict of these."""

_ATOMS = frozenset({type(None), bool, int, float, str})


def copied(value: Json) -> Json:
    """A copy that shares nothing that could be changed. Whatever is no JSON in it is copied as `copy.deepcopy` does, which takes
    five times as long for the rest."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {copied(key): copied(entry) for key, entry in value.items()}
    if kind is list:
        return [entry if type(entry) in _ATOMS else copied(entry) for entry in value]
    return copy.deepcopy(value)


Messages = list[dict[str, Json]]
"""Chat messages as Hugging Face templates take them: each has `role` and `content`, perhaps `tool_calls`."""

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens kept."""
