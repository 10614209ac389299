"""What a restart may do, and what a retry. Rules 3, 4, 5, 10, 11 and 17 of docs/proofs/recovery.md.

A restart goes on with every attempt and every turn that was kept, repeats the steps that its weights have not seen, and generates
nothing for training before. A retry is a higher attempt that begins at turn 0.
"""

from collections.abc import Sequence

from asyncrl.journal.entries import LeaseEntry, StepRecord
from asyncrl.ports import GenerateRequest
from asyncrl.simulation.faults.plan import EVALUATION
from asyncrl.simulation.oracles.book import Line
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle, Update
from asyncrl.simulation.oracles.shadow import Changes


class Retries(Oracle):
    """Attempts rise by one and are bounded; nothing of a lower one is left. Tries of a step are counted, and bounded too."""

    name = "retry"

    def entry(self, changes: Changes) -> None:
        for before, after in changes.leases:
            if after.session_id is not None:
                self._check_attempt(before, after)
        for uid, session_id in changes.turns_removed:
            self._check_turns(uid, session_id, changes)
        for before_, record in changes.records:
            self._check_tries(before_, record)
        self._check_row_failures(changes)

    def _check_attempt(self, before: LeaseEntry | None, after: LeaseEntry) -> None:
        who, most = f"session {after.uid}_{after.session_id}", self.ground.run.agent.max_attempts
        held = -1 if before is None else before.attempt
        if after.attempt >= most:
            self.fail(f"{who} is at attempt {after.attempt}, from 0; agent.max_attempts is {most}")
        if after.attempt not in (held, held + 1):
            self.fail(f"{who} went from attempt {held} to {after.attempt}")
        if before is not None and after.incarnation > before.incarnation and after.attempt != before.attempt:
            self.fail(f"{who} was at attempt {before.attempt} when the run was started again, and is at {after.attempt} now")
        if after.attempt > held:
            left = self.ground.shadow.turns.get(after.uid, {}).get(after.session_id or 0, 0)
            if left:
                self.fail(f"{who} begins attempt {after.attempt}, and {left} turns of a lower one are left")

    def _check_turns(self, uid: str, session_id: int, changes: Changes) -> None:
        """They go with the session's end, or with its attempt."""
        lease = self.ground.shadow.leases.get(uid, {}).get(session_id)
        risen = any(
            before is not None and after.attempt > before.attempt
            for before, after in changes.leases
            if (after.uid, after.session_id) == (uid, session_id)
        )
        if lease is not None and lease.is_open and not risen:
            self.fail(f"the turns of session {uid}_{session_id} went, and it is still at attempt {lease.attempt}")

    def _check_tries(self, before: StepRecord | None, after: StepRecord) -> None:
        expected = 1 if before is None else before.tries + 1
        if after.tries not in (0, expected):
            self.fail(f"step {after.step} was begun {expected} times since it was done last; its record says {after.tries}")

    def _check_row_failures(self, changes: Changes) -> None:
        """A failed group counts against its row."""
        counted = sum(grown for name, grown in changes.counted.items() if name.startswith(FAILED_ROW))
        dropped = changes.counted.get("dropped/failure", 0)
        if counted != dropped:
            self.fail(f"{dropped} failed groups were dropped, and {counted} counted against their rows")

    def fed(self, lines: Sequence[Line]) -> None:
        """A row that was left out does not come again; and only such rows are left out."""
        limit = self.ground.run.replay.quarantine_after
        for line in lines:
            prompt = self.ground.shadow.prompt(line.uid)
            row = -1 if prompt is None else int(prompt.entry.tag.get("row", -1))
            failures = self.ground.shadow.counters.get(f"{FAILED_ROW}{row}", 0)
            if limit and failures >= limit:
                self.fail(
                    f"{line} was admitted, and {failures} groups of its row {row} have failed (replay.quarantine_after = {limit})"
                )

    def updated(self, update: Update) -> None:
        step, most = len(update.lineage) + 1, self.ground.run.trainer.max_step_tries
        record = self.ground.shadow.records.get(step)
        if record is not None and record.tries > most:
            self.fail(f"step {step} is tried for the {record.tries}th time; trainer.max_step_tries is {most}")


FAILED_ROW = "failed_row/"


class Recovery(Oracle):
    """Nothing new before the last recorded step is done and its version published."""

    name = "recovery"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._last = max(ground.shadow.records, default=ground.shadow.counters.get("purged_step", 0))
        """The last step that the lives before have recorded."""
        self._step_loaded = len(ground.lineage)
        self._is_over = self._last <= self._step_loaded and not self._step_loaded

    def asked(self, request: GenerateRequest) -> None:
        if not request.request_id.startswith(EVALUATION):
            self._check(f"request {request.request_id} was made")

    def fed(self, lines: Sequence[Line]) -> None:
        self._check(f"{lines[0]} was admitted")

    def entry(self, changes: Changes) -> None:
        for before, after in changes.leases:
            if before is not None and after.incarnation > before.incarnation and after.is_open:
                self._check(f"a lease of group {after.uid} was opened again")

    def _check(self, what: str) -> None:
        if self._is_over:
            return
        ground = self.ground
        done, version = len(ground.lineage), ground.engines.version
        if done < self._last or version < ground.version_of(self._last):
            self.fail(
                f"{what} although step {self._last} is recorded: the weights have seen {done} steps, and version {version} is "
                "published"
            )
        if not ground.engines.num_publications:
            self.fail(f"{what} before the weights of step {self._step_loaded}, which were loaded, are published")
        self._is_over = True
