"""Several simulations side by side: scenarios that are compared, or one key over its values.

Named -> [comparison] -> table, JSON, pictures
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from asyncrl.observe.text_tables import as_text
from asyncrl.ports import Json
from asyncrl.simulation.asked import Sweep
from asyncrl.simulation.grid import BEGINNING, BETWEEN, DOWN, LAST_SESSIONS, RESTART, SETTLING
from asyncrl.simulation.report import Report
from asyncrl.simulation.report_text import short
from asyncrl.simulation.session_times import CONTROLLER, LOST, QUEUE, REWARD, SLOT, TOOL_PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = {
    "tokens_per_s": "tokens a second",
    "step_s": "seconds a step",
    "slots_busy": "busy share of the slots",
    "trainer_busy": "busy share of the trainer",
}
"""Figures that are drawn over a key."""
MAX_TICKS = 12
"""Values that are all written below the axis."""
KINDS = {
    "generation": (SLOT, "generate"),
    "tools": (TOOL_PREFIX,),
    "rewards": (REWARD,),
    "queue": (QUEUE,),
    "last sessions": (LAST_SESSIONS,),
    "trainer": ("trainer: update_actor", "trainer: "),
    "controller": (CONTROLLER, BEGINNING, SETTLING, BETWEEN),
    "faults": (LOST, DOWN, RESTART, "no batch came"),
}
"""Kinds of time, and how the names of theirs begin."""
OTHER = "stages of a step"
_COLOURS = ("#1b6ca8", "#e08e0b", "#3a8f4d", "#9ecae1", "#cccccc", "#a23b72", "#6b6b6b", "#b03030", "#7a5195")


def side_by_side(names: Sequence[str], reports: Sequence[Report], *, ratios: bool, width: int | None = None) -> str:
    """A row a figure, a column a simulation; `ratios`: beside each its ratio to the first. One that failed has no figures."""
    table = Table("", box=None, pad_edge=False, header_style="")
    for name in names:
        table.add_column(name, justify="right")
    found = [{} if report.failure else report.figures for report in reports]
    for figure in max(found, key=len):
        table.add_row(figure, *(_cell(each, figure, found[0] if ratios and each is not found[0] else {}) for each in found))
    return as_text([table], width)


def _cell(figures: Mapping[str, float], figure: str, first: Mapping[str, float]) -> str:
    if figure not in figures:
        return "failed"
    ratio = f" ({figures[figure] / first[figure]:.2f}x)" if first.get(figure) else ""
    return f"{short(figures[figure])}{ratio}"


def as_json(names: Sequence[str], reports: Sequence[Report]) -> list[dict[str, Json]]:
    """One object a simulation."""
    return [{"name": name, "figures": report.figures, **report.as_json()} for name, report in zip(names, reports, strict=True)]


def draw_sweep(sweep: Sweep, reports: Sequence[Report], path: Path) -> None:
    """A PNG of the main figures against the key; simulations that failed are left out. Blocking."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    found = [(value, report.figures) for value, report in zip(sweep.values, reports, strict=True) if not report.failure]
    numbers = [_number(value) for value, _ in found]
    values = numbers if None not in numbers else [value for value, _ in found]
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, LINES.items(), strict=True):
        points = [figures.get(name, 0.0) for _, figures in found]
        axes.plot(values, points, marker="o")
        axes.set(title=title, xlabel=sweep.key, ylim=(0, 1.1 * max(points, default=0.0) or 1.0))
        if len(values) <= MAX_TICKS:
            axes.set_xticks(values)
        axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(path)  # type: ignore[no-untyped-call]


def draw_shares(names: Sequence[str], reports: Sequence[Report], path: Path) -> None:
    """A PNG of what the time of slots and trainer went to: a bar a simulation. Blocking."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.5 + 0.5 * len(names)), layout="constrained")
    slots, trainer = figure.subplots(1, 2, sharey=True)
    _bars(slots, names, [{"generate": each.slot_busy_s, **each.slot_idle_s} for each in reports], "slots of the engines")
    waits = [{**{f"stage {name}": value for name, value in each.trainer_busy_s.items()}, **each.trainer_idle_s} for each in reports]
    _bars(trainer, names, waits, "trainer")
    slots.invert_yaxis()
    handles = {label: handle for axes in (slots, trainer) for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize="small", frameon=False)
    FigureCanvasAgg(figure).print_png(path)  # type: ignore[no-untyped-call]


def _bars(axes: "Axes", names: Sequence[str], parts: Sequence[Mapping[str, float]], title: str) -> None:
    kinds = [_by_kind(part) for part in parts]
    left = np.zeros(len(names))
    for colour, kind in zip(_COLOURS, (*KINDS, OTHER), strict=True):
        shares = np.array([each.get(kind, 0.0) for each in kinds])
        if shares.any():
            axes.barh(range(len(names)), shares, left=left, color=colour, label=kind)
            left = left + shares
    axes.set_yticks(range(len(names)), names)
    axes.set(title=title, xlabel="share of the time", xlim=(0, 1))


def _by_kind(part: Mapping[str, float]) -> dict[str, float]:
    total, kinds = sum(part.values()), dict[str, float]()
    for name, seconds in part.items():
        kind = next((kind for kind, begins in KINDS.items() if name.startswith(begins)), OTHER)
        kinds[kind] = kinds.get(kind, 0.0) + max(seconds, 0.0) / max(total, 1e-9)
    return kinds


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
