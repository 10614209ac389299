"""Random numbers of a scenario, as its file writes them: a plain number, or a table with a kind. No file is drawn from here.

scenario.toml -> [Distribution] -> simulation/draws.py
"""

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, model_serializer, model_validator

from asyncrl.config.sections import Section
from asyncrl.errors import ConfigError
from asyncrl.ports import Json

NonNegative = Annotated[float, Field(ge=0)]


class Distribution(Section):
    """A random number. In TOML a plain number is a constant: `latency_s = 0.2`."""

    kind: Literal["constant", "uniform", "exponential", "lognormal", "empirical"] = "constant"
    """Shape."""
    value: NonNegative = 0.0
    """Of `constant`."""
    low: NonNegative = 0.0
    """Of `uniform`: the least."""
    high: NonNegative = 0.0
    """Of `uniform`: the most."""
    mean: NonNegative = 0.0
    """Of `exponential` and `lognormal`."""
    cv: NonNegative = 1.0
    """Of `lognormal`: standard deviation / mean."""
    values: tuple[NonNegative, ...] = ()
    """Of `empirical`: numbers that were measured, each as likely."""
    file: str = ""
    """Of `empirical`: a file with one number a line, in place of `values`. A relative path begins at the scenario's folder."""

    @model_validator(mode="before")
    @classmethod
    def _as_toml_writes_it(cls, data: Json, info: ValidationInfo) -> Json:
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return {"value": data}
        if not isinstance(data, (dict, cls)):
            raise ConfigError(f"{data!r} is neither a number nor a table with a kind")
        if isinstance(data, cls):
            return data
        found = dict(data)
        if isinstance(found.get("values"), list):
            found["values"] = tuple(found["values"])
        if isinstance(found.get("file"), str) and found["file"] and isinstance(info.context, Path):
            found["file"] = str((info.context / found["file"]).resolve())
        return found

    @model_validator(mode="after")
    def _check(self) -> Self:
        given, mine = self.model_fields_set - {"kind"}, KEYS_OF_KIND[self.kind]
        strange = [key for key in type(self).model_fields if key in given and key not in mine]
        if strange:
            raise ConfigError(f'{strange[0]} has no effect because kind is "{self.kind}", which has {" and ".join(mine)}')
        if self.kind == "empirical":
            self._check_empirical()
        elif missing := [key for key in mine if key not in given and key != "cv"]:
            raise ConfigError(f'{missing[0]} is missing: kind "{self.kind}" needs it')
        if self.high < self.low:
            raise ConfigError(f"high = {self.high:g} is less than low = {self.low:g}")
        return self

    def _check_empirical(self) -> None:
        if bool(self.values) == bool(self.file):
            raise ConfigError('kind "empirical" needs either values or a file, not both and not neither')
        if self.file:
            numbers_in(Path(self.file))

    @model_serializer(mode="plain")
    def _as_toml(self) -> Json:
        """As a file would have it: only what its kind has, and a constant as a plain number."""
        if self.kind == "constant":
            return self.value
        told = {key: getattr(self, key) for key in KEYS_OF_KIND[self.kind]}
        return {
            "kind": self.kind,
            **{key: list(value) if key == "values" else value for key, value in told.items() if value or value == 0},
        }


KEYS_OF_KIND: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "uniform": ("low", "high"),
    "exponential": ("mean",),
    "lognormal": ("mean", "cv"),
    "empirical": ("values", "file"),
}
"""What each kind reads; `cv` may be left out, and of the last two one is given."""


def constant(value: float) -> Distribution:
    return Distribution(value=value)


def numbers_in(path: Path) -> tuple[float, ...]:
    """Of an empirical file: one number a line. Raises ConfigError when there is none, or one that is below 0 or not finite."""
    try:
        values = tuple(float(line) for line in path.read_text(encoding="utf-8").split())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: an empirical distribution needs a file with one number a line ({error})") from error
    if not values:
        raise ConfigError(f"{path}: an empirical distribution needs at least one number")
    if strange := [value for value in values if not (math.isfinite(value) and value >= 0)]:
        raise ConfigError(f"{path}: {strange[0]} is not a finite number of 0 or more")
    return values
