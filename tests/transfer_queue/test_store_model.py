"""Random interleavings of every verb against a plain dict: the store never differs in what it shows, accepts or refuses."""

from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.errors import MissingColumnError, StaleLeaseError, UnknownKeyError
from asyncrl.keys import GroupLease, Lease, SessionLease, StepLease
from asyncrl.protocol.ragged import rows_of
from asyncrl.transfer_queue import TransferQueue, Watch

PART = "train"
UIDS = st.sampled_from(["a", "b"])
SESSIONS = st.integers(0, 1)
SMALL = st.integers(0, 2)
LENGTHS = st.lists(SMALL, min_size=1, max_size=3)


@dataclass
class ModelRow:
    uid: str
    session_id: int | None
    attempt: int
    incarnation: int
    tag: dict[str, int] = field(default_factory=dict)
    columns: dict[str, list[int]] = field(default_factory=dict)


class StoreModel(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.queue = TransferQueue()
        self.rows: dict[str, ModelRow] = {}
        self.open: set[Lease] = set()
        self.latest: dict[tuple[str, int], SessionLease] = {}  # of the sessions under an open group
        self.attempts: Counter[int] = Counter()  # failed ones of each step
        self.watches: list[tuple[Watch, dict[str, dict[str, int]]]] = []
        self.counter = 0

    def do(self, verb: Coroutine[Any, Any, Any]) -> Any:
        """No verb suspends, and no watch that has something to tell: a loop would only make this slower."""
        try:
            verb.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("suspended")

    def value(self, length: int) -> list[int]:
        self.counter += 1
        return [self.counter] * length

    # --- leases

    def group_lease(self, uid: str) -> GroupLease | None:
        return next((lease for lease in self.open if isinstance(lease, GroupLease) and lease.uid == uid), None)

    def sessions_of(self, uid: str) -> set[SessionLease]:
        return {lease for lease in self.open if isinstance(lease, SessionLease) and lease.uid == uid}

    @rule(uid=UIDS, incarnation=SMALL)
    def open_group(self, uid: str, incarnation: int) -> None:
        lease, held = GroupLease(uid=uid, incarnation=incarnation), self.group_lease(uid)
        written = [row.incarnation for row in self.rows.values() if row.uid == uid and row.session_id is None]
        if any(incarnation <= known for known in [*written, *([held.incarnation] if held else [])]):
            with pytest.raises(StaleLeaseError):
                self.do(self.queue.open_lease(lease))
            return
        self.do(self.queue.open_lease(lease))
        if held is None:
            self.latest = {key: value for key, value in self.latest.items() if key[0] != uid}
        self.open -= {held, *self.sessions_of(uid)}
        self.open.add(lease)

    @rule(uid=UIDS, session_id=SESSIONS, attempt=SMALL, incarnation=SMALL)
    def open_session(self, uid: str, session_id: int, attempt: int, incarnation: int) -> None:
        lease = SessionLease(uid=uid, session_id=session_id, attempt=attempt, incarnation=incarnation)
        group, latest = self.group_lease(uid), self.latest.get((uid, session_id))
        mine = [row for row in self.rows.values() if (row.uid, row.session_id) == (uid, session_id)]
        is_refused = (
            group is None
            or incarnation < group.incarnation
            or (latest is not None and (attempt < latest.attempt or incarnation < latest.incarnation or lease == latest))
            or any(attempt < row.attempt or incarnation < row.incarnation for row in mine)
        )
        if is_refused:
            with pytest.raises(StaleLeaseError):
                self.do(self.queue.open_lease(lease))
            return
        self.do(self.queue.open_lease(lease))
        self.shut_session(uid, session_id)
        self.open.add(lease)
        self.latest[uid, session_id] = lease
        for key in [key for key, row in self.rows.items() if row in mine and row.attempt < attempt]:
            del self.rows[key]

    def step_lease(self, step: int) -> StepLease:
        return StepLease(step=step, attempt=self.attempts[step])

    @rule(step=SMALL)
    def open_step(self, step: int) -> None:
        lease = self.step_lease(step)
        if lease in self.open:
            with pytest.raises(StaleLeaseError):
                self.do(self.queue.open_lease(lease))
        else:
            self.do(self.queue.open_lease(lease))
            self.open.add(lease)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.open, key=repr)))
        self.do(self.queue.close_lease(lease))
        self.do(self.queue.close_lease(lease))
        self.shut(lease)

    def shut(self, lease: Lease) -> None:
        self.open.discard(lease)
        if isinstance(lease, GroupLease):
            self.open -= self.sessions_of(lease.uid)

    # --- put and get

    @rule(uid=UIDS, incarnation=SMALL, number=SMALL)
    def put_prompt(self, uid: str, incarnation: int, number: int) -> None:
        lease = GroupLease(uid=uid, incarnation=incarnation)
        put = self.queue.kv_put(uid, partition_id=PART, lease=lease, tag={"n": number})
        if lease not in self.open:
            with pytest.raises(StaleLeaseError, match=f"'{uid}'"):
                self.do(put)
            return
        self.do(put)
        row = self.rows.setdefault(uid, ModelRow(uid, None, 0, incarnation))
        row.incarnation = incarnation
        row.tag["n"] = number

    @rule(data=st.data(), uid=UIDS, session_id=SESSIONS, attempt=SMALL, is_valid=st.booleans(), lengths=LENGTHS)
    def put_rows(self, data: st.DataObject, uid: str, session_id: int, attempt: int, is_valid: bool, lengths: list[int]) -> None:
        lease = SessionLease(uid=uid, session_id=session_id, attempt=attempt)
        mine = sorted(self.sessions_of(uid), key=repr)
        if mine and is_valid:
            lease = data.draw(st.sampled_from(mine))
        keys = [f"{uid}_{lease.session_id}_{index}" for index in range(len(lengths))]
        names = data.draw(st.lists(st.sampled_from(["responses", "prompts", "extra_fields"]), unique=True))
        columns = {name: [self.value(length) for length in lengths] for name in names}
        tags = data.draw(st.none() | st.just([{f"t{length}": length} for length in lengths]))
        put = self.queue.kv_batch_put(keys, partition_id=PART, lease=lease, fields=columns, tags=tags)
        if lease not in self.open:
            with pytest.raises(StaleLeaseError, match=f"'{keys[0]}'"):
                self.do(put)
            return
        self.do(put)
        for position, key in enumerate(keys):
            row = self.rows.setdefault(key, ModelRow(uid, lease.session_id, lease.attempt, lease.incarnation))
            row.attempt, row.incarnation = lease.attempt, lease.incarnation
            row.columns.update({name: values[position] for name, values in columns.items()})
            row.tag.update(tags[position] if tags else {})

    def draw_keys(self, data: st.DataObject) -> list[str]:
        return data.draw(st.lists(st.sampled_from([*sorted(self.rows), "a_1_2"]), min_size=1, max_size=4, unique=True))

    @rule(data=st.data(), step=SMALL)
    def put_columns(self, data: st.DataObject, step: int) -> None:
        keys, lease = self.draw_keys(data), self.step_lease(step)
        values = [self.value(2) for _ in keys]
        put = self.queue.kv_batch_put(keys, partition_id=PART, lease=lease, fields={"advantages": values})
        if lease not in self.open:
            with pytest.raises(StaleLeaseError):
                self.do(put)
        elif missing := [key for key in keys if key not in self.rows]:
            with pytest.raises(UnknownKeyError, match=f"'{missing[0]}'"):
                self.do(put)
        else:
            self.do(put)
            for key, value in zip(keys, values, strict=True):
                self.rows[key].columns["advantages"] = value

    @rule(data=st.data(), name=st.sampled_from(["responses", "prompts", "extra_fields", "advantages"]))
    def get(self, data: st.DataObject, name: str) -> None:
        keys = self.draw_keys(data)
        get = self.queue.kv_batch_get(keys, partition_id=PART, fields=[name])
        missing = next((key for key in keys if key not in self.rows or name not in self.rows[key].columns), None)
        if missing is not None and missing not in self.rows:
            with pytest.raises(UnknownKeyError, match=f"'{missing}'"):
                self.do(get)
        elif missing is not None:
            with pytest.raises(MissingColumnError, match=f"'{missing}'.*'{name}'"):
                self.do(get)
        else:
            column = self.do(get).get(name)
            got = column.tolist() if name == "extra_fields" else [row.tolist() for row in rows_of(column)]
            assert got == [self.rows[key].columns[name] for key in keys]
            if isinstance(column, torch.Tensor):
                column.values().zero_()  # what was got is the getter's: the next get must not see this

    # --- endings

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            row = self.rows.pop(key)
            if row.session_id is None:
                self.open -= {lease for lease in self.open if isinstance(lease, GroupLease) and lease.uid == row.uid}
                self.open -= self.sessions_of(row.uid)
            else:
                self.shut_session(row.uid, row.session_id)

    def shut_session(self, uid: str, session_id: int) -> None:
        self.open -= {lease for lease in self.sessions_of(uid) if lease.session_id == session_id}

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        keys = self.draw_keys(data)
        self.do(self.queue.kv_clear(keys, partition_id=PART))
        uids = {key for key in keys if key in self.rows and self.rows[key].session_id is None}
        self.forget([key for key, row in self.rows.items() if key in keys or row.uid in uids])
        if "a_1_2" in keys:
            self.shut_session("a", 1)

    @rule(data=st.data(), step=SMALL)
    def retire(self, data: st.DataObject, step: int) -> None:
        keys, lease = self.draw_keys(data), self.step_lease(step)
        retire = self.queue.retire(keys, partition_id=PART, step=step, lease=lease)
        if lease not in self.open:
            with pytest.raises(StaleLeaseError):
                self.do(retire)
        elif any(key not in self.rows for key in keys):
            with pytest.raises(UnknownKeyError):
                self.do(retire)
        else:
            self.do(retire)
            uids = {self.rows[key].uid for key in keys}
            left = {uid: [key for key, row in self.rows.items() if row.uid == uid and key not in keys] for uid in uids}
            self.forget([*keys, *(uid for uid, others in left.items() if others == [uid])])

    @rule(data=st.data(), step=SMALL)
    def revive(self, data: st.DataObject, step: int) -> None:
        keys = self.draw_keys(data)
        revive = self.queue.revive(keys, partition_id=PART, step=step)
        if any(key not in self.rows for key in keys):
            with pytest.raises(UnknownKeyError):
                self.do(revive)
            return
        self.do(revive)
        if self.step_lease(step) in self.open:
            self.open.remove(self.step_lease(step))
            self.attempts[step] += 1
        for key in keys:
            self.rows[key].columns.pop("advantages", None)

    # --- watches

    @precondition(lambda self: len(self.watches) < 3)
    @rule()
    def watch(self) -> None:
        watch = self.queue.kv_watch(PART)
        self.watches.append((watch, dict(self.do(watch.__anext__()))))

    @precondition(lambda self: self.watches)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """A watcher that folds the changes into what it knew sees exactly what is there."""
        watch, seen = self.watches[data.draw(st.integers(0, len(self.watches) - 1))]  # drawn itself, it would be kept alive
        tags = {key: row.tag for key, row in self.rows.items()}
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

    @invariant()
    def shows_the_same(self) -> None:
        tags = {key: row.tag for key, row in self.rows.items()}
        assert self.do(self.queue.kv_list()) == ({PART: tags} if tags else {})
        stats = self.queue.stats()
        assert stats["keys"] == len(self.rows)
        assert stats["open_leases"] == len(self.open)
        assert stats["watchers"] == len(self.watches)
        assert stats["live_bytes"] <= stats["bytes"] <= 2 * stats["live_bytes"]
        assert self.rows or stats["bytes"] == 0


StoreModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestStoreModel = StoreModel.TestCase
