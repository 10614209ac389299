"""What the commands of a worker mean, on plain dicts, and what a store holds after them: the two are compared.

kill_cycles -> [commands]
"""

import copy
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from asyncrl.keys import TRAIN
from asyncrl.protocol.ragged import rows_of
from asyncrl.transfer_queue import TransferQueue

Command = dict[str, Any]
"""`verb`, what it acts on, and values as seeds; JSON, to be sent over a pipe."""
Values = dict[str, tuple[int, int]]
"""Field -> (seed, number of entries): one cell, whose bytes follow from the seed."""

FIELDS: dict[str, torch.dtype | None] = {
    "responses": torch.int64,
    "response_mask": torch.bool,
    "rollout_log_probs": torch.float32,
    "reward_score": torch.float32,
    "hidden": torch.bfloat16,
    "extra_fields": None,
}
"""Ragged ones, `reward_score` (one number) and `extra_fields` (JSON)."""
COUNTERS = ("admitted", "cursor", "dropped/test", "purged_step")
NUM_SESSIONS = 2


# --- values ---------------------------------------------------------------------------------------------------------------------


def value_of(name: str, seed: int, length: int) -> Any:
    """A tensor [length], one number, or a JSON value: the same for the same seed in every process."""
    dtype = FIELDS[name]
    if dtype is None:
        return {"seed": seed, "list": [seed] * min(length, 50), "text": "ü" * min(length, 50)}
    count = 1 if name == "reward_score" else length
    raw = np.frombuffer(bytearray(random.Random(seed).randbytes(count * dtype.itemsize)), dtype=np.uint8)
    tensor = torch.from_numpy(raw % 2 if dtype is torch.bool else raw).view(dtype)
    return tensor[0] if name == "reward_score" else tensor


def plain(value: Any) -> Any:
    """What can be compared: bytes (NaN is equal to itself), or JSON."""
    return value.reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value


# --- what the commands mean -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Row:
    tag: dict[str, Any] = field(default_factory=dict)
    cells: Values = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Session:
    attempt: int = 0
    incarnation: int = -1
    is_open: bool = False
    is_settled: bool = False
    turns: list[Values] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Group:
    incarnation: int
    sessions: list[Session] = field(default_factory=lambda: [Session() for _ in range(NUM_SESSIONS)])
    rows: dict[str, Row] = field(default_factory=dict)

    def is_finished(self, uid: str) -> bool:
        return bool(self.rows[uid].tag["status"] == "finished")

    def leases(self) -> list[tuple[int | None, int, int, bool]]:
        """session, attempt, incarnation, whether it is open; the group's own first."""
        sessions = [(at, each.attempt, each.incarnation, each.is_open) for at, each in enumerate(self.sessions)]
        return [(None, 0, self.incarnation, True), *(lease for lease in sessions if lease[2] >= 0)]

    def keys_of(self, uid: str, session_id: int) -> list[str]:
        return [key for key in self.rows if key.startswith(f"{uid}_{session_id}_")]


