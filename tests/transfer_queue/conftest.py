"""A store of every kind: in memory alone, with the journal in memory, and with the one on disk. The same tests hold for all.

After each test a store with a journal is left and opened again, and must be what it was, to the bit.
"""

import asyncio
import copy
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import JournalWriteError
from asyncrl.journal.entries import Entry, Op, Saved
from asyncrl.journal.model import MemoryJournal
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.columns import Block, Cell
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.world import RealWorld

OpenSession = Callable[..., Awaitable[SessionLease]]
KINDS = ("memory", "model", "sqlite")
DURABLE = ("model", "sqlite")


# --- what a store is, inside and out ----------------------------------------------------------------------------------------------


def look_at(queue: TransferQueue, *, is_durable: bool = False) -> dict[str, Any]:
    """All that there is, to show that a refused call changed nothing; `is_durable`: only what a journal must bring back.

    Tags as text: `True` is not 1 here. Rows as a list: their order counts.
    """
    state = queue._state
    seen: dict[str, Any] = {
        "rows": {
            name: [
                (key, row.row_id, repr(sorted(row.tag.items())), row.owner, _cells(row.cells, is_durable=is_durable))
                for key, row in partition.rows.items()
            ]
            for name, partition in state.partitions.items()
        },
        "leases": {uid: sorted(state.leases.entries(uid), key=repr) for uid in state.leases.uids},
        "turns": {session: [_turn(turn) for turn in state.ledger.turns(*session)] for session in state.ledger.sessions},
        "records": dict(state.ledger.records),
        "weights": queue.weights_step,
        "counters": {name: value for name, value in state.ledger.counters.items() if value or name == "evaluated"},
        "row ids": repr(state.row_ids),
    }
    if not is_durable:
        names = ("keys", "bytes", "live_bytes", "open_leases", "cleared", "retired", "puts")
        seen["stats"] = {name: queue.stats()[name] for name in names}
    return seen


def _cells(cells: dict[str, Cell], *, is_durable: bool) -> dict[str, object]:
    kept = {name: cell for name, cell in sorted(cells.items()) if cell[0].step is None or not is_durable}
    return {name: _value(*cell) for name, cell in kept.items()}


def _value(block: Block, position: int) -> tuple[str, bytes]:
    return str(block.schema), block.values[block.bounds[position] : block.bounds[position + 1]].tobytes()


def _turn(turn: dict[str, Block]) -> dict[str, object]:
    return {name: _value(block, 0) for name, block in turn.items()}


