"""timeline.png: who was busy when.

Grid -> [timeline] -> picture

Time is cut into bins, so ten seconds and ten hours, one engine and five hundred, give a picture of one size: engines as the share
of their slots that is busy, a band an engine and above `BANDS` a band for several; the trainer by its stages; sessions by what they
are at; groups by status. A line marks each step's end, as long as lines can be told apart.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.simulation.activity import Activity
from asyncrl.simulation.grid import BETWEEN, RESTART, Counts, Grid, Times, cut_columns, grid_of
from asyncrl.simulation.report import run_end_s
from asyncrl.simulation.run import Outcome
from asyncrl.simulation.session_times import CONTROLLER, LOST, QUEUE, REWARD, SLOT, TOOL_PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 600
BANDS = 32
"""Rows of the picture of the engines: more are thinner than a pixel."""
MAX_LINES = 100
"""Steps that are marked."""
MAX_TOOLS = 6
"""Tools with a colour of their own."""
_COLOURS = {SLOT: "#1b6ca8", QUEUE: "#9ecae1", REWARD: "#3a8f4d", CONTROLLER: "#6b6b6b", LOST: "#b03030"}
_TOOLS = ("#e08e0b", "#f2b94f", "#c46210", "#f7d488", "#a0522d", "#d9a05b", "#7f5f3f")
_STAGES = ("#a23b72", "#1b6ca8", "#3a8f4d", "#e08e0b", "#7a5195", "#4c9f9b", "#8c564b", "#6b8e23")
_GROUPS = {"pending": "#cccccc", "running": "#1b6ca8", "finished": "#3a8f4d", "training": "#a23b72"}
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""(from how many seconds on, seconds of the unit, its name)."""


