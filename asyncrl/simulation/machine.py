"""What outlives the controller's process: its checkpoints, its journal's disk, and the time.

Life after life opens it, works on it, and leaves it behind.
"""

from dataclasses import dataclass, field

from asyncrl.config.simulation import Scenario
from asyncrl.journal.model import JournalDisk
from asyncrl.simulation.edges.policy import Lineage
from asyncrl.trainer import Border


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCheckpoint:
    """Weights and border of a step."""

    border: Border
    lineage: Lineage


@dataclass(slots=True, kw_only=True)
class Machine:
    """`now_s`: when the next life begins. `is_finished`: the run has reached its last step and ended by itself."""

    scenario: Scenario
    checkpoints: list[SimCheckpoint] = field(default_factory=list)
    journal: JournalDisk = field(default_factory=JournalDisk)
    now_s: float = 0.0
    num_lives: int = 0
    is_finished: bool = False

    @property
    def newest(self) -> SimCheckpoint | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def save(self, checkpoint: SimCheckpoint) -> list[int]:
        """Keep it beside the newest ones; returns the steps of those that are kept."""
        others = [kept for kept in self.checkpoints if kept.border.step != checkpoint.border.step]
        self.checkpoints = [*others, checkpoint][-self.scenario.trainer.max_ckpt_to_keep :]
        return [kept.border.step for kept in self.checkpoints]
