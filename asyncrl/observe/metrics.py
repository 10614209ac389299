"""metrics.jsonl: one JSON object a line, appended and flushed at each step; and reading it back.

trainer -> [MetricsLog] -> metrics.jsonl, TensorBoard events -> curve

A line is `{"step": 12, "wall_time": 1764460000.0, "incarnation": 0, "critic/score/mean": 0.53, ...}`. A number that is not finite
is written as null, because standard JSON knows no NaN and one such line would make the file unreadable for other programs;
TensorBoard gets the number.

A resumed run appends, under a higher incarnation. Read back, of a step that was trained again only the last time counts; what an
evaluation said of its weights stays, as these are the same and are not evaluated again.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, SupportsFloat

from asyncrl.errors import DataError
from asyncrl.observe.events import EventWriter
from asyncrl.observe.json_lines import cut_unfinished_line
from asyncrl.observe.run_folder import RunFolder
from asyncrl.ports import Json

_OWN_KEYS = ("step", "wall_time", "incarnation")
EVALUATION = "eval/"
"""What the metrics of an evaluation begin with."""


class MetricsLog:
    """Appends to the run folder's metrics.jsonl and, if asked, to its TensorBoard events. One writer a folder.

    Opening cuts off a last line that a killed run left unfinished. A context manager. Blocking: call it through `world.offload`.
    """

    def __init__(
        self, folder: RunFolder, *, tensorboard: bool = False, incarnation: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._incarnation = incarnation
        cut_unfinished_line(folder.metrics)
        self._file = folder.metrics.open("a", encoding="utf-8")
        self._events = EventWriter(folder.tensorboard, started=clock()) if tensorboard else None

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write one line. Raises TypeError for a value that is not a number, ValueError for a key that the log writes itself."""
        for taken in _OWN_KEYS:
            if taken in metrics:
                raise ValueError(f"a metric cannot be called {taken!r}: the log writes that itself")
        now = self._clock()
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        own = {"step": step, "wall_time": now, "incarnation": self._incarnation}
        line = {**own, **{name: _finite_or_none(value) for name, value in numbers.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if any(name.startswith(EVALUATION) for name in metrics):
            os.fsync(self._file.fileno())  # the journal will say that they are there, and be synced: none is measured twice
        if self._events:
            self._events.write(step, now, numbers)

    def close(self) -> None:
        self._file.close()
        if self._events:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _number(name: str, value: object) -> int | float:
    if isinstance(value, int):
        return int(value)
    if isinstance(value, SupportsFloat):  # numpy's and torch's scalars too; text is none
        return float(value)
    raise TypeError(f"metric {name!r} is {value!r}, not a number")


def _finite_or_none(value: int | float) -> int | float | None:
    return value if math.isfinite(value) else None


def read_metrics(path: str | Path) -> list[dict[str, Json]]:
    """One dict a step, by rising step. None: was not finite.

    Lines of one step are merged, the last value of a key wins; of a step that was trained again after a restart, only `eval/*` is
    older. A last line without its end is left out: it is being written. Raises DataError that names file and line.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    steps: dict[int, dict[str, Json]] = {}
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), start=1):
        row = _parse(line, f"{path}:{number}")
        steps[row["step"]] = {**_what_stays(steps.get(row["step"], {}), row), **row}
    return [steps[step] for step in sorted(steps)]


def _what_stays(before: dict[str, Json], row: dict[str, Json]) -> dict[str, Json]:
    """Of the earlier lines of a step, once this one is there."""
    is_same = before.get("incarnation", 0) == row.get("incarnation", 0)
    if is_same or all(name.startswith(EVALUATION) or name in _OWN_KEYS for name in row):
        return before
    return {name: value for name, value in before.items() if name.startswith(EVALUATION)}


def _parse(line: bytes, where: str) -> dict[str, Json]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise DataError(f"{where}: not an object with a whole number 'step'")
    return row