def draw_timeline(outcome: Outcome, activity: Activity, path: Path) -> None:
    """Write a PNG. Blocking."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end_s = run_end_s(outcome, activity)
    grid, scenario = grid_of(activity, end_s), outcome.machine.scenario
    edges = np.linspace(0.0, end_s, BINS + 1)
    unit_s, unit = next((size, name) for least, size, name in _UNITS if end_s >= least)
    figure = Figure(figsize=(13, 9), layout="constrained")
    engines, trainer, sessions, groups = figure.subplots(4, 1, sharex=True, height_ratios=[3, 1, 3, 2])
    bands = engine_bands(activity, edges, scenario.sim.engine.count, scenario.rollout.max_num_seqs)
    extent = (0.0, end_s / unit_s, len(bands) - 0.5, -0.5)
    image = engines.imshow(bands, aspect="auto", extent=extent, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    figure.colorbar(image, cax=engines.inset_axes((1.01, 0.0, 0.015, 1.0)), label="busy share of the slots")
    few = scenario.sim.engine.count <= BANDS
    engines.set_yticks(range(scenario.sim.engine.count) if scenario.sim.engine.count <= BANDS // 2 else [])
    engines.set_ylabel("engine" if few else f"{scenario.sim.engine.count} engines, in bands")
    shown = edges / unit_s
    _stack(trainer, shown, _trainer_shares(grid, edges), "trainer", dict(zip(_stage_names(grid), _STAGES, strict=False)))
    states = _session_areas(grid, edges)
    _stack(sessions, shown, states, "sessions", {**_COLOURS, **dict(zip(_tools_of(states), _TOOLS, strict=False))})
    _stack(groups, shown, {name: bin_means(grid, counts, edges) for name, counts in grid.groups.items()}, "groups", _GROUPS)
    trainer.set_ylim(0, 1)
    trainer.set_yticks([])
    ends = [step["simulated_s"] / unit_s for step in outcome.watcher.steps if "training/global_step" in step]
    for axes in (sessions, groups) if len(ends) <= MAX_LINES else ():
        for end in ends:
            axes.axvline(end, color="black", linewidth=0.5, alpha=0.6)
    engines.set_title(f"{len(ends)} steps, {scenario.sim.engine.count} engines x {scenario.rollout.max_num_seqs} slots")
    groups.set_xlabel(f"virtual {unit}")
    groups.set_xlim(0, end_s / unit_s)
    FigureCanvasAgg(figure).print_png(path)  # type: ignore[no-untyped-call]


def bin_means(grid: Grid, counts: Times | Counts, edges: Times) -> Times:
    """[BINS]: the mean of a count over each bin."""
    area = np.concatenate([[0.0], np.cumsum(counts * grid.seconds)])
    means: Times = np.diff(np.interp(edges, grid.edges, area)) / np.diff(edges)
    return means


def engine_bands(activity: Activity, edges: Times, num_engines: int, slots: int) -> Times:
    """[bands, BINS]: busy share of the slots of each engine, or of several neighbours."""
    num_bands = min(num_engines, BANDS)
    bands = np.zeros((num_bands, BINS))
    for (who, what), intervals in activity.work.items():
        if what == "row":
            band = int(who.split()[-1]) * num_bands // num_engines
            bands[band] += _overlap(*cut_columns([intervals], float(edges[-1])), edges)
    sizes = np.bincount(np.arange(num_engines) * num_bands // num_engines, minlength=num_bands)
    shares: Times = bands / np.diff(edges) / (sizes[:, None] * slots)
    return shares


def _overlap(starts: Times, ends: Times, edges: Times) -> Times:
    """[BINS]: seconds of the intervals in each bin: the integral of (begun - ended), from sums over what came before each edge."""

    def before(moments: Times) -> Times:
        ordered = np.sort(moments)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        passed = np.searchsorted(ordered, edges)
        area: Times = edges * passed - sums[passed]
        return area

    overlap: Times = np.diff(before(starts) - before(ends))
    return overlap


def _stage_names(grid: Grid) -> list[str]:
    """Those that the eye can see, the longest first."""
    seconds = {stage: float(grid.seconds[grid.is_at(stage)].sum()) for stage in grid.stages if stage not in (BETWEEN, RESTART)}
    least = float(grid.edges[-1]) / BINS
    return [name for name, value in sorted(seconds.items(), key=lambda pair: (-pair[1], pair[0])) if value > least][: len(_STAGES)]


def _trainer_shares(grid: Grid, edges: Times) -> dict[str, Times]:
    return {name: bin_means(grid, grid.is_at(name).astype(np.float64), edges) for name in _stage_names(grid)}


def _session_areas(grid: Grid, edges: Times) -> dict[str, Times]:
    """Generating at the bottom, then what keeps slots free; tools beyond the greatest ones together."""
    areas = {state: bin_means(grid, grid.at[state], edges) for state in (SLOT, QUEUE)}
    tools = sorted(grid.tools().items(), key=lambda pair: (-float(pair[1] @ grid.seconds), pair[0]))
    areas |= {name: bin_means(grid, counts, edges) for name, counts in tools[:MAX_TOOLS]}
    if rest := tools[MAX_TOOLS:]:
        areas[f"{TOOL_PREFIX}others"] = bin_means(grid, np.sum([counts for _, counts in rest], axis=0), edges)
    return areas | {state: bin_means(grid, grid.at[state], edges) for state in (REWARD, CONTROLLER, LOST)}


def _tools_of(areas: Mapping[str, Times]) -> list[str]:
    return [name for name in areas if name.startswith(TOOL_PREFIX)]


def _stack(axes: "Axes", edges: Times, areas: Mapping[str, Times], label: str, colours: Mapping[str, str]) -> None:
    low = np.zeros(BINS)
    for name, values in areas.items():
        if values.max(initial=0.0) > 0:
            axes.stairs(
                low + values, edges, baseline=low, fill=True, color=colours.get(name, "#999999"), label=_SHOWN.get(name, name)
            )
            low = low + values
    axes.set_ylabel(label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


_SHOWN = {"gen": "waits for a batch"}
