"""Groups walk through their lives in a store whose journal takes notes, and every call is looked at before and after.

TransferQueue, journal -> [lives] -> store (tables and the diagram)

Nothing here knows what a verb should do, so what is told of the calls cannot say what is not so. A verb that no life calls is an
error.
"""

import asyncio
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

from asyncrl.fields import CATALOGUE
from asyncrl.journal.entries import Entry, Op
from asyncrl.journal.model import MemoryJournal
from asyncrl.keys import TRAIN, GroupLease, Lease, SessionLease, StepLease
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.counts import Counts

UID = "u"
KEYS = (f"{UID}_0_0", f"{UID}_1_0")
REASON = "<reason>"
READS = (
    *("kv_batch_get", "kv_turns", "kv_list", "kv_watch", "groups_under_way", "recorded", "counters", "failed_rows"),
    *("failures_of", "describe", "stats"),
)
"""Verbs that change nothing."""
RESTART = "restart"
"""No verb: the process ends, and the next one opens the store with the weights of a step."""
STATES = ("[*]", "under_way", "settled", "recorded", "retired")
"""Of a group in the store: not there, its lease open, nobody writes any more, a step trains on it, that step is done."""

_LEASES: dict[type, str] = {GroupLease: "group", SessionLease: "session", StepLease: "step"}

# --- seeing -----------------------------------------------------------------------------------------------------------------------


class NotingJournal(MemoryJournal):
    """Notes the entries of the last call."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.noted: list[tuple[Entry, bool]] = []

    def append(self, entry: Entry, *, synced: bool = False) -> "asyncio.Future[None]":
        self.noted.append((entry, synced))
        return super().append(entry, synced=synced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The group at one moment. `stage_fields`: of those that stages write, how many its visible rows have."""

    state: str
    num_visible: int
    stage_fields: int
    num_kept: int
    num_leases: int
    num_turns: int
    counters: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a verb: under whose lease, from what to what, and what the journal was given. Or a restart."""

    verb: str
    step: int | None
    """Of a call that names one beside the lease; of a restart, that of the weights."""
    by: str
    before: Sight
    after: Sight
    ops: tuple[Op, ...]
    is_synced: bool


@dataclass(slots=True)
class Life:
    """A store with a journal, and the calls that were made so far."""

    journal: NotingJournal = field(default_factory=NotingJournal)
    calls: list[Call] = field(default_factory=list)
    queue: TransferQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = TransferQueue(self.journal)

    async def do(self, verb: str, *arguments: Any, **named: Any) -> None:
        lease = next((each for each in (*arguments, *named.values()) if isinstance(each, Lease)), None)
        before = await self._sight()
        self.journal.noted.clear()
        await _kept(getattr(self.queue, verb)(*arguments, **named))
        ops = tuple(op for entry, _ in self.journal.noted for op in entry)
        is_synced = any(synced for _, synced in self.journal.noted)
        by = "" if lease is None else _LEASES[type(lease)]
        after, step = await self._sight(), named.get("step")
        self.calls.append(Call(verb=verb, step=step, by=by, before=before, after=after, ops=ops, is_synced=is_synced))

    async def restart(self, weights_step: int) -> None:
        """The process ends; the next one has the weights of a step."""
        before = await self._sight()
        self.journal = NotingJournal(disk=self.journal.disk)
        self.queue = TransferQueue(self.journal, self.journal.load(weights_step), weights_step=weights_step)
        after = await self._sight()
        self.calls.append(Call(verb=RESTART, step=weights_step, by="", before=before, after=after, ops=(), is_synced=False))

    async def _sight(self) -> Sight:
        saved, stats = self.journal.saved, self.queue.stats()
        visible = list((await self.queue.kv_list(TRAIN))[TRAIN])
        held = await self.queue.describe(visible, partition_id=TRAIN) if visible else ()
        return Sight(
            state=self._state(is_visible=bool(visible)),
            num_visible=len(visible),
            stage_fields=sum(CATALOGUE[each.field].producer == "advantage" for each in held),
            num_kept=len(saved.rows),
            num_leases=int(stats["open_leases"]),
            num_turns=int(stats["turns"]),
            counters={name.removeprefix("ledger/"): int(value) for name, value in stats.items() if name.startswith("ledger/")},
        )

    def _state(self, *, is_visible: bool) -> str:
        saved = self.journal.saved
        record = next((record for record in saved.records.values() if UID in record.uids), None)
        if record is not None:
            return "retired" if record.step <= self.queue.weights_step else "recorded"
        if (UID, None) in saved.leases:
            return "under_way"
        return "settled" if is_visible else "[*]"


async def _kept(answer: Any) -> None:
    """Wait for what a verb gives: itself, or the last part of it, is done when it is kept."""
    await (answer[-1] if isinstance(answer, tuple) else answer)


# --- living -----------------------------------------------------------------------------------------------------------------------

_GROUP, _STEP = GroupLease(uid=UID), StepLease(step=1)


def _session(number: int, attempt: int = 0) -> SessionLease:
    return SessionLease(uid=UID, session_id=number, attempt=attempt)


async def begin(life: Life) -> None:
    """One session settled, the other after its first turn."""
    await life.do("admit", _GROUP, partition_id=TRAIN, cursor=1, tag={"status": "pending", "is_prompt": True})
    sessions = [_session(number) for number in (0, 1)]
    await life.do("begin_sessions", _GROUP, sessions, partition_id=TRAIN, tag={"status": "running"})
    for lease in sessions:
        await life.do("put_turn", lease, 0, {"responses": [1, 2]})
    await life.do("settle_session", _session(0), **_rows(0))


def _rows(number: int) -> dict[str, Any]:
    return {"partition_id": TRAIN, "keys": [KEYS[number]], "fields": {"responses": [[1, 2, 3]]}, "tags": [{"status": "finished"}]}


async def settle(life: Life) -> None:
    await begin(life)
    await life.do("settle_session", _session(1), **_rows(1), group_tag={"status": "finished"})


async def take_step(life: Life, lease: StepLease = _STEP) -> None:
    """A step whose stages have written."""
    await life.do("record", 1, KEYS, partition_id=TRAIN)
    await life.do("open_lease", lease, keys=KEYS, partition_id=TRAIN)
    columns = {"advantages": [[0.5, 0.0, 0.5]] * 2, "returns": [[0.5, 0.0, 0.5]] * 2}
    await life.do("kv_batch_put", KEYS, partition_id=TRAIN, lease=lease, fields=columns)


async def retire(life: Life, lease: StepLease = _STEP) -> None:
    await life.do("retire", KEYS, partition_id=TRAIN, step=1, lease=lease)
    await life.do("close_lease", lease)


async def trained(life: Life) -> None:
    """The whole way, with one step that failed and was done again."""
    await settle(life)
    await take_step(life)
    await life.do("revive", KEYS, partition_id=TRAIN, step=1)
    again = StepLease(step=1, attempt=1)
    await take_step(life, again)
    await retire(life, again)
    await life.do("purge", 1)


async def retried(life: Life) -> None:
    """A session is tried again after one turn, and once more after it has written by itself."""
    await begin(life)
    again = _session(1, 1)
    await life.do("open_lease", again)
    await life.do("kv_put", KEYS[1], partition_id=TRAIN, lease=again, fields={"responses": [1, 2, 3]}, tag={"status": "finished"})
    again = _session(1, 2)
    await life.do("open_lease", again)
    await life.do("kv_batch_put", lease=again, **_rows(1))
    await life.do("close_lease", again)


async def failed(life: Life) -> None:
    """No session could begin."""
    await life.do("admit", _GROUP, partition_id=TRAIN, cursor=1, tag={"status": "pending", "is_prompt": True})
    await life.do("settle_group", _GROUP, partition_id=TRAIN, tag={"status": "failure", "failure": "its template"})


async def dropped(life: Life) -> None:
    await settle(life)
    await life.do("drop", [UID], partition_id=TRAIN, reason=REASON)


async def dropped_early(life: Life) -> None:
    await begin(life)
    await life.do("drop", [UID], partition_id=TRAIN, reason=REASON)


async def cleared(life: Life) -> None:
    await settle(life)
    await life.do("kv_clear", [UID], partition_id=TRAIN)


async def cleared_early(life: Life) -> None:
    await begin(life)
    await life.do("kv_clear", [UID], partition_id=TRAIN)


async def taken_over(life: Life) -> None:
    """The next start of the run opens the group's lease anew, and closes it without a word."""
    await begin(life)
    later = GroupLease(uid=UID, incarnation=1)
    await life.do("open_lease", later)
    await life.do("close_lease", later)


