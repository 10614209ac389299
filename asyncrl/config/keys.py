"""Walks over keys: those that a run declares, and those that a nested mapping holds."""

import typing
from collections.abc import Iterator, Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.config.distribution import Distribution
from asyncrl.ports import Json


def keys_of(kind: type[BaseModel], prefix: str = "", *, inside_values: bool = False) -> Iterator[tuple[str, FieldInfo]]:
    """`section.key`, declaration of every key of a run, depth first; of a list of sections, the keys of each (`sim.tools.name`).

    `inside_values`: of a random number, its own keys as well.
    """
    for name, entry in kind.model_fields.items():
        section = _section_of(entry.annotation)
        if section is not None and issubclass(section, Distribution):
            yield f"{prefix}{name}", entry
            section = section if inside_values else None
        elif section is None:
            yield f"{prefix}{name}", entry
        if section is not None:
            yield from keys_of(section, f"{prefix}{name}.", inside_values=inside_values)


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The class of a section, or of each in a list of sections."""
    parts = typing.get_args(annotation)
    kind = parts[0] if typing.get_origin(annotation) is tuple and parts[1:] == (Ellipsis,) else annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def leaves(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """`section.key`, value of every leaf of a nested mapping."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
