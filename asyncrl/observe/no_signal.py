"""A warning when nothing can be learned: with all advantages zero the policy does not change, whatever the curves say."""

from collections.abc import Mapping
from dataclasses import dataclass

EXTREMES = ("critic/advantages/max", "critic/advantages/min")
"""The step's metrics that tell: no advantage is different from zero when both are zero."""


@dataclass(slots=True, kw_only=True)
class NoSignalWatch:
    """Counts steps in a row without a non-zero advantage; warns when they reach `patience`, and again only after a signal."""

    patience: int
    _silent_steps: int = 0

    def see(self, step: int, numbers: Mapping[str, float]) -> str | None:
        """Call once a step with its metrics; a step without EXTREMES does not count. Returns the warning when it is due."""
        if not all(name in numbers for name in EXTREMES):
            return None
        if any(numbers[name] != 0 for name in EXTREMES):
            self._silent_steps = 0
            return None
        self._silent_steps += 1
        return self._warning(step) if self._silent_steps == self.patience else None

    def _warning(self, step: int) -> str:
        return (
            f"step {step}: all advantages were zero for {self.patience} steps in a row, so nothing is learned: the sessions of a "
            "group all got the same reward. Are the tasks too hard or too easy, is the reward constant, or are rollout.n or "
            "rollout.temperature too low?"
        )
