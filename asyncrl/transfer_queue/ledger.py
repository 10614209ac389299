"""The ledger: what a run must remember beside its rows. Counters, the record of each step, the turns of half-done sessions.

admit, drop -> counters;  record -> retire -> purge;  put_turn -> settle

Everything here is synchronous; what changes comes back as operations for the journal. Invariants:
1. A record of a step is made once, and is the same until it is purged.
2. Steps are recorded one after the other, and retired and purged in that order; only a retired step is purged.
3. A key and a group are in at most one record: a trajectory is trained once in the lineage of a checkpoint. Until that is purged,
   its group has no lease and is not admitted again; until it is retired, the key does not go.
4. What a recorded row is follows from its step and the weights (`is_done`); nothing else remembers it.
5. Turns of a session are numbered from 0 without a gap.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from asyncrl.errors import RecordError
from asyncrl.journal.entries import Op, PutCounters, PutRecord, PutTurn, RemoveRecords, RemoveRows, RemoveTurns, StepRecord
from asyncrl.transfer_queue.columns import Block
from asyncrl.transfer_queue.journaling import header_of

Turn = dict[str, Block]
"""Field -> a block of one row."""
SessionOf = tuple[str, int | None]
"""(uid, session_id); None: all sessions of the group."""


class Ledger:
    """Made empty, or of what a journal kept.

    weights_step: the last step that the weights have learned; it rises when a step is retired.
    """

    def __init__(
        self,
        *,
        counters: Mapping[str, int] | None = None,
        records: Mapping[int, StepRecord] | None = None,
        turns: Mapping[tuple[str, int], list[Turn]] | None = None,
        weights_step: int = 0,
    ) -> None:
        self.weights_step = weights_step
        self.counters: Counter[str] = Counter(counters or {})
        self.records: dict[int, StepRecord] = dict(records or {})
        self._turns: dict[str, dict[int, list[Turn]]] = {}
        for (uid, session_id), kept in (turns or {}).items():
            self._turns.setdefault(uid, {})[session_id] = kept
        self._step_of = {key: record.step for record in self.records.values() for key in [*record.keys, *record.uids]}

    # --- counters

    def count(self, **values: int) -> PutCounters:
        """These counters are so from now on."""
        self.counters.update({name: value - self.counters[name] for name, value in values.items()})
        return PutCounters(values)

    def count_dropped(self, reason: str, number: int) -> Op:
        return self.count(**{f"dropped/{reason}": self.counters[f"dropped/{reason}"] + number})

    def count_failed(self, rows: Collection[int]) -> list[Op]:
        """One more failed group of each of these dataset rows."""
        found = Counter(rows)
        return (
            [self.count(**{f"failed_row/{row}": self.counters[f"failed_row/{row}"] + number for row, number in found.items()})]
            if found
            else []
        )

    def repeat(self) -> list[Op]:
        """Something to write that changes nothing: a transaction without a change would not reach the disk."""
        return [self.count(cursor=self.counters["cursor"])]

    def note_evaluation(self, version: int) -> list[Op]:
        return [self.count(evaluated=version)] if version > self.evaluated else []

    @property
    def evaluated(self) -> int:
        """The newest version whose evaluation has a result; -1: none has one."""
        return self.counters.get("evaluated", -1)

    @property
    def num_trained(self) -> int:
        """Groups that the weights have learned."""
        done = sum(len(record.uids) for record in self.records.values() if self.is_done(record.step))
        return self.counters["purged_groups"] + done

    # --- steps

    @property
    def last_step(self) -> int:
        """The last that was recorded, purged or not; 0: none."""
        return max(self.records, default=self.counters["purged_step"])

    def is_done(self, step: int) -> bool:
        """The weights have learned the step: its rows are hidden. The only place that says what a recorded row is."""
        return step <= self.weights_step

    def check_record(self, step: int, keys: Sequence[str]) -> None:
        """Raises RecordError unless `step` may train on `keys`."""
        held = self.records.get(step)
        if held is None:
            if step != self.last_step + 1:
                raise RecordError(f"step {step} cannot be recorded after step {self.last_step}")
            self.check_trained_once(step, keys)
        elif held.keys != tuple(keys):
            raise RecordError(f"step {step} is recorded with {len(held.keys)} keys, first {held.keys[0]!r}; they stay")
        elif self.is_done(step):
            raise RecordError(f"step {step} is done: the weights have learned it")

    def check_trained_once(self, step: int, keys: Sequence[str]) -> None:
        """Raises RecordError for a trajectory or a group that the record of another step has, retired or not."""
        for key in keys:
            other = self._step_of.get(key, step)
            if other != step:
                verb = "has trained" if self.is_done(other) else "trains"
                raise RecordError(f"key {key!r} cannot be recorded for step {step}: step {other} {verb} on it")

    def step_of(self, key: str) -> int | None:
        """The step whose record has a trajectory or a group, done or not."""
        return self._step_of.get(key)

    def record(self, record: StepRecord) -> Op:
        self.records[record.step] = record
        self._step_of.update(dict.fromkeys([*record.keys, *record.uids], record.step))
        return PutRecord(record)

    def begin_again(self, step: int) -> Op:
        """One more try of a step that is recorded."""
        return self._tried(step, self.records[step].tries + 1)

    def _tried(self, step: int, tries: int) -> Op:
        record = self.records[step] = replace(self.records[step], tries=tries)
        return PutRecord(record)

    def check_retire(self, step: int, keys: Collection[str]) -> None:
        """Raises RecordError for keys of another step, for less or more than the step's record, and before an earlier step."""
        self.refuse_recorded(keys, but=step)
        held = self.records.get(step)
        if held is None:
            return
        left, more = set(held.keys).difference(keys), set(keys).difference(held.keys, held.uids)
        if left or more:
            what = f"without its key {min(left)!r}" if left else f"with key {min(more)!r}"
            raise RecordError(f"step {step} cannot be retired {what}: its record has {len(held.keys)} keys")
        early = min(number for number in self.records if not self.is_done(number))
        if early < step:
            raise RecordError(f"step {step} cannot be retired before step {early}")

    def refuse_recorded(self, keys: Collection[str], *, but: int | None = None) -> None:
        """Raises RecordError for a key that a step trains on."""
        for key in keys:
            step = self.step_of(key)
            if step not in (None, but) and not self.is_done(step):
                raise RecordError(f"key {key!r} cannot go: step {step} trains on it")

    def retire(self, step: int) -> Op:
        """The weights have learned the step now."""
        self.weights_step = step
        return self._tried(step, 0)

    def purge(self, step: int) -> list[Op]:
        """Forget the records up to `step`, and their rows. Raises RecordError when one of them is not retired."""
        gone = [record for number, record in sorted(self.records.items()) if number <= step]
        early = next((record.step for record in gone if not self.is_done(record.step)), None)
        if early is not None:
            raise RecordError(f"steps up to {step} cannot be purged: step {early} is not retired")
        if not gone:
            return []
        self._forget(gone)
        groups = self.counters["purged_groups"] + sum(len(record.uids) for record in gone)
        row_ids = [row_id for record in gone for row_id in record.row_ids]
        counted = self.count(purged_step=gone[-1].step, purged_groups=groups)
        return [RemoveRows(row_ids), RemoveRecords([record.step for record in gone]), counted]

    def _forget(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            del self.records[record.step]
            for key in [*record.keys, *record.uids]:
                self._step_of.pop(key, None)

    # --- turns

    @property
    def num_turns(self) -> int:
        """Of all sessions under way."""
        return sum(len(turns) for sessions in self._turns.values() for turns in sessions.values())

    @property
    def sessions(self) -> list[tuple[str, int]]:
        """That have a turn."""
        return [(uid, session_id) for uid, sessions in self._turns.items() for session_id in sessions]

    def turns(self, uid: str, session_id: int) -> Sequence[Turn]:
        """Of a session under way, from its first."""
        return self._turns.get(uid, {}).get(session_id, [])

    def check_turn(self, uid: str, session_id: int, turn: int) -> None:
        """Raises RecordError for a turn that does not follow the last one."""
        number = len(self.turns(uid, session_id))
        if turn != number:
            raise RecordError(f"turn {turn} of session {uid}_{session_id} cannot be written: {number} turns are")

    def put_turn(self, uid: str, session_id: int, turn: Turn) -> Op:
        turns = self._turns.setdefault(uid, {}).setdefault(session_id, [])
        turns.append(turn)
        columns = {name: (header_of(block.schema), block.values.data) for name, block in turn.items()}
        return PutTurn(uid, session_id, len(turns) - 1, columns)

    def remove_turns(self, sessions: Collection[SessionOf]) -> list[Op]:
        """`(uid, None)`: of all sessions of the group."""
        gone: list[SessionOf] = []
        for uid, session_id in sessions:
            of_group = self._turns.get(uid, {})
            asked = [*of_group] if session_id is None else [session_id]
            gone += [(uid, number) for number in asked if of_group.pop(number, None) is not None]
            if not of_group:
                self._turns.pop(uid, None)
        return [RemoveTurns(gone)] if gone else []
