"""Random interleavings of every verb against a plain dict: the store never differs in what it shows, accepts or refuses.

With a journal the process ends at random moments, or the machine loses its power, and the next one opens what is left.
"""

import asyncio
import copy
import tempfile
from collections import Counter
from collections.abc import Collection, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.errors import MissingColumnError, RecordError, StaleLeaseError, StoreError, UnknownKeyError
from asyncrl.journal.model import MemoryJournal
from asyncrl.keys import TRAIN, GroupLease, Lease, SessionLease, StepLease
from asyncrl.protocol.ragged import rows_of
from asyncrl.transfer_queue import TransferQueue, Watch
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.world import RealWorld

UIDS = st.sampled_from(["a", "b", "c"])
SESSIONS = st.integers(0, 1)
SMALL = st.integers(0, 2)
LATE = st.sampled_from([0, 0, 1, -1, -2])
"""Which step, counted from the one that is next."""
LENGTHS = st.lists(SMALL, min_size=1, max_size=3)
STRANGER = "a_1_2"
"""A key that is mostly not there; by its name it is of session 1 of group `a`."""
Errors = set[type[StoreError]]


@dataclass
class ModelRow:
    uid: str
    session_id: int | None
    attempt: int
    incarnation: int
    tag: dict[str, int] = field(default_factory=dict)
    columns: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class ModelRecord:
    uids: list[str]
    keys: list[str]
    is_retired: bool = False


@dataclass
class Kept:
    """What a journal keeps, in plain Python."""

    rows: dict[str, ModelRow] = field(default_factory=dict)
    groups: dict[str, GroupLease] = field(default_factory=dict)
    sessions: dict[tuple[str, int], tuple[SessionLease, bool]] = field(default_factory=dict)  # the latest one, and is it open?
    turns: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)
    records: dict[int, ModelRecord] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def open_sessions(self) -> set[SessionLease]:
        return {lease for lease, is_open in self.sessions.values() if is_open}

    def group_of(self, uid: str) -> list[str]:
        return [key for key, row in self.rows.items() if row.uid == uid]

    def step_of(self, key: str) -> int | None:
        return next((step for step, held in self.records.items() if not held.is_retired and key in [*held.keys, *held.uids]), None)

    def shut(self, uid: str, session_id: int | None = None) -> None:
        """The lease of a session, or of a group with all of its sessions, is closed and its turns are gone."""
        if session_id is None:
            self.groups.pop(uid, None)
            self.sessions = {key: value for key, value in self.sessions.items() if key[0] != uid}
            self.turns = {key: value for key, value in self.turns.items() if key[0] != uid}
            return
        self.turns.pop((uid, session_id), None)
        if (uid, session_id) in self.sessions:
            self.sessions[uid, session_id] = self.sessions[uid, session_id][0], False

    def forget(self, keys: Collection[str]) -> None:
        for key in keys:
            row = self.rows.pop(key)
            self.shut(row.uid, row.session_id)

    @property
    def last_step(self) -> int:
        return max(self.records, default=self.counters["purged_step"])

    @property
    def num_dropped(self) -> int:
        return sum(value for name, value in self.counters.items() if name.startswith("dropped/"))


