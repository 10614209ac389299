"""A run in small, which knows nothing but the store: what it does next follows from what it finds there, so any process can go on.

[small_run] -> test_every_crash: a process that ends after any entry, and the next one with any weights that the journal fits

Two groups a step, two sessions a group, two turns a session. Session 1 of group 1 is lost at its first attempt and tried again; a
session of group 2 fails for good, and with it its group; checkpoints are of every second step, the newest two are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.journal.entries import Entry, Saved
from asyncrl.journal.model import JournalDisk, MemoryJournal
from asyncrl.keys import TRAIN, GroupLease, SessionLease, StepLease
from asyncrl.protocol.ragged import rows_of
from asyncrl.transfer_queue import GroupUnderWay, TransferQueue

NUM_GROUPS, BATCH, SESSIONS, TURNS = 7, 2, 2, 2
NUM_STEPS = 3
RETRIED, FAILING = ("g1", 1), ("g2", 0)
PLACES = 4
"""Groups that are alive at most."""


def response(uid: str, session_id: int, attempt: int, turns: int = TURNS) -> list[int]:
    """What a session has generated after so many turns."""
    return [100 * int(uid[1:]) + 10 * session_id + attempt + 1000 * turn for turn in range(turns)]


@dataclass(slots=True)
class Log:
    """What a process found, and its entries since."""

    found: Saved
    entries: list[Entry] = field(default_factory=list)

    def cut(self, number: int) -> JournalDisk:
        """What is left when the process ends after its first `number` entries."""
        disk = JournalDisk(saved=self.found.copy(), entries=[*self.entries[:number]])
        disk.acknowledge(number, synced=True)
        return disk


@dataclass(slots=True)
class Process:
    """One life. `log`: for its end; `lineage`: step -> keys that it trained on."""

    queue: TransferQueue
    journal: MemoryJournal
    found: Saved
    kept: list[int] = field(default_factory=list)
    lineage: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def begin(cls, disk: JournalDisk, weights_step: int) -> "Process":
        journal = MemoryJournal(disk=disk)
        saved = journal.load(weights_step)
        return cls(TransferQueue(journal, saved, weights_step=weights_step), journal, disk.saved.copy())

    @property
    def log(self) -> Log:
        return Log(self.found, [*self.journal.disk.entries])

    async def run(self) -> None:
        """From wherever it stands to the end: lost steps first, then what is under way, then new groups."""
        queue = self.queue
        self.kept = [queue.weights_step]
        await self._evaluate()
        for step in range(queue.weights_step + 1, queue.last_step + 1):
            record = queue.recorded(step)
            assert record is not None
            await self._train(step, record.keys)
        while queue.weights_step < NUM_STEPS:
            await self._admit()
            for group in queue.groups_under_way(TRAIN):
                await self._finish(group)
            await self._drop_failed()
            groups = queue.groups_under_way(TRAIN)[:BATCH]
            if len(groups) == BATCH:
                await self._train(queue.weights_step + 1, [key for group in groups for key in group.keys])

    async def _admit(self) -> None:
        queue = self.queue
        while queue.cursor < NUM_GROUPS and len(queue.groups_under_way(TRAIN)) < PLACES:
            number = queue.cursor
            group = GroupLease(uid=f"g{number}", incarnation=queue.incarnation)
            tag: dict[str, int | str] = {"status": "pending", "row": number}
            await queue.admit(group, partition_id=TRAIN, cursor=number + 1, tag=tag, fields={"raw_prompt": number})

    async def _finish(self, group: GroupUnderWay) -> None:
        """Its sessions to their end. Groups of this process have not begun; those of an earlier one are reopened."""
        if group.is_settled:
            return
        lease = GroupLease(uid=group.uid, incarnation=self.queue.incarnation)
        sessions = [] if self.queue._state.leases.is_open(lease) else await self._reopen(lease)
        if not group.sessions:
            sessions = [SessionLease(uid=group.uid, session_id=number, incarnation=lease.incarnation) for number in range(SESSIONS)]
            await self.queue.begin_sessions(lease, sessions, partition_id=TRAIN, tag={"status": "running"})
        for session in sessions:
            await self._run_session(session)

    async def _reopen(self, lease: GroupLease) -> list[SessionLease]:
        sessions, kept = self.queue.reopen_group(lease, partition_id=TRAIN)
        await kept
        return sessions

    async def _run_session(self, lease: SessionLease) -> None:
        queue, name = self.queue, (lease.uid, lease.session_id)
        if name == RETRIED and lease.attempt == 0 and await queue.kv_turns(*name):
            lease = SessionLease(uid=lease.uid, session_id=lease.session_id, attempt=1, incarnation=lease.incarnation)
            await queue.open_lease(lease)
        turns = await queue.kv_turns(*name)
        done = response(*name, lease.attempt, len(turns))
        assert [rows_of(turn["responses"])[0].tolist() for turn in turns] == [[token] for token in done], "not its own turns"
        for turn in range(len(turns), TURNS):
            await queue.put_turn(lease, turn, {"responses": response(*name, lease.attempt)[turn : turn + 1]})
            if name == RETRIED and lease.attempt == 0:
                return await self._run_session(lease)  # lost after its first turn
        return await self._settle(lease)

    async def _settle(self, lease: SessionLease) -> None:
        (group,) = [group for group in self.queue.groups_under_way(TRAIN) if group.uid == lease.uid]
        is_last = [each.session_id for each in group.sessions if each.is_open] == [lease.session_id]
        fails = (lease.uid, lease.session_id) == FAILING
        tag: dict[str, str] = {"failure": "its tool"} if fails else {}
        if is_last:
            tag["status"] = "failure" if fails or "failure" in group.tag else "finished"
        rows: dict[str, list[object]] = {}
        if not fails:
            rows = {"responses": [response(lease.uid, lease.session_id, lease.attempt)]}
        await self.queue.settle_session(
            lease,
            partition_id=TRAIN,
            keys=[f"{lease.uid}_{lease.session_id}_0"] if rows else [],
            fields=rows,
            tags=[{"seq_len": TURNS}] if rows else None,
            group_tag=tag or None,
            ends_group=is_last,
        )

    async def _drop_failed(self) -> None:
        failed = [group.uid for group in self.queue.groups_under_way(TRAIN) if group.tag["status"] == "failure"]
        if failed:
            await self.queue.drop(failed, partition_id=TRAIN, reason="failure")

    async def _train(self, step: int, keys: Sequence[str]) -> None:
        queue = self.queue
        await queue.record(step, keys, partition_id=TRAIN)
        lease = StepLease(step=step, incarnation=queue.incarnation)
        await queue.open_lease(lease, keys=keys, partition_id=TRAIN)
        columns = {"advantages": [[0.5] * TURNS] * len(keys)}
        await queue.kv_batch_put(keys, partition_id=TRAIN, lease=lease, fields=columns)
        await queue.retire(keys, partition_id=TRAIN, step=step, lease=lease)
        await queue.close_lease(lease)
        self.lineage[step] = tuple(keys)
        await self._evaluate()
        if step % 2 == 0:
            await queue.sync()
            self.kept = [*self.kept, step][-2:]
            if len(self.kept) == 2:
                await queue.purge(self.kept[0])

    async def _evaluate(self) -> None:
        """Due when a version is published or loaded that has no result."""
        step = self.queue.weights_step
        if step % 2 == 0 and step > self.queue.evaluated:
            await self.queue.note_evaluation(step)


async def check(queue: TransferQueue, steps: Mapping[int, tuple[str, ...]]) -> None:
    """Nothing is lost, there twice, or other than it was; `steps`: what each step trains on when no process ends."""
    counters = queue.counters()
    alive = [group.uid for group in queue.groups_under_way(TRAIN)]
    recorded = {uid: step for step, record in queue.records.items() for uid in record.uids}
    later = [uid for uid, step in recorded.items() if step > queue.weights_step]
    num_dropped = sum(count for name, count in counters.items() if name.startswith("dropped/"))
    admitted = counters.get("admitted", 0)
    assert admitted == queue.cursor == queue.num_trained + num_dropped + len(alive) + len(later)
    assert not set(alive) & set(recorded)
    assert alive == sorted(alive), "not in the order of admission"
    assert sum(queue.failed_rows().values()) == num_dropped
    assert [*queue.records] == [*range(queue.purged_step + 1, queue.last_step + 1)]
    assert all(record.keys == steps[step] for step, record in queue.records.items())
    for keys in [*(queue.records[step].keys for step in {recorded[uid] for uid in later}), *_keys_of_alive(queue)]:
        await _check_values(queue, keys)


def _keys_of_alive(queue: TransferQueue) -> list[tuple[str, ...]]:
    return [group.keys for group in queue.groups_under_way(TRAIN) if group.keys]


async def _check_values(queue: TransferQueue, keys: Sequence[str]) -> None:
    found = rows_of((await queue.kv_batch_get(keys, partition_id=TRAIN, fields=["responses"]))["responses"])
    for key, row in zip(keys, found, strict=True):
        uid, session_id, _ = key.split("_")
        assert row.tolist() == response(uid, int(session_id), 1 if (uid, int(session_id)) == RETRIED else 0)
