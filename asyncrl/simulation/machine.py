"""What outlives the controller's process: its checkpoints, its journal's disk, and the time.

Life after life opens it, works on it, and leaves it behind.
"""

from dataclasses import dataclass, field, replace

from asyncrl.config.simulation import Scenario
from asyncrl.journal.model import JournalDisk
from asyncrl.simulation.edges.policy import Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCheckpoint:
    """Weights after a step. One that is not whole cannot be loaded."""

    step: int
    lineage: Lineage
    is_whole: bool = True


BEGINNING = SimCheckpoint(step=0, lineage=())
"""The weights that a run begins with, which it has without saving them."""


@dataclass(slots=True, kw_only=True)
class Machine:
    """`now_s`: when the next life begins. `is_finished`: the run has reached its last step and ended by itself; `is_given_up`: it
    has ended before, and by its right."""

    scenario: Scenario
    checkpoints: list[SimCheckpoint] = field(default_factory=lambda: [BEGINNING])
    """Oldest first."""
    journal: JournalDisk = field(default_factory=JournalDisk)
    now_s: float = 0.0
    num_lives: int = 0
    is_new: bool = True
    """The next life is the first of its run."""
    is_finished: bool = False
    is_given_up: bool = False

    @property
    def newest(self) -> SimCheckpoint:
        """That is whole."""
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.is_whole][-1]

    def begin_anew(self) -> None:
        """Nothing is left of the run."""
        self.checkpoints, self.journal, self.is_new = [BEGINNING], JournalDisk(), True

    def damage_newest(self) -> None:
        """It cannot be read any more."""
        self.checkpoints = [*self.checkpoints[:-1], replace(self.checkpoints[-1], is_whole=False)]

    def delete_damaged(self) -> None:
        """What a restart does first."""
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint.is_whole]

    def save(self, checkpoint: SimCheckpoint) -> list[int]:
        """Keep it beside the newest ones; returns the steps of those that are kept."""
        others = [kept for kept in self.checkpoints if kept.step != checkpoint.step]
        self.checkpoints = [*others, checkpoint][-self.scenario.trainer.max_ckpt_to_keep :]
        return [kept.step for kept in self.checkpoints]
