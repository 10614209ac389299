"""I6: a trajectory is at most once among the steps that weights have seen; record, update, retire, publish, in this order.
I9: the update sees the rows of the record. I12: a record is whole groups in the order of admission.
"""

from collections import Counter

from asyncrl.journal.entries import StepRecord
from asyncrl.keys import TRAIN
from asyncrl.simulation.machine import SimCheckpoint
from asyncrl.simulation.oracles.consumed import rows_given, rows_recorded
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle, Update
from asyncrl.simulation.oracles.shadow import Changes, ShadowRow
from asyncrl.simulation.oracles.status import TERMINAL


class TrainedOnce(Oracle):
    """The order of a step, and what a checkpoint holds."""

    name = "I6"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._publications = ground.engines.num_publications
        self._checkpoints = ground.machine.checkpoints
        self._written: dict[int, int] = {}
        """Step -> number of the entry that recorded it."""
        self._last = 0
        """The last entry of a step or an evaluation."""
        self._noted: dict[int, int] = {}
        """Version -> number of the entry that noted its evaluation."""
        self._to_sync = (0, 0)
        """Before the last checkpoint was asked for: that entry; and the last one that a checkpoint takes for granted though the
        journal has failed: of the records up to its step, and of evaluations of older versions."""
        self._learned = {uid for step in ground.lineage for uid in step}
        """Groups in the weights of this life."""

    def entry(self, changes: Changes) -> None:
        is_noted = changes.counted.get("evaluated", 0) > 0
        if changes.records or is_noted:
            self._last = changes.number
        if is_noted:
            self._noted[self.ground.shadow.counters["evaluated"]] = changes.number
        for before, after in changes.records:
            if before is not None and (before.keys, before.uids, before.row_ids) != (after.keys, after.uids, after.row_ids):
                self.fail(f"the record of step {after.step} was changed: {len(before.keys)} keys, then {len(after.keys)}")
            if after.tries:
                self._written[after.step] = changes.number
                self._check_new(after, is_repeated=before is not None)
            else:
                self._check_retired(after)
        for record in changes.forgotten:
            self._check_purged(record)

    def _check_new(self, record: StepRecord, *, is_repeated: bool) -> None:
        if record.step != len(self.ground.lineage) + 1:
            self.fail(f"step {record.step} was recorded for weights of {len(self.ground.lineage)} steps")
        again = [uid for uid in record.uids if uid in self._learned]
        if again and not is_repeated:
            self.fail(f"step {record.step} was recorded with groups {again[:4]}, which the weights have seen already")

    def _check_retired(self, record: StepRecord) -> None:
        lineage = self.ground.lineage
        if len(lineage) < record.step or set(lineage[record.step - 1]) != set(record.uids):
            self.fail(f"step {record.step} was retired, but the weights have seen {len(lineage)} steps, not this one's groups")

    def _check_purged(self, record: StepRecord) -> None:
        kept = [checkpoint.step for checkpoint in self.ground.machine.checkpoints if checkpoint.is_whole]
        if self.ground.run.trainer.save_freq and record.step > kept[0]:
            self.fail(f"step {record.step} was purged, but checkpoint {kept[0]} is kept (of {kept}) and would ask for it")

    def updated(self, update: Update) -> None:
        step = len(update.lineage) + 1
        record = self.ground.shadow.records.get(step)
        if record is None or not record.tries:
            self.fail(f"the actor learns step {step}, whose record is {'retired' if record else 'not there'}")
            return
        number = self._written.get(step)
        if number is None:
            self.fail(f"the actor learns step {step}, and this life has not recorded it")
        elif self.ground.run.store.journal and number > update.num_synced:
            self.fail(f"the actor learns step {step}, whose record (entry {number}) is not synced: {update.num_synced} entries are")
        given = {uid for uid in update.group_ids if uid is not None}
        again = sorted(given & self._learned)
        if again:
            self.fail(f"the actor learns groups {again[:4]} for step {step}, which its weights have seen already")
        self._learned |= given
        self._check_same(step, record)

    def _check_same(self, step: int, record: StepRecord) -> None:
        before = self.ground.memory.keys.setdefault(step, record.keys)
        if before != record.keys:
            self.fail(f"step {step} is repeated with {len(record.keys)} keys; a life before had learned from {len(before)} others")

    def saving(self, step: int) -> None:
        records = [number for recorded, number in self._written.items() if recorded <= step]
        noted = [number for version, number in self._noted.items() if version < self.ground.version_of(step)]
        self._to_sync = self._last, max([*records, *noted], default=0)

    def turn(self) -> None:
        ground = self.ground
        if ground.engines.num_publications != self._publications:
            self._publications = ground.engines.num_publications
            self._check_published()
        if ground.admission._version > ground.engines.version:
            self.fail(
                f"admission counts version {ground.admission._version} as published; the engines have {ground.engines.version}"
            )
        if ground.machine.checkpoints is not self._checkpoints:
            before, self._checkpoints = self._checkpoints, ground.machine.checkpoints
            if self._checkpoints[-1] is not before[-1]:
                self._check_checkpoint(self._checkpoints[-1])

    def _check_published(self) -> None:
        ground, version = self.ground, self.ground.engines.version
        step = ground.engines.weights_step
        if step is None or ground.version_of(step) != version:
            self.fail(f"the engines were given weights of {step} steps as version {version}")
            return
        if step % ground.run.publish_freq and step < ground.trainer.total_steps:
            self.fail(f"the engines were given weights of {step} steps; a version is {ground.run.publish_freq}")
        early = [
            record.step
            for record in ground.shadow.records.values()
            if record.step <= step and record.step not in ground.shadow.done
        ]
        if early:
            self.fail(f"version {version} was published before its step {early[0]} was retired")
        if step in ground.state.leases._steps:
            self.fail(f"version {version} is published, and the lease of its step is still open")
        groups = ground.lineage[step - 1] if step else ()
        left = [uid for uid in groups if uid in ground.shadow.groups or ground.state.partition(TRAIN).group_keys(uid)]
        if left:
            self.fail(f"version {version} is published, and keys of its groups {left[:4]} are still there")

    def _check_checkpoint(self, saved: SimCheckpoint) -> None:
        ground, seen = self.ground, [uid for step in saved.lineage for uid in step]
        if len(saved.lineage) != saved.step:
            self.fail(f"the checkpoint of step {saved.step} has weights of {len(saved.lineage)} steps")
        if saved.step % ground.run.publish_freq and saved.step < ground.trainer.total_steps:
            self.fail(f"there is a checkpoint of step {saved.step}, and a version is {ground.run.publish_freq} steps")
        damaged = [checkpoint.step for checkpoint in ground.machine.checkpoints if not checkpoint.is_whole]
        if damaged:
            self.fail(f"checkpoint {saved.step} is kept beside those of steps {damaged}, which are damaged, in place of whole ones")
        twice = [uid for uid, count in Counter(seen).items() if count > 1]
        if twice:
            self.fail(f"the checkpoint of step {saved.step} has seen groups {twice[:4]} twice")
        num_synced, must = ground.machine.journal.num_synced, self._to_sync[ground.has_journal_failed]
        if ground.run.store.journal and num_synced < must:
            self.fail(f"the checkpoint of step {saved.step} is DONE; of the {must} entries before it {num_synced} are synced")
        if not ground.has_journal_failed:
            ground.memory.sweep(num_synced)


