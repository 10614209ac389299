"""The first half of the model of a TransferQueue: leases, admissions, puts, turns and gets.

kept_model -> [store_model] -> test_store_model: endings, steps, watches, and the next process
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from asyncrl.errors import MissingColumnError, RecordError, StaleLeaseError, StoreError, UnknownKeyError
from asyncrl.keys import TRAIN, GroupLease, Lease, SessionLease, StepLease
from asyncrl.protocol.ragged import rows_of
from asyncrl.transfer_queue import TransferQueue, Watch
from tests.transfer_queue.kept_model import Kept, ModelRow

UIDS = st.sampled_from(["a", "b", "c", "d"])
SESSIONS = st.integers(0, 1)
SMALL = st.integers(0, 2)
LATE = st.sampled_from([0, 0, 1, -1, -2])
"""Which step, counted from the one that is next."""
LENGTHS = st.lists(SMALL, min_size=1, max_size=3)
STRANGER = "a_1_2"
"""A key that is mostly not there; by its name it is of session 1 of group `a`."""
Errors = set[type[StoreError]]


class Writers(RuleBasedStateMachine):
    """Every write and read, each known to be refused or not."""

    is_journaled = False
    only_admits = False
    """Groups begin by an admission and end by a drop or a recorded step, as in a run; then their counts add up."""

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

    def do(self, verb: Coroutine[Any, Any, Any], *, makes_futures: bool = False) -> Any:
        """Without a journal no verb suspends, and no watch that has something to tell: a loop would only make this slower."""
        if self.is_journaled or makes_futures:
            return self.loop.run_until_complete(verb)
        try:
            verb.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("suspended")

    def is_done(self, verb: Coroutine[Any, Any, object], errors: Errors, match: str = "", *, makes_futures: bool = False) -> bool:
        """Do it; with `errors` it must be refused by one of them."""
        if not errors:
            self.do(verb, makes_futures=makes_futures)
            return True
        with pytest.raises(tuple(errors), match=match or None):
            self.do(verb, makes_futures=makes_futures)
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
        is_refused = kept.is_trained(uid) or any(incarnation <= other for other in known)
        if self.is_done(self.queue.open_lease(lease), {StaleLeaseError} if is_refused else set()):
            kept.groups[uid] = lease

    @rule(uid=UIDS, more=st.sampled_from([1, 1, 0, -1]), number=st.none() | SMALL)
    def reopen_group(self, uid: str, more: int, number: int | None) -> None:
        kept, held = self.kept, self.kept.groups.get(uid)
        lease = GroupLease(uid=uid, incarnation=more + (0 if held is None else held.incarnation))
        tag = None if number is None else {"n": number}
        sessions: list[SessionLease] = []

        async def reopen() -> None:
            found, kept_future = self.queue.reopen_group(lease, partition_id=TRAIN, tag=tag)
            sessions.extend(found)
            await kept_future

        if self.is_done(reopen(), {StaleLeaseError} if held is None or more < 1 else set(), makes_futures=True):
            kept.groups[uid] = lease
            mine = [(key, latest) for key, (latest, is_open) in kept.sessions.items() if key[0] == uid and is_open]
            for key, latest in mine:
                kept.sessions[key] = replace(latest, incarnation=lease.incarnation), True
            assert {(found.session_id, found.attempt) for found in sessions} == {(old.session_id, old.attempt) for _, old in mine}
            assert {found.incarnation for found in sessions} <= {lease.incarnation}
            if number is not None:
                self.put_tag(lease, number)

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
        lease = SessionLease(uid=uid, session_id=session_id, attempt=attempt, incarnation=incarnation)
        if self.is_done(self.queue.open_lease(lease), self.errors_of_session(lease)):
            self.opened(lease)

    def errors_of_session(self, lease: SessionLease) -> Errors:
        kept, owner = self.kept, (lease.uid, lease.session_id)
        group, latest = kept.groups.get(lease.uid), kept.sessions.get(owner, (None, False))[0]
        is_old = latest is not None and (
            lease.attempt < latest.attempt or lease.incarnation < latest.incarnation or lease == latest
        )
        mine = [row for row in kept.rows.values() if (row.uid, row.session_id) == owner]
        is_old |= any(lease.attempt < row.attempt or lease.incarnation < row.incarnation for row in mine)
        return {StaleLeaseError} if group is None or lease.incarnation < group.incarnation or is_old else set()

    def opened(self, lease: SessionLease) -> None:
        kept, owner = self.kept, (lease.uid, lease.session_id)
        latest = kept.sessions.get(owner, (None, False))[0]
        if latest is not None and latest.attempt < lease.attempt:
            kept.turns.pop(owner, None)
        kept.sessions[owner] = lease, True
        for key in [key for key, row in kept.rows.items() if (row.uid, row.session_id) == owner and row.attempt < lease.attempt]:
            del kept.rows[key]

    @rule(uid=UIDS, attempts=st.lists(st.sampled_from([0, 0, 0, -1]), min_size=2, max_size=2), number=SMALL)
    def begin_sessions(self, uid: str, attempts: list[int], number: int) -> None:
        """Both sessions of a group, or none when one of them may not be opened."""
        group = self.kept.groups.get(uid, GroupLease(uid=uid))
        leases = [
            SessionLease(uid=uid, session_id=n, attempt=self.next_attempt(uid, n) + older, incarnation=group.incarnation)
            for n, older in enumerate(attempts)
        ]
        errors = self.errors_of_session(leases[0]) | self.errors_of_session(leases[1])
        if self.is_done(self.queue.begin_sessions(group, leases, partition_id=TRAIN, tag={"n": number}), errors):
            self.put_tag(group, number)
            for lease in leases:
                self.opened(lease)

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

    @rule(uid=UIDS, incarnation=SMALL, more=st.sampled_from([1, 1, 1, 0, 2, -1]))
    def admit(self, uid: str, incarnation: int, more: int) -> None:
        kept, lease, cursor = self.kept, GroupLease(uid=uid, incarnation=incarnation), self.kept.counters["cursor"] + more
        tag, fields = {"n": 0, "row": ord(uid)}, {"raw_prompt": self.value(2)}

        async def admit() -> None:
            await self.queue.admit(lease, partition_id=TRAIN, cursor=cursor, tag=tag, fields=fields)

        is_known = uid in kept.groups or bool(kept.group_of(uid)) or kept.is_trained(uid)
        errors: Errors = {StaleLeaseError} if is_known else {StoreError} if more < 0 else set()
        if self.is_done(admit(), errors, makes_futures=True):
            kept.groups[uid] = lease
            kept.rows[uid] = ModelRow(uid, None, 0, incarnation, tag, {"raw_prompt": [self.counter] * 2})
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

    @rule(data=st.data(), lengths=st.just([]) | LENGTHS, number=st.none() | SMALL, ends_group=st.booleans())
    def settle_session(self, data: st.DataObject, lengths: list[int], number: int | None, ends_group: bool) -> None:
        self.settle(data, self.draw_session(data), lengths, number, ends_group)

    def settle(
        self, data: st.DataObject, lease: SessionLease, lengths: list[int], number: int | None, ends_group: bool = True
    ) -> None:
        is_open = lease in self.kept.open_sessions
        rows = self.put_values(data, lease, lengths) if lengths else {}
        tag = None if number is None else {"n": number}
        settle = self.queue.settle_session(lease, partition_id=TRAIN, group_tag=tag, ends_group=ends_group, **rows)
        if self.is_done(settle, set() if is_open else {StaleLeaseError}):
            self.kept.shut(lease.uid, lease.session_id)
            if number is not None:
                self.put_tag(self.kept.groups[lease.uid], number)
                if ends_group:
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
