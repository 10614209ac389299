"""Walks over keys: those that a run declares, and those that a nested mapping holds."""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.ports import Json


def keys_of(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """`section.key`, declaration of every key of a run, depth first."""
    for name, entry in kind.model_fields.items():
        if isinstance(entry.annotation, type) and issubclass(entry.annotation, BaseModel):
            yield from keys_of(entry.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", entry


def leaves(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """`section.key`, value of every leaf of a nested mapping."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
