"""timeline.png: who was busy when.

Activity -> [timeline] -> picture

Time is cut into bins, so ten seconds and ten hours, one engine and five hundred, give a picture of one size. Engines are shown as
the share of their slots that is busy, the trainer by its stages, tools and rewards as the number under way; a line marks the end of
each step.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.simulation.activity import Activity, Counts, Grid, Times, grid_of
from asyncrl.simulation.run import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

BINS = 600
_COLOURS = ("#1b6ca8", "#e08e0b", "#3a8f4d", "#a23b72", "#6b6b6b")


def draw_timeline(outcome: Outcome, activity: Activity, path: Path) -> None:
    """Write a PNG. Blocking."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end_s = max(outcome.seconds, 1e-9)
    grid, scenario = grid_of(activity, end_s), outcome.machine.scenario
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Sequence[Axes] = figure.subplots(4, 1, sharex=True, height_ratios=[3, 2, 2, 2])
    edges = np.linspace(0.0, end_s, BINS + 1)
    slots = scenario.rollout.max_num_seqs * scenario.sim.engine.count
    _area(axes[0], edges, _means(grid, grid.rows, edges) / slots, "busy slots", _COLOURS[0])
    axes[0].set_ylim(0, 1)
    _stages(axes[1], grid, edges)
    _area(axes[2], edges, _means(grid, grid.tools, edges), "tool calls", _COLOURS[1])
    _area(axes[3], edges, _means(grid, grid.rewards, edges), "rewards", _COLOURS[2])
    ends = [step["simulated_s"] for step in outcome.watcher.steps if "simulated_s" in step]
    for each in axes:
        each.vlines(ends, *each.get_ylim(), colors="black", linewidth=0.4, alpha=0.5)
        each.margins(x=0)
    axes[0].set_title(f"{len(ends)} steps, {scenario.sim.engine.count} engines x {scenario.rollout.max_num_seqs} slots")
    axes[-1].set_xlabel("virtual seconds")
    figure.savefig(path, dpi=110)


def _means(grid: Grid, counts: Counts, edges: Times) -> Times:
    """[BINS]: the mean of a count over each bin."""
    area = np.concatenate([[0.0], np.cumsum(counts * grid.seconds)])
    return np.diff(np.interp(edges, grid.edges, area)) / np.diff(edges)


def _area(axes: "Axes", edges: Times, values: Times, label: str, colour: str) -> None:
    axes.stairs(values, edges, fill=True, color=colour, alpha=0.8)
    axes.set_ylabel(label)


def _stages(axes: "Axes", grid: Grid, edges: Times) -> None:
    low = np.zeros(BINS)
    for colour, (what, counts) in zip(_COLOURS * (1 + len(grid.trainer) // len(_COLOURS)), grid.trainer.items(), strict=False):
        high = low + _means(grid, np.minimum(counts, 1), edges)
        axes.stairs(high, edges, baseline=low, fill=True, color=colour, label=what)
        low = high
    axes.set_ylim(0, 1)
    axes.set_ylabel("trainer")
    if grid.trainer:
        axes.legend(loc="upper right", fontsize="small", ncols=5)