class House:
    """A store of one kind that can be left, and opened by the next process."""

    def __init__(self, kind: str, path: Path) -> None:
        self.is_durable = kind in DURABLE
        self._kind = kind
        self._path = path
        self._journal = MemoryJournal()
        self._stack = AsyncExitStack()
        self.queue = TransferQueue()

    async def enter(self, weights_step: int = 0) -> None:
        if self._kind == "model":
            self.queue = TransferQueue(self._journal, self._journal.load(weights_step), weights_step=weights_step)
        elif self._kind == "sqlite":
            opening = open_queue(self._path, world=RealWorld(), weights_step=weights_step)
            self.queue = await self._stack.enter_async_context(opening)

    async def leave(self) -> None:
        await self._stack.aclose()
        self._journal = self._journal.crash()

    async def reopen(self, weights_step: int | None = None) -> TransferQueue:
        """The process ends and the next one opens what is left: the same, but for what stages wrote and the leases of steps.

        weights_step: of the next one's weights; None: those that this one had.
        """
        before, incarnation = look_at(self.queue, is_durable=True), self.queue.incarnation
        step = before["weights"] if weights_step is None else weights_step
        await self.leave()
        await self.enter(step)
        if step == before["weights"]:
            assert look_at(self.queue, is_durable=True) == before
        assert (self.queue.incarnation, self.queue.weights_step) == (incarnation + 1, step)
        return self.queue


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that can be: what a disk does is not the subject here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(params=KINDS)
async def house(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[House]:
    house = House(request.param, folder / "journal.db")
    await house.enter()
    yield house
    try:
        if house.is_durable:
            await house.reopen()
    finally:
        await house.leave()


@pytest.fixture
def queue(house: House) -> TransferQueue:
    return house.queue


@pytest.fixture
def reopen(house: House) -> Callable[..., Awaitable[TransferQueue]]:
    """`queue = await reopen()`, or `await reopen(2)` with weights of step 2; for tests with `durable`."""
    assert house.is_durable
    return house.reopen


@pytest.fixture(scope="session")
def look() -> Callable[..., dict[str, Any]]:
    return look_at


@pytest.fixture
def open_session(queue: TransferQueue) -> OpenSession:
    """`await open_session("a")` opens group `a` where it is not open yet, and its session 0; returns the session's lease."""
    groups: set[str] = set()

    async def start(uid: str = "a", session_id: int = 0, attempt: int = 0) -> SessionLease:
        if uid not in groups:
            groups.add(uid)
            await queue.open_lease(GroupLease(uid=uid))
        lease = SessionLease(uid=uid, session_id=session_id, attempt=attempt)
        await queue.open_lease(lease)
        return lease

    return start


# --- a journal that does as it is told --------------------------------------------------------------------------------------------


class HandJournal:
    """Acknowledges at the next turn of the loop, or with `is_by_hand` when told to. `fails_at`: so many entries it keeps."""

    def __init__(self, *, saved: Saved | None = None, fails_at: int | None = None, is_by_hand: bool = False) -> None:
        self._saved = saved or Saved()
        self.entries: list[list[Op]] = []
        self.synced: list[int] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.failure: JournalWriteError | None = None
        self._fails_at = fails_at
        self._is_by_hand = is_by_hand

    def load(self, weights_step: int = 0) -> Saved:
        return MemoryJournal(saved=self.first(len(self.entries))).load(weights_step)

    def first(self, count: int) -> Saved:
        """What was there before, and the first entries since."""
        saved = copy.deepcopy(self._saved)
        for entry in self.entries[:count]:
            saved.apply(entry)
        return saved

    def append(self, entry: Entry, *, synced: bool = False) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        acknowledged: asyncio.Future[None] = loop.create_future()
        if len(self.entries) == self._fails_at:
            self.fail()
        if self.failure is not None:
            acknowledged.set_exception(self.failure)
            return acknowledged
        self.entries.append(list(entry))
        if synced:
            self.synced.append(len(self.entries))
        if self._is_by_hand:
            self.waiting.append(acknowledged)
        else:
            loop.call_soon(_acknowledge, acknowledged)
        return acknowledged

    def acknowledge(self) -> None:
        """All that wait, the last one first: what a verb has to do after it must not depend on their order."""
        for future in reversed(self.waiting):
            _acknowledge(future)
        self.waiting.clear()

    def fail(self) -> None:
        """The disk is full from now on; who waits is told."""
        self.failure = JournalWriteError("journal.db cannot be written: database or disk is full")
        for future in self.waiting:
            if not future.done():
                future.set_exception(self.failure)
        self.waiting.clear()

    def next_queue(self, count: int | None = None) -> TransferQueue:
        """The store that the next process opens, of all entries or the first `count`, with the weights that this one has then."""
        saved = self.first(len(self.entries) if count is None else count)
        weights_step = max((step for step, record in saved.records.items() if not record.tries), default=saved.steps.purged)
        return TransferQueue(HandJournal(), MemoryJournal(saved=saved).load(weights_step), weights_step=weights_step)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is queued here."""


def _acknowledge(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@pytest.fixture(scope="session")
def hand_journal() -> Callable[..., Any]:
    return HandJournal


# --- a store in which every verb has something to do ------------------------------------------------------------------------------


async def furnish(queue: TransferQueue) -> None:
    """Groups of one session with two trajectories: `a` retired with step 1, `b` recorded for step 2, `d` settled and free; `c` has
    a session under way with one turn and a row, and `p` is a prompt alone."""
    for number, uid in enumerate("abdcp"):
        group = GroupLease(uid=uid)
        tag: dict[str, bool | str | int] = {"is_prompt": True, "status": "running", "row": 10 + number}
        await queue.admit(group, partition_id="train", cursor=number + 1, tag=tag, fields={"raw_prompt": [uid]})
        if uid == "p":
            break
        session = SessionLease(uid=uid, session_id=0)
        await queue.open_lease(session)
        if uid == "c":
            await queue.put_turn(session, 0, {"responses": [1, 2]})
            await queue.kv_put("c_0_0", partition_id="train", lease=session, fields={"responses": [1]}, tag={"status": "x"})
        else:
            keys = [f"{uid}_0_0", f"{uid}_0_1"]
            rows: dict[str, Any] = {"fields": {"responses": [[1, 2], [3]]}, "tags": [{"seq_len": 2}, {"seq_len": 1}]}
            await queue.settle_session(session, partition_id="train", keys=keys, group_tag={"status": "finished"}, **rows)
    for step, uid in enumerate("ab", start=1):
        keys = [f"{uid}_0_0", f"{uid}_0_1"]
        await queue.record(step, keys, partition_id="train")
        await queue.open_lease(StepLease(step=step), keys=keys, partition_id="train")
        fields = {"advantages": [[0.5, 0.5], [1.5]]}
        await queue.kv_batch_put(keys, partition_id="train", lease=StepLease(step=step), fields=fields)
    await queue.retire(["a_0_0", "a_0_1"], partition_id="train", step=1, lease=StepLease(step=1))


async def _admit(queue: TransferQueue) -> None:
    await queue.admit(GroupLease(uid="e"), partition_id="train", cursor=6, tag={"n": 1}, fields=PROMPT)


async def _reopen_group(queue: TransferQueue) -> None:
    sessions, kept = queue.reopen_group(GroupLease(uid="c", incarnation=1), partition_id="train", tag={"n": 1})
    assert sessions == [SessionLease(uid="c", session_id=0, incarnation=1)]
    await kept


Verb = Callable[[TransferQueue], Awaitable[object]]
C0, ROW, PROMPT = SessionLease(uid="c", session_id=0), {"responses": [7]}, {"raw_prompt": ["e"]}
VERBS: dict[str, Verb] = {
    "open group": lambda queue: queue.open_lease(GroupLease(uid="e")),
    "take group over": lambda queue: queue.open_lease(GroupLease(uid="c", incarnation=1)),
    "open session": lambda queue: queue.open_lease(SessionLease(uid="c", session_id=1)),
    "begin sessions": lambda queue: queue.begin_sessions(
        GroupLease(uid="c"), [SessionLease(uid="c", session_id=n) for n in (1, 2)], partition_id="train", tag={"status": "running"}
    ),
    "retry": lambda queue: queue.open_lease(SessionLease(uid="c", session_id=0, attempt=1)),
    "close group": lambda queue: queue.close_lease(GroupLease(uid="c")),
    "close session": lambda queue: queue.close_lease(C0),
    "put": lambda queue: queue.kv_put("c_0_1", partition_id="train", lease=C0, fields=ROW, tag={"n": 1}),
    "put batch": lambda queue: queue.kv_batch_put(["c_0_0", "c_0_1"], partition_id="train", lease=C0, tags=[{"n": 1}, {"n": 2}]),
    "admit": _admit,
    "reopen group": _reopen_group,
    "put turn": lambda queue: queue.put_turn(C0, 1, ROW),
    "settle session": lambda queue: queue.settle_session(C0, partition_id="train", keys=["c_0_1"], tags=[{"n": 1}]),
    "settle last session": lambda queue: queue.settle_session(C0, partition_id="train", group_tag={"status": "failure"}),
    "settle session with a tag": lambda queue: queue.settle_session(
        C0, partition_id="train", group_tag={"failure": "x"}, ends_group=False
    ),
    "settle group": lambda queue: queue.settle_group(GroupLease(uid="c"), partition_id="train", tag={"status": "failure"}),
    "record": lambda queue: queue.record(3, ["d_0_0", "d_0_1"], partition_id="train"),
    "record again": lambda queue: queue.record(2, ["b_0_0", "b_0_1"], partition_id="train"),
    "retire": lambda queue: queue.retire(["b_0_0", "b_0_1"], partition_id="train", step=2, lease=StepLease(step=2)),
    "purge": lambda queue: queue.purge(1),
    "note evaluation": lambda queue: queue.note_evaluation(0),
    "clear": lambda queue: queue.kv_clear(["c"], partition_id="train"),
    "clear a trajectory": lambda queue: queue.kv_clear(["c_0_0"], partition_id="train"),
    "drop": lambda queue: queue.drop(["d", "p"], partition_id="train", reason="no_signal"),
    "drop failures": lambda queue: queue.drop(["d", "p"], partition_id="train", reason="failure"),
}
"""Each changes a furnished store, and what its journal keeps."""
UNJOURNALED: dict[str, Verb] = {
    "open step": lambda queue: queue.open_lease(StepLease(step=3)),
    "close step": lambda queue: queue.close_lease(StepLease(step=2)),
    "put column": lambda queue: queue.kv_put(
        "b_0_0", partition_id="train", lease=StepLease(step=2), fields={"returns": [0.0, 0.0]}
    ),
    "revive": lambda queue: queue.revive(["b_0_0", "b_0_1"], partition_id="train", step=2),
}
"""Each changes a furnished store in a way that is computed again after a restart."""


@pytest.fixture(params=[*VERBS])
def verb(request: pytest.FixtureRequest) -> Verb:
    return VERBS[request.param]


@pytest.fixture(params=[*VERBS, *UNJOURNALED])
def any_verb(request: pytest.FixtureRequest) -> Verb:
    return {**VERBS, **UNJOURNALED}[request.param]


@pytest.fixture
async def furnished(queue: TransferQueue) -> TransferQueue:
    await furnish(queue)
    return queue


@pytest.fixture(scope="session")
def furnish_queue() -> Callable[[TransferQueue], Awaitable[None]]:
    return furnish
