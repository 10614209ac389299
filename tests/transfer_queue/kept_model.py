"""What a journal keeps of a TransferQueue, in plain Python.

[kept_model] -> store_model (writes and reads) -> test_store_model (endings, steps, watches, and the next process)
"""

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from asyncrl.keys import GroupLease, SessionLease

_numbers = itertools.count()


@dataclass
class ModelRow:
    """`number`: rows come back in the order in which they came to be."""

    uid: str
    session_id: int | None
    attempt: int
    incarnation: int
    tag: dict[str, int] = field(default_factory=dict)
    columns: dict[str, list[int]] = field(default_factory=dict)
    number: int = field(default_factory=_numbers.__next__)


@dataclass
class ModelRecord:
    """`rows`: those of its keys and prompts, as they were when it was made."""

    uids: list[str]
    keys: list[str]
    rows: dict[str, ModelRow]
    tries: int = 1


@dataclass
class Kept:
    """What a journal keeps, in plain Python."""

    rows: dict[str, ModelRow] = field(default_factory=dict)
    groups: dict[str, GroupLease] = field(default_factory=dict)
    sessions: dict[tuple[str, int], tuple[SessionLease, bool]] = field(default_factory=dict)  # the latest one, and is it open?
    turns: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)
    records: dict[int, ModelRecord] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    weights: int = 0
    """The step of the weights, which no journal keeps."""

    @property
    def open_sessions(self) -> set[SessionLease]:
        """Not settled, and not stale since the group was taken over."""
        sessions = [lease for lease, is_open in self.sessions.values() if is_open]
        return {lease for lease in sessions if lease.incarnation >= self.groups[lease.uid].incarnation}

    def group_of(self, uid: str) -> list[str]:
        return [key for key, row in self.rows.items() if row.uid == uid]

    def step_of(self, key: str) -> int | None:
        """The step that trains on it and is not done."""
        steps = [step for step, held in self.records.items() if step > self.weights and key in [*held.keys, *held.uids]]
        return steps[0] if steps else None

    def load(self, weights: int) -> None:
        """Rows of later steps are there again, those of earlier ones are not; no stage has written."""
        recorded = {key: (step, row) for step, held in self.records.items() for key, row in held.rows.items()}
        free = {key: row for key, row in self.rows.items() if key not in recorded}
        seen = {**free, **{key: row for key, (step, row) in recorded.items() if step > weights}}
        self.rows = dict(sorted(seen.items(), key=lambda item: item[1].number))
        self.weights = weights
        for row in self.rows.values():
            row.columns.pop("advantages", None)

    def is_trained(self, key: str) -> bool:
        """A record that is not purged has it, retired or not."""
        return any(key in [*held.keys, *held.uids] for held in self.records.values())

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
