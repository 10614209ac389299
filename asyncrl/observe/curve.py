"""curve.png: success on held-out rows and training reward over steps, of one run or of several in one picture.

metrics.jsonl -> [curve] -> curve.png

Draws on a figure of its own (no pyplot, no global state), so it may run in any thread. matplotlib is imported when the first
picture is drawn: it costs half a second, and a run needs it only at its end.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import DataError
from asyncrl.observe.metrics import read_metrics
from asyncrl.observe.run_folder import RunFolder
from asyncrl.ports import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Json]]
"""What read_metrics gives: a dict a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A metric that is drawn."""

    metric: str
    label: str
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Axes under a title; left out when no run has one of its metrics."""

    title: str
    lines: tuple[Line, ...]


PANELS = (
    Panel(
        title="success on held-out rows",
        lines=(
            Line(metric="eval/sampled/success", label="sampled", style="-"),
            Line(metric="eval/greedy/success", label="greedy", style="--"),
        ),
    ),
    Panel(title="reward in training", lines=(Line(metric="critic/score/mean", label="reward", style="-"),)),
    Panel(title="supervised loss", lines=(Line(metric="sft/loss", label="loss", style="-"),)),
)


def draw_curve(folder: Path) -> Path | None:
    """Draw the run folder's curve.png from its metrics.jsonl; None when there is nothing to draw yet. Blocking."""
    run = RunFolder(path=folder)
    if not run.metrics.exists() or not _panels([read_metrics(run.metrics)]):
        return None
    return draw_curves([folder], run.curve)


def draw_curves(folders: Sequence[Path], out: Path) -> Path:
    """Draw several runs into one picture, a colour a run. Blocking.

    Raises DataError when a run has no readable metrics.jsonl, or none has a metric that is drawn."""
    runs = [(folder.name, read_metrics(RunFolder(path=folder).metrics)) for folder in folders]
    panels = _panels([rows for _, rows in runs])
    if not panels:
        names = ", ".join(line.metric for panel in PANELS for line in panel.lines)
        raise DataError(f"{', '.join(map(str, folders))}: no metric to draw; one of {names} is needed")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 4.0), layout="constrained")
    for position, panel in enumerate(panels):
        _draw(figure.add_subplot(1, len(panels), position + 1), panel, runs)
    unfinished = out.with_name(f".{out.name}.tmp")
    FigureCanvasAgg(figure).print_png(unfinished)  # type: ignore[no-untyped-call]
    os.replace(unfinished, out)
    return out


def _panels(runs: Sequence[Rows]) -> list[Panel]:
    """Those of which some run has a metric."""
    return [panel for panel in PANELS if any(_points(rows, line.metric)[0] for rows in runs for line in panel.lines)]


def _draw(axes: "Axes", panel: Panel, runs: Sequence[tuple[str, Rows]]) -> None:
    for number, (name, rows) in enumerate(runs):
        for line in panel.lines:
            steps, values = _points(rows, line.metric)
            if steps:
                label = line.label if len(runs) == 1 else f"{name} {line.label}"
                axes.plot(steps, values, line.style, color=f"C{number}", label=label, marker="." if len(steps) < 40 else None)
    axes.set(title=panel.title, xlabel="step")
    if panel.title.startswith("success"):
        axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _points(rows: Rows, metric: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[metric]) for row in rows if isinstance(row.get(metric), int | float)]
    return [step for step, _ in found], [value for _, value in found]
