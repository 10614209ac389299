"""A report as a person reads it.

Report -> [report_text] -> terminal, pipe
"""

from collections.abc import Mapping

from rich.table import Table

from asyncrl.observe.text_tables import as_text
from asyncrl.simulation.grid import BEGINNING, BETWEEN, DOWN, LAST_SESSIONS, RESTART, SETTLING
from asyncrl.simulation.report import Report
from asyncrl.simulation.session_times import CONTROLLER, LOST, QUEUE, REWARD, SLOT, TOOL_PREFIX

LEAST_SHARE = 0.0005
"""Of what is told by its name: less would be shown as 0.0 %."""
_TRAINER_WAITS = {
    QUEUE: "last session queued for a slot",
    SLOT: "last session generated",
    CONTROLLER: "last session was in the controller",
    REWARD: "last session was scored",
    LOST: "last session's call failed",
    BEGINNING: "last session had not begun",
    SETTLING: "last session was written",
    BETWEEN: "store and journal, between stages",
    RESTART: "the controller was restarted",
}
_SLOT_WAITS = {
    QUEUE: "its sessions queued at other engines",
    REWARD: "sessions were scored",
    CONTROLLER: "sessions were in the controller",
    LOST: "sessions whose call failed",
    BEGINNING: "sessions had not begun",
    LAST_SESSIONS: "admission: the batch's last sessions",
    DOWN: "the engine was down",
    RESTART: "the controller was restarted",
}


def render(report: Report, *, width: int | None = None) -> str:
    """For a terminal, a pipe or a file."""
    lives = f", {report.lives} lives" if report.lives > 1 else ""
    parts: list[str | Table] = [f"{report.steps} steps in {report.seconds:.1f} virtual s{lives}"]
    parts += ["", _pairs("throughput", report.throughput)]
    waits = _named(report.trainer_idle_s, _TRAINER_WAITS, "last session was at ")
    parts += ["", _shares("trainer", report.seconds, report.trainer_busy_s, waits)]
    slots, busy = f"engines ({report.slots} slots)", {"generate": report.slot_busy_s}
    parts += [
        "",
        _shares(slots, report.seconds * report.slots, busy, _named(report.slot_idle_s, _SLOT_WAITS, "sessions were at ")),
        _engines(report),
    ]
    parts += ["", _sessions(report), "", _quantile_table(report.quantiles), "", _pairs("length, tokens", report.lengths)]
    parts += ["", _pairs("groups, since the last start" if report.lives > 1 else "groups", report.groups)]
    if report.longest_waits:
        parts += ["", _waits_table(report)]
    pairs = (
        ("staleness, versions: tokens", report.staleness),
        ("tool calls", report.tools),
        ("faults that came true", report.faults),
    )
    for title, numbers in pairs:
        parts += ["", _pairs(title, numbers)] if numbers else []
    return as_text([*parts, *(["", f"failure: {report.failure}"] if report.failure else [])], width)


def _named(idle: Mapping[str, float], names: Mapping[str, str], at: str) -> dict[str, float]:
    return {
        names.get(cause) or (f"{at}{cause}" if cause.startswith(TOOL_PREFIX) else cause): value for cause, value in idle.items()
    }


def _table(*columns: str) -> Table:
    table = Table(*columns[:1], box=None, pad_edge=False, header_style="")
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def _pairs(title: str, numbers: Mapping[str, float]) -> Table:
    table = _table(title, "")
    for name, value in numbers.items():
        table.add_row(f"  {name}", short(value))
    return table


def short(value: float) -> str:
    """Four digits, and whole numbers whole."""
    return f"{value:.0f}" if value == int(value) or abs(value) >= 10_000 else f"{value:.4g}"


def _shares(title: str, capacity: float, busy: Mapping[str, float], idle: Mapping[str, float]) -> Table:
    table = _table(title, "seconds", "share")
    for kind, numbers in (("busy", busy), ("idle", idle)):
        shown = {name: value for name, value in numbers.items() if value >= LEAST_SHARE * capacity}
        rows = sorted(shown.items(), key=lambda pair: -pair[1])
        if rest := sum(value for name, value in numbers.items() if name not in shown):
            rows.append(("the rest", rest))
        for name, value in rows:
            table.add_row(f"  {kind}: {name}", f"{value:.1f}", f"{value / capacity:.1%}")
    return table


def _engines(report: Report) -> str:
    told = report.engines
    return (
        f"  an engine has a row {told['busy_share']:.1%} of the time ({told['least_busy']:.1%} to {told['most_busy']:.1%}), "
        f"and then {told['mean_rows']:.1f} rows on average"
    )


def _sessions(report: Report) -> Table:
    table = _table(f"sessions ({report.sessions})", "seconds each", "share")
    total = sum(report.session_s.values())
    for name, value in sorted(report.session_s.items(), key=lambda pair: -pair[1]):
        table.add_row(f"  {name}", f"{value / max(report.sessions, 1):.3f}", f"{value / total:.1%}")
    return table


def _quantile_table(quantiles: Mapping[str, Mapping[str, float]]) -> Table:
    table = _table("of each", "p50", "p90", "p99", "max")
    for name, numbers in quantiles.items():
        table.add_row(f"  {name}", *(f"{value:.4g}" for value in numbers.values()))
    return table


def _waits_table(report: Report) -> Table:
    table = Table("longest waits for a batch", "s", "last session", "turns", "was at", box=None, pad_edge=False, header_style="")
    for wait in report.longest_waits:
        causes = sorted(wait.causes.items(), key=lambda pair: -pair[1])
        at = ", ".join(f"{name} {value:.1f}" for name, value in causes if value >= 0.01 * wait.seconds)
        table.add_row(f"  step {wait.step}", f"{wait.seconds:.1f}", wait.session, str(wait.num_turns), at)
    return table
