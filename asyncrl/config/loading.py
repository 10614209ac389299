"""From a TOML file and overrides to a checked run and back, and one line of words for whatever is wrong with them."""

import difflib
import tomllib
from collections.abc import Sequence
from datetime import date, time
from pathlib import Path
from typing import get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from asyncrl.config.idle_keys import Run, refuse_idle_keys, resolved
from asyncrl.config.keys import keys_of
from asyncrl.config.runs import SFTRun, TrainRun
from asyncrl.config.simulation import Scenario
from asyncrl.errors import ConfigError
from asyncrl.ports import Json

_SHOWN_CHARS = 100
"""Of a wrong value in a message."""


def load_run(kind: type[Run], path: Path, overrides: Sequence[str] = ()) -> Run:
    """Read a TOML file, apply `section.key=value` overrides (values in TOML syntax, bare words are strings), and check it.

    Raises ConfigError with one line that names file, key, value and what is allowed.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for override in overrides:
        apply_override(tree, override)
    return parse_run(kind, tree, where=str(path), folder=path.parent)


def parse_run(kind: type[Run], tree: dict[str, Json], *, where: str = "configuration", folder: Path | None = None) -> Run:
    """Check a nested dict. `folder`: where a scenario's empirical files are looked for. Raises ConfigError as `load_run` does."""
    try:
        run = kind.model_validate(tree, context=folder)
    except ValidationError as error:
        # A misspelt key first: it is often the cause of a missing one.
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        raise ConfigError(f"{where}: {_explain(kind, first)}") from None
    refuse_idle_keys(run, where)
    return run


def to_toml(run: TrainRun | SFTRun | Scenario) -> str:
    """Every key that has an effect, with its value, in the form that `load_run` takes back."""
    return tomli_w.dumps(resolved(run))


def apply_override(tree: dict[str, Json], override: str) -> None:
    """Put the value of `section.key=value` into a nested dict. Raises ConfigError."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    node: Json = tree
    for part in parts[:-1]:
        node = _inner(node, part, override)
    if not isinstance(node, dict):
        raise ConfigError(f"override {override!r}: {parts[-2]!r} is a list; say which of its sections: 0, 1, ...")
    node[parts[-1]] = _parse_value(text.strip(), override)


def _inner(node: Json, part: str, override: str) -> Json:
    """The section `part` of a section, or number `part` of a list of sections."""
    if isinstance(node, list):
        if not (part.isdecimal() and int(part) < len(node)):
            raise ConfigError(f"override {override!r}: {part!r} is none of 0..{len(node) - 1}, the numbers of a list's sections")
        inner = node[int(part)]
    else:
        inner = node.setdefault(part, {})
    if not isinstance(inner, (dict, list)):
        raise ConfigError(f"override {override!r}: {part!r} is a value, not a section")
    return inner


def _parse_value(text: str, override: str) -> Json:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.startswith(("[", '"', "'")):  # meant as TOML: taken as a bare word it would be a strange path or name
            raise ConfigError(f'override {override!r}: not valid TOML ({error}); strings in a list need quotes: ["a"]') from None
        return text


def _explain(kind: type[BaseModel], error: ErrorDetails) -> str:
    location = _location(kind, error)
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        other = _other_command(kind, key)
        return f"unknown key {key}{other or _suggest(kind, location)}"
    if error["type"] == "missing":
        return f"{key} is missing; it has no default"
    if error["type"] == "value_error" and isinstance(error.get("ctx", {}).get("error"), ConfigError):
        said = str(error["ctx"]["error"])
        return f"{key}: {said}" if key else said
    said = f"{key} = {_shown(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"
    return f"{said}; quote it: '\"{error['input']}\"'" if _lacks_quotes(error) else said


def _other_command(kind: type[BaseModel], section: str) -> str:
    """The file may be a good one, given to the wrong command."""
    for run, command in ((TrainRun, "train"), (SFTRun, "sft"), (Scenario, "simulate")):
        if run is not kind and section in run.model_fields:
            return f"; it belongs to a configuration of `asyncrl {command}`"
    return ""


def _location(kind: type[BaseModel], error: ErrorDetails) -> list[str]:
    """Where the user wrote it; pydantic adds the member of a union that it tried last."""
    location = [str(part) for part in error["loc"]]
    tables = [key for key, entry in keys_of(kind) if get_origin(entry.annotation) is dict]
    inside = [key for key in tables if f"{'.'.join(location)}.".startswith(f"{key}.")]
    return location[: inside[0].count(".") + 2] if inside else location


def _lacks_quotes(error: ErrorDetails) -> bool:
    """A number or a date where a text is meant: `trainer.experiment_name=7`."""
    return error["type"] == "string_type" and isinstance(error["input"], int | float | date | time)


def _shown(value: Json) -> str:
    text = str(value) if isinstance(value, date | time) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _suggest(kind: type[BaseModel], location: Sequence[str]) -> str:
    """The nearest name in the same section, else the same name in another section, else the nearest of all."""
    known = [key for key, _ in keys_of(kind, inside_values=True)]
    section = "".join(f"{part}." for part in location[:-1] if not part.isdecimal())
    siblings = sorted({key[len(section) :].partition(".")[0] for key in known if key.startswith(section)})
    here = "".join(f"{part}." for part in location[:-1])
    near = [f"{here}{name}" for name in difflib.get_close_matches(location[-1], siblings, n=1, cutoff=0.6)]
    near = near or [key for key in known if key.rpartition(".")[2] == location[-1]]
    near = near or difflib.get_close_matches(".".join(location), known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(siblings)}"