class StoreModel(RuleBasedStateMachine):
    is_journaled = False
    only_admits = False
    """Groups begin by an admission and end by a drop or a recorded step, as in a run; then their counts add up."""

    @initialize(data=st.data(), lives=st.lists(st.sampled_from([None, False, True, True]), min_size=3, max_size=3), steps=SMALL)
    def begin(self, data: st.DataObject, lives: list[bool | None], steps: int) -> None:
        """Some groups are there, under way or finished, and perhaps steps that train on them."""
        self.make()
        for uid, is_finished in zip("abc", lives, strict=True):
            if is_finished is not None:
                self.live(data=data, uid=uid, lengths=[1, 2], is_finished=is_finished)
        for step in range(steps):
            self.train(num_groups=1, is_retired=step == 0)

    def make(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.kept = Kept()
        self.synced = Kept()
        self.steps: set[StepLease] = set()
        self.attempts: Counter[int] = Counter()  # failed ones of each step
        self.watches: list[tuple[Watch, dict[str, dict[str, int]]]] = []
        self.counter = 0
        self.num_opened = 0
        self.queue = self.open()

    def open(self) -> TransferQueue:
        return TransferQueue()

    def teardown(self) -> None:
        self.loop.close()

    def do(self, verb: Coroutine[Any, Any, Any]) -> Any:
        """Without a journal no verb suspends, and no watch that has something to tell: a loop would only make this slower."""
        if self.is_journaled:
            return self.loop.run_until_complete(verb)
        try:
            verb.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("suspended")

    def is_done(self, verb: Coroutine[Any, Any, None], errors: Errors, match: str = "") -> bool:
        """Do it; with `errors` it must be refused by one of them."""
        if not errors:
            self.do(verb)
            return True
        with pytest.raises(tuple(errors), match=match or None):
            self.do(verb)
        return False

    def value(self, length: int) -> list[int]:
        self.counter += 1
        return [self.counter] * length

    # --- leases

    @precondition(lambda self: not self.only_admits or self.kept.groups)
    @rule(uid=UIDS, incarnation=SMALL)
    def open_group(self, uid: str, incarnation: int) -> None:
        kept, lease, held = self.kept, GroupLease(uid=uid, incarnation=incarnation), self.kept.groups.get(uid)
        if self.only_admits and held is None:
            return
        known = [row.incarnation for row in kept.rows.values() if row.uid == uid and row.session_id is None]
        if held is not None:
            known.append(held.incarnation)
        is_refused = kept.step_of(uid) is not None or any(incarnation <= other for other in known)
        if self.is_done(self.queue.open_lease(lease), {StaleLeaseError} if is_refused else set()):
            kept.groups[uid] = lease
            kept.sessions = {key: (latest, is_open and key[0] != uid) for key, (latest, is_open) in kept.sessions.items()}

    @rule(data=st.data(), uid=UIDS, session_id=SESSIONS, attempt=SMALL, incarnation=SMALL, is_next=st.booleans())
    def open_some_session(
        self, data: st.DataObject, uid: str, session_id: int, attempt: int, incarnation: int, is_next: bool
    ) -> None:
        """Any, or one that may be opened."""
        if is_next and self.kept.groups:
            uid = data.draw(st.sampled_from(sorted(self.kept.groups)))
            attempt, incarnation = self.next_attempt(uid, session_id), self.kept.groups[uid].incarnation
        self.open_session(uid, session_id, attempt, incarnation)

    def next_attempt(self, uid: str, session_id: int) -> int:
        written = [row.attempt for row in self.kept.rows.values() if (row.uid, row.session_id) == (uid, session_id)]
        latest = self.kept.sessions.get((uid, session_id))
        return max([-1, *written, *([latest[0].attempt] if latest else [])]) + 1

    def open_session(self, uid: str, session_id: int, attempt: int, incarnation: int) -> None:
        kept, lease = self.kept, SessionLease(uid=uid, session_id=session_id, attempt=attempt, incarnation=incarnation)
        group, latest = kept.groups.get(uid), kept.sessions.get((uid, session_id), (None, False))[0]
        mine = [key for key, row in kept.rows.items() if (row.uid, row.session_id) == (uid, session_id)]
        is_refused = (
            group is None
            or incarnation < group.incarnation
            or (latest is not None and (attempt < latest.attempt or incarnation < latest.incarnation or lease == latest))
            or any(attempt < kept.rows[key].attempt or incarnation < kept.rows[key].incarnation for key in mine)
        )
        if not self.is_done(self.queue.open_lease(lease), {StaleLeaseError} if is_refused else set()):
            return
        if latest is not None and latest.attempt < attempt:
            kept.turns.pop((uid, session_id), None)
        kept.sessions[uid, session_id] = lease, True
        for key in mine:
            if kept.rows[key].attempt < attempt:
                del kept.rows[key]

    def step_lease(self, step: int) -> StepLease:
        return StepLease(step=step, attempt=self.attempts[step])

    def late_step(self, late: int) -> int:
        return max(0, self.kept.last_step + 1 + late)

    @rule(late=LATE)
    def open_step(self, late: int) -> None:
        lease = self.step_lease(self.late_step(late))
        if self.is_done(self.queue.open_lease(lease), {StaleLeaseError} if lease in self.steps else set()):
            self.steps.add(lease)

    @precondition(lambda self: self.steps or self.kept.groups)
    @rule(data=st.data(), luck=st.integers(0, 1))
    def close(self, data: st.DataObject, luck: int) -> None:
        if luck:
            return
        held: list[Lease] = [*self.kept.groups.values(), *self.kept.open_sessions, *self.steps]
        lease = data.draw(st.sampled_from(sorted(held, key=repr)))
        for _ in range(2):
            self.do(self.queue.close_lease(lease))
        if isinstance(lease, StepLease):
            self.steps.remove(lease)
        else:
            self.kept.shut(lease.uid, lease.session_id if isinstance(lease, SessionLease) else None)

    # --- put and get

    @rule(uid=UIDS, incarnation=SMALL, cursor=SMALL)
    def admit(self, uid: str, incarnation: int, cursor: int) -> None:
        kept, lease = self.kept, GroupLease(uid=uid, incarnation=incarnation)
        admit = self.queue.admit(lease, partition_id=TRAIN, cursor=cursor, tag={"n": 0}, fields={"raw_prompt": self.value(2)})
        if self.is_done(admit, {StaleLeaseError} if uid in kept.groups or kept.group_of(uid) else set()):
            kept.groups[uid] = lease
            kept.rows[uid] = ModelRow(uid, None, 0, incarnation, {"n": 0}, {"raw_prompt": [self.counter] * 2})
            kept.counters.update(admitted=1)
            kept.counters["cursor"] = cursor

    def put_tag(self, lease: GroupLease, number: int) -> None:
        row = self.kept.rows.setdefault(lease.uid, ModelRow(lease.uid, None, 0, lease.incarnation))
        row.incarnation = lease.incarnation
        row.tag["n"] = number

    @rule(uid=UIDS, older=st.sampled_from([0, 0, 0, 1, -1]), number=SMALL, is_settling=st.sampled_from([False, False, True]))
    def put_prompt(self, uid: str, older: int, number: int, is_settling: bool) -> None:
        held = self.kept.groups.get(uid, GroupLease(uid=uid))
        lease = GroupLease(uid=uid, incarnation=held.incarnation - older)
        put = self.queue.settle_group if is_settling else self.queue.kv_put
        args: dict[str, Any] = {"lease": lease} if is_settling else {"key": uid, "lease": lease}
        is_open = self.kept.groups.get(uid) == lease
        if self.is_done(put(**args, partition_id=TRAIN, tag={"n": number}), set() if is_open else {StaleLeaseError}, f"'{uid}'"):
            self.put_tag(lease, number)
            if is_settling:
                self.kept.shut(uid)

    def draw_session(self, data: st.DataObject) -> SessionLease:
        """Mostly an open one."""
        mine = sorted(self.kept.open_sessions, key=repr)
        any_lease = st.builds(SessionLease, uid=UIDS, session_id=SESSIONS, attempt=SMALL)
        return data.draw(st.one_of(st.sampled_from(mine), st.sampled_from(mine), any_lease) if mine else any_lease)

    def put_values(self, data: st.DataObject, lease: SessionLease, lengths: list[int]) -> dict[str, Any]:
        """Keys, fields and tags of a put, and what it does to the model if the lease is open."""
        keys = [f"{lease.uid}_{lease.session_id}_{index}" for index in range(len(lengths))]
        names = data.draw(st.lists(st.sampled_from(["responses", "prompts", "extra_fields"]), unique=True))
        columns = {name: [self.value(length) for length in lengths] for name in names}
        tags = data.draw(st.none() | st.just([{f"t{length}": length} for length in lengths]))
        if lease in self.kept.open_sessions:
            for position, key in enumerate(keys):
                row = self.kept.rows.setdefault(key, ModelRow(lease.uid, lease.session_id, lease.attempt, lease.incarnation))
                row.attempt, row.incarnation = lease.attempt, lease.incarnation
                row.columns.update({name: values[position] for name, values in columns.items()})
                row.tag.update(tags[position] if tags else {})
        return {"keys": keys, "fields": columns, "tags": tags}

    @rule(data=st.data(), lengths=LENGTHS)
    def put_rows(self, data: st.DataObject, lengths: list[int]) -> None:
        lease = self.draw_session(data)
        errors: Errors = set() if lease in self.kept.open_sessions else {StaleLeaseError}
        rows = self.put_values(data, lease, lengths)
        self.is_done(self.queue.kv_batch_put(**rows, partition_id=TRAIN, lease=lease), errors, f"'{rows['keys'][0]}'")

    @rule(data=st.data(), lengths=st.just([]) | LENGTHS, number=st.none() | SMALL)
    def settle_session(self, data: st.DataObject, lengths: list[int], number: int | None) -> None:
        self.settle(data, self.draw_session(data), lengths, number)

    def settle(self, data: st.DataObject, lease: SessionLease, lengths: list[int], number: int | None) -> None:
        is_open = lease in self.kept.open_sessions
        rows = self.put_values(data, lease, lengths) if lengths else {}
        tag = None if number is None else {"n": number}
        settle = self.queue.settle_session(lease, partition_id=TRAIN, group_tag=tag, **rows)
        if self.is_done(settle, set() if is_open else {StaleLeaseError}):
            self.kept.shut(lease.uid, lease.session_id)
            if number is not None:
                self.put_tag(self.kept.groups[lease.uid], number)
                self.kept.shut(lease.uid)

    @rule(data=st.data(), length=SMALL, skipped=st.sampled_from([0, 0, 0, 1]))
    def put_turn(self, data: st.DataObject, length: int, skipped: int) -> None:
        self.put_turn_of(self.draw_session(data), length, skipped)

    def put_turn_of(self, lease: SessionLease, length: int, skipped: int = 0) -> None:
        value = self.value(length)
        turns = self.kept.turns.get((lease.uid, lease.session_id), [])
        errors: Errors = {StaleLeaseError} if lease not in self.kept.open_sessions else {RecordError} if skipped else set()
        if self.is_done(self.queue.put_turn(lease, len(turns) + skipped, {"responses": value}), errors):
            self.kept.turns[lease.uid, lease.session_id] = [*turns, value]

    def draw_keys(self, data: st.DataObject) -> list[str]:
        return data.draw(st.lists(st.sampled_from([*sorted(self.kept.rows), STRANGER]), min_size=1, max_size=4, unique=True))

    @rule(data=st.data(), late=LATE)
    def put_columns(self, data: st.DataObject, late: int) -> None:
        self.put_columns_of(self.late_step(late), self.draw_keys(data))

    def put_columns_of(self, step: int, keys: list[str]) -> None:
        lease = self.step_lease(step)
        values = [self.value(2) for _ in keys]
        put = self.queue.kv_batch_put(keys, partition_id=TRAIN, lease=lease, fields={"advantages": values})
        missing = next((key for key in keys if key not in self.kept.rows), None)
        errors: Errors = {StaleLeaseError} if lease not in self.steps else {UnknownKeyError} if missing else set()
        if self.is_done(put, errors, f"'{missing}'" if errors == {UnknownKeyError} else ""):
            for key, value in zip(keys, values, strict=True):
                self.kept.rows[key].columns["advantages"] = value

    @rule(data=st.data(), name=st.sampled_from(["responses", "prompts", "extra_fields", "advantages"]))
    def get(self, data: st.DataObject, name: str) -> None:
        keys, rows = self.draw_keys(data), self.kept.rows
        get = self.queue.kv_batch_get(keys, partition_id=TRAIN, fields=[name])
        missing = next((key for key in keys if key not in rows or name not in rows[key].columns), None)
        if missing is not None and missing not in rows:
            with pytest.raises(UnknownKeyError, match=f"'{missing}'"):
                self.do(get)
        elif missing is not None:
            with pytest.raises(MissingColumnError, match=f"'{missing}'.*'{name}'"):
                self.do(get)
        else:
            column = self.do(get).get(name)
            got = column.tolist() if name in ("extra_fields", "raw_prompt") else [row.tolist() for row in rows_of(column)]
            assert got == [rows[key].columns[name] for key in keys]
            if isinstance(column, torch.Tensor):
                column.values().zero_()  # what was got is the getter's: the next get must not see this

    @rule(uid=UIDS, session_id=SESSIONS)
    def get_turns(self, uid: str, session_id: int) -> None:
        turns = [rows_of(turn["responses"])[0] for turn in self.do(self.queue.kv_turns(uid, session_id))]
        assert [turn.tolist() for turn in turns] == self.kept.turns.get((uid, session_id), [])

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
        if self.is_done(self.queue.drop(uids, partition_id=TRAIN, reason="x"), errors):
            self.cleared(uids, gone, "x")

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
            kept.records[step] = ModelRecord(uids, list(keys))
        self.note_sync()

    def errors_of_record(self, step: int, keys: list[str]) -> Errors:
        kept, held = self.kept, self.kept.records.get(step)
        if held is not None:
            return {RecordError} if held.keys != keys else set()
        errors: Errors = {UnknownKeyError} if any(key not in kept.rows for key in keys) else set()
        uids = {kept.rows[key].uid for key in keys if key in kept.rows}
        left = [key for uid in uids for key in kept.group_of(uid) if (key in keys) == (key == uid)]
        is_taken = any(kept.step_of(key) is not None for key in keys)
        is_late = step <= kept.last_step
        if left or is_taken or is_late or any(uid in kept.groups for uid in uids):
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
        if is_partial or (held and held.is_retired) or any(kept.step_of(key) not in (None, step) for key in keys):
            errors.add(RecordError)
        if not self.is_done(self.queue.retire(keys, partition_id=TRAIN, step=step, lease=lease), errors):
            return
        uids = {kept.rows[key].uid for key in keys}
        left = {uid: [key for key in kept.group_of(uid) if key not in keys] for uid in uids}
        kept.forget([*keys, *(uid for uid, others in left.items() if others == [uid])])
        if held is not None:
            held.is_retired = True

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
        errors: Errors = {RecordError} if any(not held.is_retired for held in gone.values()) else set()
        if self.is_done(self.queue.purge(step), errors) and gone:
            kept.counters["purged_step"] = max(gone)
            self.trained(gone)

    def trained(self, gone: dict[int, ModelRecord]) -> None:
        self.kept.counters["purged_groups"] += sum(len(held.uids) for held in gone.values())
        for number in gone:
            del self.kept.records[number]

    @rule(late=LATE, cursor=SMALL, luck=st.integers(0, 3))
    def start_over(self, late: int, cursor: int, luck: int) -> None:
        if luck:  # it ends all that the other rules have built up
            return
        kept, step = self.kept, self.late_step(late)
        self.do(self.queue.start_over(step=step, cursor=cursor))
        self.trained({number: held for number, held in kept.records.items() if number <= step})
        count = kept.counters
        count["dropped/restart"] += max(0, count["admitted"] - kept.num_dropped - count["purged_groups"])
        count["cursor"], count["purged_step"] = cursor, step
        self.kept = Kept(counters=kept.counters)
        self.steps = set()
        self.attempts = Counter()
        self.note_sync()

    # --- the usual way, of which the other rules make every other

    @rule(data=st.data(), uid=UIDS, lengths=LENGTHS, is_finished=st.booleans())
    def live(self, data: st.DataObject, uid: str, lengths: list[int], is_finished: bool) -> None:
        """A group, from its admission to a turn of its last session, or to its end."""
        if uid not in self.kept.groups and not self.kept.group_of(uid):
            self.admit(uid=uid, incarnation=0, cursor=0)
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
        uids = [uid for uid in dict.fromkeys(settled) if kept.step_of(uid) is None][:num_groups]
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
        counters = {name.removeprefix("ledger/"): value for name, value in stats.items() if name.startswith("ledger/")}
        assert {name: value for name, value in counters.items() if value} == {n: v for n, v in kept.counters.items() if v}

    @invariant()
    def admitted_is_trained_dropped_or_open(self) -> None:
        kept, count = self.kept, self.kept.counters
        if not self.only_admits:
            return
        recorded = sum(len(held.uids) for held in kept.records.values())
        alive = sum(row.session_id is None and kept.step_of(uid) is None for uid, row in kept.rows.items())
        assert count["admitted"] == count["purged_groups"] + recorded + kept.num_dropped + alive


class JournaledModel(StoreModel):
    """Over the journal in memory, which can lose its power as well."""

    is_journaled = True

    def open(self) -> TransferQueue:
        self.journal = MemoryJournal()
        return TransferQueue(self.journal, self.journal.load())

    @rule()
    def crash(self) -> None:
        self.journal = self.journal.crash()
        self.reopen(TransferQueue(self.journal, self.journal.load()))

    @rule()
    def lose_power(self) -> None:
        self.journal = self.journal.lose_power()
        self.kept = copy.deepcopy(self.synced)
        self.reopen(TransferQueue(self.journal, self.journal.load()))

    def reopen(self, queue: TransferQueue) -> None:
        """The next process: no steps and no watchers; all else to the last value."""
        self.num_opened += 1
        self.queue, self.steps, self.watches = queue, set(), []
        assert queue.incarnation == self.num_opened
        for row in self.kept.rows.values():
            row.columns.pop("advantages", None)
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

    def enter(self) -> TransferQueue:
        path = Path(self.folder.name) / "journal.db"
        return self.loop.run_until_complete(self.stack.enter_async_context(open_queue(path, world=RealWorld())))

    @rule()
    def crash(self) -> None:
        self.loop.run_until_complete(self.stack.aclose())
        self.reopen(self.enter())

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
