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


_LARGEST = 2**64
"""Whole numbers of more bits are no JSON values of the store."""


def not_json(value: Json, name: str = "") -> tuple[str, Json] | None:
    """The first part of a value that no JSON can carry, such as a date of a parquet file: its name within `name`, and itself. None:
    all of it can be kept."""
    kind = type(value)
    if kind is int:
        return None if -_LARGEST // 2 <= value < _LARGEST else (name, value)
    if kind in _ATOMS:
        return None
    if kind is list:
        parts = ((f"{name}[{position}]", entry) for position, entry in enumerate(value))
    elif kind is dict and all(type(key) is str for key in value):
        parts = ((f"{name}.{key}" if name else key, entry) for key, entry in value.items())
    else:
        return name, value
    return next((found for part, entry in parts if (found := not_json(entry, part)) is not None), None)


Messages = list[dict[str, Json]]
"""Chat messages as Hugging Face templates take them: each has `role` and `content`, perhaps `tool_calls`."""

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens kept."""
