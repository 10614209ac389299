"""Random interleavings of every verb against a plain dict: the store never differs in what it shows, accepts or refuses.

With a journal the process ends at random moments, or the machine loses its power, and the next one opens what is left.
"""

import copy
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from asyncrl.errors import RecordError, StaleLeaseError, StoreError, UnknownKeyError
from asyncrl.journal.model import MemoryJournal
from asyncrl.keys import TRAIN, SessionLease
from asyncrl.protocol.ragged import rows_of
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.world import RealWorld
from tests.transfer_queue.kept_model import ModelRecord
from tests.transfer_queue.store_model import LATE, LENGTHS, SMALL, STRANGER, UIDS, Errors, Writers


class StoreModel(Writers):
    @initialize(data=st.data(), lives=st.lists(st.sampled_from([None, False, True, True]), min_size=3, max_size=3), steps=SMALL)
    def begin(self, data: st.DataObject, lives: list[bool | None], steps: int) -> None:
        """Some groups are there, under way or finished, and perhaps steps that train on them."""
        self.make()
        for uid, is_finished in zip("abc", lives, strict=True):
            if is_finished is not None:
                self.live(data=data, uid=uid, lengths=[1, 2], is_finished=is_finished)
        for step in range(steps):
            self.train(num_groups=1, is_retired=step == 0)

    # --- endings

    def gone(self, keys: list[str]) -> list[str]:
        uids = {key for key in keys if key in self.kept.rows and self.kept.rows[key].session_id is None}
        return [key for key, row in self.kept.rows.items() if key in keys or row.uid in uids]

    def cleared(self, keys: list[str], gone: list[str], reason: str) -> None:
        for key in set(keys).difference(self.kept.rows):
            self.kept.shut("a", 1) if key == STRANGER else self.kept.shut(key)
        if number := sum(self.kept.rows[key].session_id is None for key in gone):
            self.kept.counters[f"dropped/{reason}"] += number
        self.kept.forget(gone)

    @rule(data=st.data(), luck=st.integers(0, 2))
    def clear(self, data: st.DataObject, luck: int) -> None:
        keys = [STRANGER] if luck else self.draw_keys(data)
        gone = self.gone(keys)
        errors: Errors = {RecordError} if any(self.kept.step_of(key) is not None for key in gone) else set()
        if self.is_done(self.queue.kv_clear(keys, partition_id=TRAIN), errors):
            self.cleared(keys, gone, "cleared")

    @rule(data=st.data(), uids=st.lists(UIDS, min_size=1, unique=True), luck=st.integers(0, 2))
    def drop(self, data: st.DataObject, uids: list[str], luck: int) -> None:
        if luck:
            return
        strangers = sorted(key for key, row in self.kept.rows.items() if row.session_id is not None)
        if strangers and not data.draw(st.integers(0, 4)):
            uids = [*uids, data.draw(st.sampled_from(strangers))]
        gone = self.gone(uids)
        errors: Errors = {RecordError} if any(self.kept.step_of(key) is not None for key in gone) else set()
        if len(uids) > 1 and uids[-1] in strangers:
            errors = {StoreError}
        reason = data.draw(st.sampled_from(["x", "failure"]))
        rows = [self.kept.rows[uid].tag.get("row") for uid in uids if uid in self.kept.rows]
        if self.is_done(self.queue.drop(uids, partition_id=TRAIN, reason=reason), errors):
            self.cleared(uids, gone, reason)
            if reason == "failure":
                self.kept.counters.update(f"failed_row/{row}" for row in rows if row is not None)

    # --- steps

    def draw_batch(self, data: st.DataObject, step: int) -> list[str]:
        """Mostly what a step would take: the keys of its record, or all trajectories of some groups."""
        kind = data.draw(st.integers(0, 4))
        if kind == 0:
            return self.draw_keys(data)
        if kind > 1 and step in self.kept.records:
            return self.kept.records[step].keys
        uids = data.draw(st.lists(UIDS, min_size=1, unique=True))
        return [key for key, row in self.kept.rows.items() if row.uid in uids and row.session_id is not None] or [STRANGER]

    @rule(data=st.data(), late=LATE)
    def record(self, data: st.DataObject, late: int) -> None:
        self.record_keys(self.late_step(late), self.draw_batch(data, self.late_step(late)))

    def record_keys(self, step: int, keys: list[str]) -> None:
        kept = self.kept
        errors, held = self.errors_of_record(step, keys), kept.records.get(step)
        if not self.is_done(self.queue.record(step, keys, partition_id=TRAIN), errors):
            return
        if held is None:
            uids = list(dict.fromkeys(kept.rows[key].uid for key in keys))
            rows = {key: kept.rows[key] for key in [*keys, *uids] if key in kept.rows}
            kept.records[step] = ModelRecord(uids, list(keys), rows)
        else:
            held.tries += 1
        self.note_sync()

    def errors_of_record(self, step: int, keys: list[str]) -> Errors:
        kept, held = self.kept, self.kept.records.get(step)
        if held is not None:
            return {RecordError} if held.keys != keys or step <= kept.weights else set()
        errors: Errors = {UnknownKeyError} if any(key not in kept.rows for key in keys) else set()
        uids = {kept.rows[key].uid for key in keys if key in kept.rows}
        left = [key for uid in uids for key in kept.group_of(uid) if (key in keys) == (key == uid)]
        is_taken = any(map(kept.is_trained, [*keys, *uids]))
        if left or is_taken or step != kept.last_step + 1 or any(uid in kept.groups for uid in uids):
            errors.add(RecordError)
        return errors

    @rule(data=st.data(), late=LATE)
    def retire(self, data: st.DataObject, late: int) -> None:
        self.retire_keys(self.late_step(late), self.draw_batch(data, self.late_step(late)))

    def retire_keys(self, step: int, keys: list[str]) -> None:
        kept, lease = self.kept, self.step_lease(step)
        held = kept.records.get(step)
        if self.only_admits and held is None:
            return
        errors: Errors = {StaleLeaseError} if lease not in self.steps else set()
        if any(key not in kept.rows for key in keys):
            errors.add(UnknownKeyError)
        is_partial = held is not None and not set(held.keys) <= set(keys) <= {*held.keys, *held.uids}
        is_early = held is not None and any(kept.weights < other < step for other in kept.records)
        if is_partial or is_early or any(kept.step_of(key) not in (None, step) for key in keys):
            errors.add(RecordError)
        if not self.is_done(self.queue.retire(keys, partition_id=TRAIN, step=step, lease=lease), errors):
            return
        uids = {kept.rows[key].uid for key in keys}
        left = {uid: [key for key in kept.group_of(uid) if key not in keys] for uid in uids}
        kept.forget([*keys, *(uid for uid, others in left.items() if others == [uid])])
        if held is not None:
            held.tries, kept.weights = 0, step

    @rule(data=st.data(), late=LATE)
    def revive(self, data: st.DataObject, late: int) -> None:
        keys, step = self.draw_keys(data), self.late_step(late)
        errors: Errors = {UnknownKeyError} if any(key not in self.kept.rows for key in keys) else set()
        if not self.is_done(self.queue.revive(keys, partition_id=TRAIN, step=step), errors):
            return
        if self.step_lease(step) in self.steps:
            self.steps.remove(self.step_lease(step))
            self.attempts[step] += 1
        for key in keys:
            self.kept.rows[key].columns.pop("advantages", None)

    @rule(late=LATE)
    def purge(self, late: int) -> None:
        kept, step = self.kept, self.late_step(late)
        gone = {number: held for number, held in kept.records.items() if number <= step}
        errors: Errors = {RecordError} if any(number > kept.weights for number in gone) else set()
        if self.is_done(self.queue.purge(step), errors) and gone:
            kept.counters["purged_step"] = max(gone)
            kept.counters["purged_groups"] += sum(len(held.uids) for held in gone.values())
            for number in gone:
                del kept.records[number]

    @rule(version=SMALL)
    def note_evaluation(self, version: int) -> None:
        self.do(self.queue.note_evaluation(version))
        if version > self.kept.counters.get("evaluated", -1):
            self.kept.counters["evaluated"] = version
            self.note_sync()

    @rule()
    def sync(self) -> None:
        self.do(self.queue.sync())
        self.note_sync()

    # --- the usual way, of which the other rules make every other

    @rule(data=st.data(), uid=UIDS, lengths=LENGTHS, is_finished=st.booleans())
    def live(self, data: st.DataObject, uid: str, lengths: list[int], is_finished: bool) -> None:
        """A group, from its admission to a turn of its last session, or to its end."""
        if uid not in self.kept.groups and not self.kept.group_of(uid):
            self.admit(uid=uid, incarnation=0, more=1)
        if uid not in self.kept.groups:
            return
        attempt, incarnation = self.next_attempt(uid, 0), self.kept.groups[uid].incarnation
        self.open_session(uid, 0, attempt, incarnation)
        lease = SessionLease(uid=uid, session_id=0, attempt=attempt, incarnation=incarnation)
        self.put_turn_of(lease, 1)
        if is_finished:
            self.settle(data, lease, lengths, 1)

    @rule(num_groups=st.integers(1, 2), is_retired=st.booleans())
    def train(self, num_groups: int, is_retired: bool) -> None:
        """A step, from its record to its end."""
        kept, step = self.kept, self.kept.last_step + 1
        settled = [row.uid for row in kept.rows.values() if row.session_id is not None and row.uid not in kept.groups]
        uids = [uid for uid in dict.fromkeys(settled) if not kept.is_trained(uid)][:num_groups]
        keys = [key for uid in uids for key in kept.group_of(uid) if key != uid]
        if not keys:
            return
        self.record_keys(step, keys)
        self.open_step(late=-1)
        self.put_columns_of(step, keys)
        if is_retired:
            self.retire_keys(step, keys)

    # --- watches

    @precondition(lambda self: len(self.watches) < 3)
    @rule()
    def watch(self) -> None:
        watch = self.queue.kv_watch(TRAIN)
        self.watches.append((watch, dict(self.do(watch.__anext__()))))

    @precondition(lambda self: self.watches)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """A watcher that folds the changes into what it knew sees exactly what is there."""
        watch, seen = self.watches[data.draw(st.integers(0, len(self.watches) - 1))]  # drawn itself, it would be kept alive
        tags = {key: row.tag for key, row in self.kept.rows.items()}
        if seen == tags:
            return
        for key, tag in self.do(watch.__anext__()).items():
            assert tag is not None or key in seen, "told that a key went of which it was never told"
            if tag is None:
                del seen[key]
            else:
                seen[key] = dict(tag)
        assert seen == tags

    @precondition(lambda self: self.watches)
    @rule()
    def leave(self) -> None:
        self.watches.pop()

    # --- always

    def note_sync(self) -> None:
        if self.is_journaled:
            self.synced = copy.deepcopy(self.kept)

    @invariant()
    def shows_the_same(self) -> None:
        kept = self.kept
        tags = {key: row.tag for key, row in kept.rows.items()}
        assert self.do(self.queue.kv_list()) == ({TRAIN: tags} if tags else {})
        assert list(self.queue._state.tags(TRAIN)) == list(tags)
        stats = self.queue.stats()
        assert stats["keys"] == len(kept.rows)
        assert stats["open_leases"] == len(kept.groups) + len(kept.open_sessions) + len(self.steps)
        assert stats["watchers"] == len(self.watches)
        assert stats["live_bytes"] <= stats["bytes"] <= 2 * stats["live_bytes"]
        assert kept.rows or stats["bytes"] == 0
        assert (stats["records"], stats["turns"]) == (len(kept.records), sum(map(len, kept.turns.values())))
        counters = self.queue.counters()
        assert {name: value for name, value in counters.items() if value} == {n: v for n, v in kept.counters.items() if v}
        assert self.queue.evaluated == kept.counters.get("evaluated", -1)
        assert self.queue.weights_step == kept.weights
        assert {step: record.tries for step, record in self.queue.records.items()} == {n: r.tries for n, r in kept.records.items()}
        self.shows_what_is_under_way()

    def shows_what_is_under_way(self) -> None:
        kept = self.kept
        found = self.queue.groups_under_way(TRAIN)
        alive = [
            uid for uid in dict.fromkeys(row.uid for row in kept.rows.values()) if uid in kept.rows and not kept.is_trained(uid)
        ]
        assert [(group.uid, dict(group.tag)) for group in found] == [(uid, kept.rows[uid].tag) for uid in alive]
        for group in found:
            assert group.is_settled == (group.uid not in kept.groups)
            assert list(group.keys) == [key for key in kept.group_of(group.uid) if key != group.uid]
            sessions = {n: (lease.attempt, is_open) for (uid, n), (lease, is_open) in kept.sessions.items() if uid == group.uid}
            assert {each.session_id: (each.attempt, each.is_open) for each in group.sessions} == sessions
            for each in group.sessions:
                assert each.num_turns == len(kept.turns.get((group.uid, each.session_id), []))

    @invariant()
    def admitted_is_trained_dropped_or_open(self) -> None:
        kept, count = self.kept, self.kept.counters
        if not self.only_admits:
            return
        later = sum(len(record.uids) for step, record in self.queue.records.items() if step > self.queue.weights_step)
        alive = len(self.queue.groups_under_way(TRAIN))
        assert count["admitted"] == self.queue.num_trained + kept.num_dropped + alive + later