async def gone_on_with(life: Life) -> None:
    """The process ends; the next one goes on with the session that had not settled."""
    await begin(life)
    await life.restart(0)
    await life.do("reopen_group", GroupLease(uid=UID, incarnation=1), partition_id=TRAIN)
    last = SessionLease(uid=UID, session_id=1, incarnation=1)
    await life.do("settle_session", last, **_rows(1), group_tag={"status": "finished"})


async def settled_restart(life: Life) -> None:
    await settle(life)
    await life.restart(0)


async def recorded_restart(life: Life) -> None:
    await settle(life)
    await take_step(life)
    await life.restart(0)
    await take_step(life, StepLease(step=1, incarnation=1))


async def retired_restart(life: Life) -> None:
    """The newest checkpoint is older than the group's step: it is done again, with the same rows."""
    await settle(life)
    await take_step(life)
    await retire(life)
    await life.restart(0)
    again = StepLease(step=1, incarnation=1)
    await take_step(life, again)
    await retire(life, again)


async def learned_restart(life: Life) -> None:
    """The checkpoint is of the group's own step: what it taught is in the weights, and its version is evaluated."""
    await settle(life)
    await take_step(life)
    await retire(life)
    await life.do("note_evaluation", 1)
    await life.do("sync")
    await life.restart(1)


LIVES = (
    trained,
    retried,
    failed,
    dropped,
    dropped_early,
    cleared,
    cleared_early,
    taken_over,
    gone_on_with,
    settled_restart,
    recorded_restart,
    retired_restart,
    learned_restart,
)


@functools.cache
def all_calls() -> tuple[Call, ...]:
    """Those of all lives. Raises ValueError for a verb that none of them calls."""

    async def live() -> list[Call]:
        lives = [Life() for _ in LIVES]
        for life, steps in zip(lives, LIVES, strict=True):
            await steps(life)
        return [call for life in lives for call in life.calls]

    calls = tuple(asyncio.run(live()))
    if unseen := set(verbs()) - {call.verb for call in calls} - set(READS):
        raise ValueError(f"no life in {__name__} calls {sorted(unseen)}; add one that does, or name it in READS")
    return calls


def verbs() -> list[str]:
    """The public methods of the store, in the order of its page."""
    found = {**vars(TransferQueue), **vars(Counts)}
    return [name for name, value in found.items() if inspect.isfunction(value) and not name.startswith("_")]
