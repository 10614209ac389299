"""Incidents: what went wrong and was dealt with, counted, and kept for incidents.jsonl until somebody takes it.

agents, trainer, loop_watch -> [Incidents.report] -> sight -> incidents.jsonl, `incidents/*` of metrics.jsonl
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from asyncrl.observe.json_lines import cut_unfinished_line
from asyncrl.ports import Incident, IncidentKind, Json, Report, World, ignore_incident

MOST_KEPT = 1000
"""Incidents between two takings; a run in which everything fails must not fill its memory. Further ones are only counted."""

Line = Mapping[str, Json]
"""`wall_time`, `run_s` (seconds since the controller began), then the parts of an Incident that apply."""


class Incidents:
    """Of one life of a controller. On the loop's thread only."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._began_s = world.now()
        self._counts: Counter[str] = Counter()
        self._kept: list[Line] = []
        self._num_left_out = 0
        self._also: Report = ignore_incident

    def tell(self, also: Report) -> None:
        """Who hears of each at once from now on."""
        self._also = also

    def report(self, incident: Incident) -> None:
        """Count it and keep it; the port's `Report`."""
        self._also(incident)
        self._counts[f"incidents/{incident.kind}_{incident.what}"] += 1
        if len(self._kept) < MOST_KEPT:
            self._kept.append({**self._now(), **{name: part for name, part in asdict(incident).items() if part not in (None, "")}})
        else:
            self._num_left_out += 1

    def take(self) -> list[Line]:
        """Those since the last call, in order. Where there were too many, the last line says how many are only counted."""
        taken, self._kept = self._kept, []
        if self._num_left_out:
            taken.append({**self._now(), "left_out": self._num_left_out})
            self._num_left_out = 0
        return taken

    def counts(self) -> dict[str, float]:
        """`incidents/<kind>_<what>`: how many so far, of those that happened."""
        return {name: float(count) for name, count in self._counts.items()}

    def _now(self) -> dict[str, Json]:
        return {"wall_time": self._world.wall_time(), "run_s": round(self._world.now() - self._began_s, 3)}


class IncidentLog:
    """Appends to incidents.jsonl, each line with the controller's incarnation. Opening cuts off a last line that a killed run left
    unfinished; the file is made by the first incident. Blocking: call it through `world.offload`."""

    def __init__(self, path: Path, *, incarnation: int = 0) -> None:
        self._path = path
        self._incarnation = incarnation
        cut_unfinished_line(path)

    def append(self, lines: Sequence[Line]) -> None:
        text = "".join(f"{json.dumps({'incarnation': self._incarnation, **line})}\n" for line in lines)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def incident_lines(counts: Mapping[str, float]) -> list[str]:
    """One line for each kind of incident that happened, from `Incidents.counts`; for the end of a run."""
    told = []
    for kind in IncidentKind:
        prefix = f"incidents/{kind}_"
        found = {name.removeprefix(prefix): int(count) for name, count in counts.items() if name.startswith(prefix) and count}
        if found:
            parts = ", ".join(f"{what} {count}" for what, count in sorted(found.items(), key=lambda item: (-item[1], item[0])))
            told.append(f"{kind} x {sum(found.values())}: {parts}")
    return told