class SameRows(Oracle):
    """Reordering and balancing keep uid, key and version: what the actor is given are the values of the record's rows."""

    name = "I9"

    def updated(self, update: Update) -> None:
        step = len(update.lineage) + 1
        record = self.ground.shadow.records.get(step)
        if record is None:
            return
        given, expected = rows_given(update), rows_recorded(self.ground.shadow, record)
        if Counter(given) != Counter(expected):
            strange = next(iter(Counter(given) - Counter(expected)), None)
            who = "fewer rows than that" if strange is None else f"a row of group {strange.uid!r} that is not in it"
            self.fail(f"step {step} is recorded with {len(expected)} rows; the actor was given {len(given)}, {who}")
        for key in record.keys:
            self._check_columns(step, key)

    def _check_columns(self, step: int, key: str) -> None:
        row = self.ground.state.partition(TRAIN).rows.get(key)
        for name, (block, _) in row.cells.items() if row is not None else ():
            if block.step not in (None, step):
                self.fail(f"key {key!r} is learned from by step {step}, and has {name!r} of step {block.step}")


class WholeGroups(Oracle):
    """All trajectories of the first groups alive, by admission, session and index; of one partition."""

    name = "I12"

    def entry(self, changes: Changes) -> None:
        for record in changes.recorded:
            self._check(record)

    def _check(self, record: StepRecord) -> None:
        shadow, book = self.ground.shadow, self.ground.book
        batch = self.ground.run.data.train_batch_size
        if record.partition_id != TRAIN or len(record.uids) != batch:
            self.fail(f"step {record.step} was recorded with {len(record.uids)} groups of {record.partition_id!r}, not {batch}")
        expected: list[str] = []
        allowed = TERMINAL if self.ground.run.replay.failed_groups == "train_partial" else ("finished",)
        for uid in record.uids:
            prompt = shadow.prompt(uid)
            if prompt is None or prompt.status not in allowed:
                self.fail(
                    f"step {record.step} was recorded with group {uid!r}, which is {prompt.status if prompt else 'not there'}"
                )
            expected += _trajectories(shadow.groups.get(uid, {}))
        if list(record.keys) != expected:
            strange = next((key for key in [*record.keys, *expected] if (key in record.keys) != (key in expected)), None)
            what = "in another order than by admission, session and index" if strange is None else f"which differ by {strange!r}"
            self.fail(f"step {record.step} was recorded with {len(record.keys)} keys, its groups have {len(expected)}, {what}")
        numbers = [book.lines[uid].number for uid in record.uids if uid in book.lines]
        if numbers != sorted(numbers):
            self.fail(f"step {record.step} was recorded with prompts {numbers}: not in the order of admission")
        left = [line for line in book.open.values() if line.uid not in record.uids and self.ground.admission.is_alive(line.uid)]
        passed = [line for line in left if line.number < numbers[-1]]
        if passed:
            self.fail(f"step {record.step} was recorded with prompts up to {numbers[-1]}, and passed over {passed[0]}")


def _trajectories(group: dict[str, ShadowRow]) -> list[str]:
    keys = [(row.entry.session_id, int(key.rpartition("_")[2]), key) for key, row in group.items() if not row.is_prompt]
    return [key for _, _, key in sorted(keys, key=lambda each: (each[0] or 0, each[1]))]
