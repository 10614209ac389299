"""Evaluations: each is of one version, none is lost, and none is given up but for its deadline. Rules 8 and 13 of
docs/proofs/recovery.md."""

from collections.abc import Iterator, Sequence

from asyncrl.config import TrainRun
from asyncrl.observe.incidents import Line as Incident
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.simulation.errors import Violation
from asyncrl.simulation.faults.plan import EVALUATION
from asyncrl.simulation.machine import SimCheckpoint
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.memory import Memory
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes

LATE = "deadline_evaluation"


class Evaluated(Oracle):
    """The numbers of a version are of its tokens alone; they are noted when they are written, and before a later checkpoint."""

    name = "evaluation"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._versions: set[int] = set()
        """That sampled for the evaluation under way."""
        self._num_late = 0
        self._checkpoints = ground.machine.checkpoints

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        if request.request_id.startswith(EVALUATION):
            self._versions |= {span.version for span in generation.version_spans}

    def measured(self, step: int, version: int) -> None:
        if self._versions - {version} or version != self.ground.version_of(step):
            self.fail(f"the evaluation of version {version}, after step {step}, was sampled by versions {sorted(self._versions)}")
        self._versions = set()
        self.ground.memory.measured.add(version)

    def entry(self, changes: Changes) -> None:
        if "evaluated" in changes.counted:
            version = self.ground.shadow.counters["evaluated"]
            if version not in self.ground.memory.measured:
                self.fail(f"version {version} is noted as evaluated, and no numbers of it were written")

    def turn(self) -> None:
        num_late = self.ground.num_incidents(LATE)
        if num_late > self._num_late:
            self.ground.memory.num_late += num_late - self._num_late
            self._num_late, self._versions = num_late, set()
        if self.ground.machine.checkpoints is not self._checkpoints:
            self._checkpoints = self.ground.machine.checkpoints
            self._check_checkpoint(self._checkpoints[-1])

    def _check_checkpoint(self, saved: SimCheckpoint) -> None:
        """After a restart from it, the evaluations of older versions can never be made."""
        ground = self.ground
        before = ground.version_of(saved.step)
        owed = [version for version in due_versions(ground.run) if version < before and version not in ground.memory.measured]
        if len(owed) > ground.memory.num_late:
            self.fail(f"there is a checkpoint of step {saved.step}, and versions {owed} were not evaluated")


def due_versions(run: TrainRun) -> Iterator[int]:
    """Those whose evaluation is asked for, in order."""
    config, total = run.trainer, run.trainer.total_training_steps
    if not run.data.val_files or not (run.eval.sampled or run.eval.greedy):
        return
    for step in range(0, total + 1):
        is_version = step % run.publish_freq == 0 or step == total
        ends_interval = config.test_freq and step // config.test_freq > (step - run.publish_freq) // config.test_freq
        is_first, is_last = step == 0 and config.val_before_train, step == total
        if is_version and (is_first or is_last or (step and ends_interval)):
            yield step // run.publish_freq


def check_measured(run: TrainRun, memory: Memory, told: Sequence[Incident]) -> None:
    """The run is over. Raises Violation for a version that nobody measured, and whose evaluation was not late."""
    late = {
        int(line["step"]) // run.publish_freq for line in told if (line.get("kind"), line.get("what")) == ("deadline", "evaluation")
    }
    lost = [version for version in due_versions(run) if version not in memory.measured | late]
    if lost:
        raise Violation("evaluation", f"the run is over, and versions {lost} were never evaluated")