@dataclass(slots=True, kw_only=True)
class Model:
    """What a store should hold after the commands that were applied."""

    groups: dict[str, Group] = field(default_factory=dict)
    """Those of the records included."""
    counters: Counter[str] = field(default_factory=Counter)
    records: dict[int, tuple[str, ...]] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    weights: int = 0
    """The step of the weights: no command keeps it, each process has its own."""

    @property
    def alive(self) -> list[str]:
        """Groups that no step has."""
        recorded = {uid for step in self.records for uid in self.uids_of(step)}
        return [uid for uid in self.groups if uid not in recorded]

    def uids_of(self, step: int) -> set[str]:
        return {key.rsplit("_", 2)[0] for key in self.records[step]}

    def apply(self, command: Command) -> None:
        getattr(self, f"_{command['verb']}")(command)

    def _admit(self, command: Command) -> None:
        row = Row(tag={"is_prompt": True, "status": "running"}, cells=command["values"])
        self.groups[command["uid"]] = Group(incarnation=command["incarnation"], rows={command["uid"]: row})
        self.counters["admitted"] += 1
        self.counters["cursor"] = command["cursor"]

    def _reopen(self, command: Command) -> None:
        group = self.groups[command["uid"]]
        group.incarnation = command["incarnation"]
        for session in group.sessions:
            if session.is_open:
                session.incarnation = command["incarnation"]

    def _open_session(self, command: Command) -> None:
        group, session = self._session(command)
        if command["attempt"] > session.attempt:
            for key in group.keys_of(command["uid"], command["session_id"]):
                del group.rows[key]
            session.turns = []
        session.attempt, session.incarnation, session.is_open = command["attempt"], command["incarnation"], True

    def _turn(self, command: Command) -> None:
        self._session(command)[1].turns.append(command["values"])

    def _put(self, command: Command) -> None:
        group, _ = self._session(command)
        for key, values, tag in zip(command["keys"], command["columns"], command["tags"], strict=True):
            row = group.rows.setdefault(key, Row())
            row.tag = row.tag | tag
            row.cells = row.cells | values

    def _settle(self, command: Command) -> None:
        self._put(command)
        group, session = self._session(command)
        session.is_settled, session.is_open, session.turns = True, False, []
        if command["is_last"]:
            group.rows[command["uid"]].tag |= {"status": "finished"}

    def _settle_group(self, command: Command) -> None:
        self.groups[command["uid"]].rows[command["uid"]].tag |= {"status": "finished"}

    def _drop(self, command: Command) -> None:
        for uid in command["uids"]:
            del self.groups[uid]
        self.counters["dropped/test"] += len(command["uids"])

    def _clear(self, command: Command) -> None:
        del self.groups[command["uid"]]

    def _record(self, command: Command) -> None:
        self.records[command["step"]] = tuple(command["keys"])
        self.tries[command["step"]] = self.tries.get(command["step"], 0) + 1

    def _retire(self, command: Command) -> None:
        self.weights = command["step"]
        self.tries[command["step"]] = 0

    def _purge(self, command: Command) -> None:
        for step in [step for step in self.records if step <= command["step"]]:
            for uid in self.uids_of(step):
                del self.groups[uid]
            del self.records[step], self.tries[step]
        self.counters["purged_step"] = command["step"]

    def _session(self, command: Command) -> tuple[Group, Session]:
        group = self.groups[command["uid"]]
        return group, group.sessions[command["session_id"]]

    def sight(self) -> dict[str, Any]:
        """The same form as `read` gives."""
        done = {uid for step in self.records if step <= self.weights for uid in self.uids_of(step)}
        rows = {key: row for uid, group in self.groups.items() if uid not in done for key, row in group.rows.items()}
        turns = {
            f"{uid}_{number}": [_plain_cells(cells) for cells in session.turns]
            for uid, group in self.groups.items()
            for number, session in enumerate(group.sessions)
        }
        return {
            "rows": {key: (row.tag, _plain_cells(row.cells)) for key, row in rows.items()},
            "turns": {key: cells for key, cells in turns.items() if cells},
            "leases": {uid: sorted(group.leases(), key=str) for uid, group in self.groups.items() if not group.is_finished(uid)},
            "records": {step: (keys, self.tries[step]) for step, keys in self.records.items()},
            "counters": {name: value for name, value in self.counters.items() if value},
        }


def _plain_cells(cells: Values) -> dict[str, Any]:
    return {name: plain(value_of(name, *cell)) for name, cell in cells.items()}


# --- what a store holds ---------------------------------------------------------------------------------------------------------


async def read(queue: TransferQueue, uids: Sequence[str]) -> dict[str, Any]:
    """Everything that the store shows: rows with tags and values, turns of these groups, records, counters."""
    tags = (await queue.kv_list(TRAIN))[TRAIN]
    turns = {f"{uid}_{number}": await queue.kv_turns(uid, number) for uid in uids for number in range(NUM_SESSIONS)}
    leases = queue._state.leases
    held = {uid: [(each.session_id, each.attempt, each.incarnation, each.is_open) for each in leases.entries(uid)] for uid in uids}
    return {
        "rows": {key: (dict(tag), await _read_cells(queue, key)) for key, tag in tags.items()},
        "turns": {key: [{name: _only(turn[name]) for name in turn.keys()} for turn in kept] for key, kept in turns.items() if kept},  # noqa: SIM118
        "leases": {uid: sorted(entries, key=str) for uid, entries in held.items() if entries},
        "records": {step: (record.keys, record.tries) for step, record in queue.records.items()},
        "counters": {name: value for name, value in queue.counters().items() if name in COUNTERS and value},
    }


async def _read_cells(queue: TransferQueue, key: str) -> dict[str, Any]:
    names = [held.field for held in await queue.describe([key], partition_id=TRAIN)]
    columns = await queue.kv_batch_get([key], partition_id=TRAIN, fields=names)
    return {name: _only(columns[name]) for name in names}


def _only(column: Any) -> Any:
    """The one value of a column of one row."""
    if not isinstance(column, torch.Tensor):
        return column.tolist()[0]
    return plain(rows_of(column)[0] if column.is_nested else column[0])


def find_prefix(seen: dict[str, Any], model: Model, commands: Sequence[Command], num_done: int, *, weights: int) -> int:
    """How many of the commands are in the store that `weights` was opened with, at least the `num_done` that were acknowledged.

    Raises AssertionError, with the smallest difference, when no number fits.
    """
    trial = copy.deepcopy(model)
    differences: list[list[str]] = []
    for number in range(len(commands) + 1):
        if number >= num_done:
            trial.weights = weights
            differences.append(list(_differences(trial.sight(), seen)))
            if not differences[-1]:
                return number
        if number < len(commands):
            trial.apply(commands[number])
    closest = min(differences, key=len)
    raise AssertionError("\n".join([f"of {len(commands)} commands, {num_done} acknowledged, no first ones fit:", *closest]))


def _differences(expected: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[str]:
    for part in expected:
        for key in sorted({*expected[part], *seen[part]}, key=str):
            wanted, found = expected[part].get(key, "nothing"), seen[part].get(key, "nothing")
            if wanted != found:
                yield f"{part}, {key}: expected {str(wanted)[:300]}, found {str(found)[:300]}"