class JournaledModel(StoreModel):
    """Over the journal in memory, which can lose its power as well."""

    is_journaled = True

    def open(self) -> TransferQueue:
        self.journal = MemoryJournal()
        return TransferQueue(self.journal, self.journal.load())

    def draw_weights(self, data: st.DataObject) -> int:
        """Of a checkpoint that the journal fits: mostly the newest."""
        legal = [*range(self.kept.counters["purged_step"], self.kept.last_step + 1)]
        usual = max(legal[0], min(self.kept.weights, legal[-1]))
        weights: int = data.draw(st.sampled_from([*legal, usual, usual]))
        return weights

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.journal, weights = self.journal.crash(), self.draw_weights(data)
        self.reopen(TransferQueue(self.journal, self.journal.load(weights), weights_step=weights), weights)

    @rule(data=st.data())
    def lose_power(self, data: st.DataObject) -> None:
        self.journal = self.journal.lose_power()
        self.kept = copy.deepcopy(self.synced)
        weights = self.draw_weights(data)
        self.reopen(TransferQueue(self.journal, self.journal.load(weights), weights_step=weights), weights)

    def reopen(self, queue: TransferQueue, weights: int) -> None:
        """The next process: no steps and no watchers; all else to the last value."""
        self.num_opened += 1
        self.queue, self.steps, self.watches = queue, set(), []
        assert queue.incarnation == self.num_opened
        self.kept.load(weights)
        for key, row in self.kept.rows.items():
            held = self.do(queue.describe([key], partition_id=TRAIN))
            assert {column.field for column in held} == set(row.columns)
            for name, value in row.columns.items():
                column = self.do(queue.kv_batch_get([key], partition_id=TRAIN, fields=[name])).get(name)
                got = column.tolist()[0] if name in ("extra_fields", "raw_prompt") else rows_of(column)[0].tolist()
                assert got == value
        self.note_sync()


class RunModel(JournaledModel):
    """Used as a run uses it: the conservation of groups holds through ends and losses of power."""

    only_admits = True


class DiskModel(JournaledModel):
    """Over the journal on disk."""

    lose_power = None  # type: ignore[assignment]

    def open(self) -> TransferQueue:
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.stack = AsyncExitStack()
        return self.enter()

    def enter(self, weights: int = 0) -> TransferQueue:
        opening = open_queue(Path(self.folder.name) / "journal.db", world=RealWorld(), weights_step=weights)
        return self.loop.run_until_complete(self.stack.enter_async_context(opening))

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.loop.run_until_complete(self.stack.aclose())
        weights = self.draw_weights(data)
        self.reopen(self.enter(weights), weights)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.stack.aclose())
        self.folder.cleanup()
        super().teardown()


for _model, _examples in ((StoreModel, 100), (JournaledModel, 60), (RunModel, 40), (DiskModel, 15)):
    _model.TestCase.settings = settings(max_examples=_examples, stateful_step_count=40)
TestStoreModel = StoreModel.TestCase
TestJournaledModel = JournaledModel.TestCase
TestRunModel = RunModel.TestCase
TestDiskModel = DiskModel.TestCase
