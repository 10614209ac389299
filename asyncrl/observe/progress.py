"""The progress of a run for the eye: a bar on a terminal, plain lines elsewhere. `Progress`: training, `LossBar`: a warm start.

sight, sft -> [progress] -> stderr. Nothing is drawn by a thread: the bar changes when it is told to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.control import strip_control_codes
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from asyncrl.ports import GroupStatus

STATUSES = tuple(str(status) for status in GroupStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is shown. reward: mean of the last batch, None before the first; the rest of the numbers count groups by status."""

    step: int = 0
    reward: float | None = None
    tokens_per_s: float = 0.0
    pending: int = 0
    running: int = 0
    finished: int = 0
    failure: int = 0

    def with_groups(self, counts: Mapping[str, float]) -> "View":
        """counts: by status; a status that is not in it keeps its count."""
        return replace(self, **{status: int(counts[status]) for status in STATUSES if status in counts})

    def describe(self) -> str:
        reward = "reward -" if self.reward is None else f"reward {self.reward:.3f}"
        groups = f"groups {self.pending} pending {self.running} running {self.finished} finished {self.failure} failure"
        return f"{reward}  {self.tokens_per_s:.0f} tokens/s  {groups}"

    def describe_step(self) -> str:
        """The same at the end of a step, where no group of the batch is left: only failures tell something."""
        return self.describe().partition("  groups ")[0] + (f"  groups {self.failure} failure" if self.failure else "")


class Progress:
    """A context manager. console: where to show; by default stderr, so that a command's own output stays clean."""

    def __init__(self, *, total_steps: int, step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total_steps = total_steps
        self._view = View(step=step)
        self._bar = self._make_bar() if self._console.is_terminal else None

    @property
    def is_live(self) -> bool:
        """Whether there is a bar, so that it is worth telling it about groups between steps."""
        return self._bar is not None

    def groups(self, counts: Mapping[str, float]) -> None:
        """Show new counts by status; without a terminal they wait for the next step's line."""
        self._view = self._view.with_groups(counts)
        self._redraw()

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """A step is done. Shows of its metrics critic/score/mean, perf/tokens_per_s and groups/<status>, where they are given."""
        groups = {status: numbers[f"groups/{status}"] for status in STATUSES if f"groups/{status}" in numbers}
        reward, speed = numbers.get("critic/score/mean"), numbers.get("perf/tokens_per_s", 0.0)
        self._view = replace(self._view, step=step, reward=reward, tokens_per_s=speed).with_groups(groups)
        if self._bar is None:
            self.say(f"step {step}/{self._total_steps}  {self._view.describe_step()}")
        self._redraw()

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        self._console.print(strip_control_codes(text), markup=False, highlight=False, soft_wrap=True)

    def _make_bar(self) -> RichProgress:
        line = TextColumn("{task.description}")
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn(), line)
        bar = RichProgress(*columns, console=self._console, auto_refresh=False)
        bar.add_task(self._view.describe(), total=self._total_steps, completed=self._view.step)
        return bar

    def _redraw(self) -> None:
        if self._bar is not None:
            (task,) = self._bar.task_ids
            self._bar.update(task, completed=self._view.step, description=self._view.describe(), refresh=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


class LossBar:
    """Progress for the eye, on stderr: a bar on a terminal, elsewhere a line at every twentieth of the way. A context manager."""

    def __init__(self, total: int, *, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = total
        self._bar = RichProgress(
            TextColumn("warm start"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,  # drawn by nobody's thread
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        text = f"loss {loss:.3f}"
        self._bar.update(self._task, completed=step, description=text, refresh=True)
        if not self._console.is_terminal and (step * 20 // self._total != (step - 1) * 20 // self._total):
            self._console.print(f"warm start step {step}/{self._total}  {text}", markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
