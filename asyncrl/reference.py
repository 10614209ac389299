"""What needs no torch of the reference, rendered from the code itself: the field catalogue and every configuration key.

`asyncrl fields` prints the first; `docs/generate.py` writes both as Markdown (the first as a part of docs/data-protocol.md, whose
other parts are in `asyncrl/protocol_page/`), and a test compares them with docs/.
"""

import json
import typing
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl.config import SFTRun, TrainRun, keys_of
from asyncrl.config.distribution import KEYS_OF_KIND, Distribution
from asyncrl.config.sections import MOST
from asyncrl.config.simulation import Scenario, SimConfig
from asyncrl.fields import CATALOGUE, TAGS, Field

FIELD_COLUMNS = ("field", "dtype", "axis", "producer", "consumers", "exists when", "evidence")
TAG_COLUMNS = ("tag", "type", "on", "meaning")
KEY_COLUMNS = ("key", "type", "default", "meaning")

_CONSTRAINTS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def field_row(entry: Field) -> tuple[str, ...]:
    """What the catalogue says of one column."""
    return (entry.name, entry.dtype, entry.axis.value, entry.producer, " ".join(entry.consumers), entry.when, entry.evidence.value)


def field_rows() -> list[tuple[str, ...]]:
    """One row a column of the catalogue, in its order, which is that of the way."""
    return [field_row(entry) for entry in CATALOGUE.values()]


def tag_rows() -> list[tuple[str, ...]]:
    """One row a tag."""
    return [(tag.name, tag.type.__name__, tag.on, tag.meaning) for tag in TAGS.values()]


def key_rows(kind: type[BaseModel]) -> list[tuple[str, ...]]:
    """One row a configuration key of a run."""
    return [
        (key, type_text(entry), default_text(entry), " ".join((entry.description or "").split())) for key, entry in keys_of(kind)
    ]


def render_fields_table() -> str:
    """Fields and tags as aligned text, for the terminal."""
    return f"{_aligned(FIELD_COLUMNS, field_rows())}\n\n{_aligned(TAG_COLUMNS, tag_rows())}"


def configuration_page() -> str:
    """docs/configuration.md."""
    return "\n".join(
        [
            "# Configuration",
            "",
            "Generated from `asyncrl/config/` by `make docs`. A run is one TOML file; `section.key=value` on the command line",
            "replaces a value. Unknown keys, and keys without effect, are errors.",
            "",
            "## `asyncrl train`",
            "",
            markdown(KEY_COLUMNS, key_rows(TrainRun)),
            "",
            "## `asyncrl sft`",
            "",
            markdown(KEY_COLUMNS, key_rows(SFTRun)),
            "",
            *_scenario_lines(),
        ]
    )


def _scenario_lines() -> list[str]:
    shared = [f"`[{name}]`" for name in Scenario.model_fields if name != "sim"]
    return [
        "## `asyncrl simulate`",
        "",
        f"A scenario has {', '.join(shared[:-1])} and {shared[-1]},",
        "with the keys of a training run that have an effect, and the models of the edges in `[sim.*]`. `[[sim.tools]]` is a list;",
        "an override counts its tools from 0: `sim.tools.0.latency_s=0.5`.",
        "",
        markdown(KEY_COLUMNS, scenario_rows()),
        "",
        "A distribution is a number, which stands for itself, or a table:",
        "",
        markdown(("kind", "keys"), [(kind, ", ".join(f"`{key}`" for key in keys)) for kind, keys in KEYS_OF_KIND.items()]),
        "",
        markdown(KEY_COLUMNS, key_rows(Distribution)),
        "",
    ]


def scenario_rows() -> list[tuple[str, ...]]:
    """One row a key of `[sim.*]`."""
    return [(f"sim.{key}", *rest) for key, *rest in key_rows(SimConfig)]


def type_text(entry: FieldInfo) -> str:
    """`int > 0`, `"a" or "b"`, `list of str`: the type of a key as a user would say it."""
    # A bound that only keeps nonsense out is no news for the reader.
    marks = [(mark, name) for mark in entry.metadata for name in _CONSTRAINTS if abs(getattr(mark, name, MOST)) < MOST]
    bounds = [f"{_CONSTRAINTS[name]} {getattr(mark, name):g}" for mark, name in marks]
    return " ".join([_type_name(entry.annotation), *([" and ".join(bounds)] if bounds else [])])


def _type_name(annotation: object) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(json.dumps(part) for part in parts)
    if origin is Annotated:
        return _type_name(parts[0])
    if origin is list:
        return f"list of {_type_name(parts[0])}"
    if origin is tuple:
        number = "" if parts[1:] == (Ellipsis,) else f"{len(parts)} "
        return f"list of {number}{_type_name(parts[0])}"
    if origin is dict:
        return "table"
    if annotation is Distribution:
        return "distribution"
    return getattr(annotation, "__name__", str(annotation))


def default_text(entry: FieldInfo) -> str:
    """The default in TOML syntax; `required` where there is none."""
    default = entry.default
    if isinstance(default, Distribution):
        return _toml_of(default.model_dump())
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, float):
        return f"{default:g}"
    return json.dumps(default)


def _toml_of(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml_of(inner)}" for key, inner in value.items()) + " }"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, tuple("-" * width for width in widths))
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column is code; `|` is escaped."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join([f'`{first}`', *(cell.replace('|', chr(92) + '|') for cell in rest)])} |" for first, *rest in rows]
    return "\n".join(lines)
