"""Several simulations side by side: files that are compared, or one key over a range of values.

reports -> [sweep] -> table, JSON, picture
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from asyncrl.errors import ConfigError
from asyncrl.observe.text_tables import as_text
from asyncrl.ports import Json
from asyncrl.simulation.report import Report

MAX_VALUES = 64
"""Of one sweep: more is a slip of the finger, and no table that anybody reads."""
PANELS = ("tokens_per_s", "step_s", "slots_busy", "trainer_busy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """`key` takes each of `values`, in TOML syntax."""

    key: str
    values: tuple[str, ...]


def parse_sweep(text: str) -> Sweep:
    """`key=a..b` (every whole number), `key=a..b+step`, `key=a..b*factor`, or `key=a,b,c`. Raises ConfigError."""
    key, equals, values = text.partition("=")
    form = "it is key=a..b, key=a..b+step, key=a..b*factor, or key=a,b,c"
    if not equals or "." not in key or not values.strip():
        raise ConfigError(f"--sweep {text!r}: {form}")
    try:
        found = _range(values.strip()) if ".." in values else tuple(value.strip() for value in values.split(","))
    except ValueError:
        raise ConfigError(f"--sweep {text!r}: {form}") from None
    if not all(found) or not 1 <= len(found) <= MAX_VALUES:
        raise ConfigError(f"--sweep {text!r}: it gives {len(found)} values; 1 to {MAX_VALUES} are allowed")
    return Sweep(key=key.strip(), values=found)


def _range(text: str) -> tuple[str, ...]:
    first, _, rest = text.partition("..")
    sign = "*" if "*" in rest else "+"
    last, _, step = rest.partition(sign)
    low, high, by = float(first), float(last), float(step or 1)
    if high < low or by <= 0 or (sign == "*" and (by <= 1 or low <= 0)):
        raise ValueError(text)
    values: list[str] = []
    while low <= high * (1 + 1e-9) and len(values) <= MAX_VALUES:
        values.append(f"{low:.12g}")
        low = low * by if sign == "*" else low + by
    return tuple(values)


def side_by_side(names: Sequence[str], reports: Sequence[Report], *, ratios: bool, width: int | None = None) -> str:
    """A row a figure, a column a simulation; `ratios`: beside each its ratio to the first."""
    table = Table("", box=None, pad_edge=False, header_style="")
    for name in names:
        table.add_column(name, justify="right")
    first = reports[0]
    for figure, base in first.figures.items():
        cells = ["failed" if report.failure else f"{report.figures[figure]:.4g}" for report in reports]
        if ratios and base and not first.failure:
            others = zip(cells[1:], reports[1:], strict=True)
            cells[1:] = [cell if report.failure else f"{cell} ({report.figures[figure] / base:.2f}x)" for cell, report in others]
        table.add_row(figure, *cells)
    return as_text([table], width)


def as_json(names: Sequence[str], reports: Sequence[Report]) -> list[dict[str, Json]]:
    """One object a simulation."""
    return [{"name": name, "figures": report.figures, **report.as_json()} for name, report in zip(names, reports, strict=True)]


def draw_sweep(sweep: Sweep, reports: Sequence[Report], path: Path) -> None:
    """A PNG of the main figures against the key. Blocking."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    values = [tomllib.loads(f"value = {value}")["value"] if _is_number(value) else value for value in sweep.values]
    for axes, name in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        axes.plot(values, [report.figures[name] for report in reports], marker="o")
        axes.set_title(name)
        axes.set_xlabel(sweep.key)
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
