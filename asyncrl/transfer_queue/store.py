"""The TransferQueue: the only door between those who produce trajectories and those who train on them.

agents -> [TransferQueue] -> replay (tags), stages (values) -> retire

It owns partitions, leases, watches and the ledger, in memory; one process owns a store and is its only writer. It knows nothing of
models, and of groups only which keys they have. With a journal, what it has acknowledged survives the process. Invariants:
1. Each verb checks everything, then acts, with no await in between: it is whole or it raises and nothing has changed.
2. Every put is made under an open lease that covers its keys (`leases.py`).
3. After a clear or retire of a key no put brings it back: its group's or session's lease is closed, and no lower one opens.
4. What goes in and what comes out are copies: nobody shares memory with the store.
5. A partition without a key is no partition: nothing of it remains.
6. A verb returns when the journal has acknowledged it. Its entry is queued in the act itself, so entries have the order of acts,
   and a waiter that is cancelled takes nothing back. What stages write is not journaled: it can be computed again.
7. What cannot be kept is not done: once the journal has failed, every verb that writes raises its failure.

Three endings. `kv_clear` and `drop` delete for good. `retire` hides the rows of a trained step: their memory is freed at once, a
journal keeps those of a recorded step until `purge`. `revive` gives the rows of a failed step back as their sessions left them.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tensordict import TensorDict

from asyncrl.errors import LeaseScopeError, StaleLeaseError, StoreError
from asyncrl.fields import Tag
from asyncrl.journal.entries import Op, PutLeases, Saved
from asyncrl.journal.port import Journal
from asyncrl.keys import GroupLease, Lease, SessionLease, StepLease
from asyncrl.ports import HeldField
from asyncrl.transfer_queue import endings, puts, under_way
from asyncrl.transfer_queue.checks import listed
from asyncrl.transfer_queue.columns import Gatherer
from asyncrl.transfer_queue.commit_deadline import CommitDeadline
from asyncrl.transfer_queue.counts import Counts
from asyncrl.transfer_queue.describe import describe
from asyncrl.transfer_queue.encoding import Fields
from asyncrl.transfer_queue.puts import Put, one_row
from asyncrl.transfer_queue.state import State
from asyncrl.transfer_queue.under_way import GroupUnderWay
from asyncrl.transfer_queue.watch import Watch


class TransferQueue(Counts):
    """Keys, tags and columns of all partitions. An async context manager: leaving it closes all leases and ends all watches.

    journal: None for memory alone; `saved` is what it kept until now. `opening.open_queue` makes both. weights_step: the last step
    that the weights of this process have learned: rows of steps up to it are hidden, those of later ones are there again. Raises
    JournalDamagedError.
    """

    def __init__(
        self, journal: Journal | None = None, saved: Saved | None = None, *, commit_timeout_s: float = 60.0, weights_step: int = 0
    ) -> None:
        kept = saved or Saved()
        self._journal = journal
        self._deadline = CommitDeadline(commit_timeout_s)
        self._state = State(kept, is_journaled=journal is not None, weights_step=weights_step)
        self.incarnation = kept.incarnation
        """How often the run was started before this time. Leases of this one carry it."""

    def _write(self, verb: Callable[[], list[Op]]) -> list[Op]:
        """Do what is asked, unless it could not be kept. Refusals are counted."""
        if self.failure is not None:
            raise self.failure
        try:
            return verb()
        except StaleLeaseError:
            self._state.counts["refused_writes"] += 1
            raise

    def _keep(self, ops: list[Op], *, synced: bool = False) -> "asyncio.Future[None]":
        """Done when what was done is kept. It raises JournalWriteError, or DeadlineError after `commit_timeout_s`."""
        if self._journal is None or not ops:
            kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            kept.set_result(None)
            return kept
        acknowledged = self._journal.append(ops, synced=synced)
        self._deadline.watch(acknowledged)
        return acknowledged

    async def _commit(self, ops: list[Op], *, synced: bool = False) -> None:
        """Wait until what was done is kept."""
        if self._journal is not None and ops:
            await self._keep(ops, synced=synced)

    # --- leases

    async def open_lease(self, lease: Lease, *, keys: Collection[str] | None = None, partition_id: str | None = None) -> None:
        """Open a group's, session's or step's lease.

        A session needs the open lease of its group. A higher attempt deletes every row and turn of the session's lower attempts,
        and a higher attempt or incarnation makes the older lease stale. `keys` and `partition_id` bound what a step may write;
        without them it may add columns to any key that exists. Raises StaleLeaseError for a lease that is open, has settled, or is
        lower than one before.
        """
        await self._commit(self._write(lambda: self._open(lease, keys, partition_id)))

    def _open(self, lease: Lease, keys: Collection[str] | None, partition_id: str | None) -> list[Op]:
        leases = self._state.leases
        if isinstance(lease, StepLease):
            leases.open_step(lease, keys=keys, partition_id=partition_id)
            return []
        if keys is not None or partition_id is not None:
            raise LeaseScopeError(f"{lease} covers its own keys; only a step's lease takes keys and a partition")
        self._state.refuse_lower(lease)
        if isinstance(lease, SessionLease):
            return self._state.open_session(lease)
        leases.open_group(lease)
        return [PutLeases(leases.entries(lease.uid))]

    async def close_lease(self, lease: Lease) -> None:
        """End a lease, and with a group's those of its sessions. One that is not open (its group was cleared, say) is fine."""
        if self._state.leases.is_open(lease):
            await self._commit(self._write(lambda: self._state.close(lease)))

    # --- put

    async def kv_put(
        self, key: str, *, partition_id: str, lease: Lease, fields: Mapping[str, Any] | None = None, tag: Tag | None = None
    ) -> None:
        """One key: `fields` holds its values themselves (a ragged row is a tensor of its own length). Raises as `kv_batch_put`."""
        what = Put(partition_id=partition_id, keys=[key], fields=one_row(fields), tags=None if tag is None else [tag])
        await self._commit(self._write(lambda: puts.put(self._state, lease, what)))

    async def kv_batch_put(
        self,
        keys: Sequence[str],
        *,
        partition_id: str,
        lease: Lease,
        fields: Fields | None = None,
        tags: Sequence[Tag] | None = None,
    ) -> None:
        """Write columns and merge tags of several keys, all or nothing; new keys come to be under a group's or session's lease.

        fields: a TensorDict, or field name -> one value a key. Tensor rows of a ragged field are [length, ...]; fields outside the
        catalogue are ragged when their rows have a dimension. Objects are JSON values. Values are copied. tags: one a key.
        Raises StaleLeaseError, LeaseScopeError, DuplicateKeyError, TagCountError, TagValueError, DtypeChangeError, FieldError, and
        UnknownKeyError or UnknownPartitionError when a step writes to a key that does not exist; nothing is changed then.
        """
        what = Put(partition_id=partition_id, keys=listed(keys), fields=fields, tags=tags)
        await self._commit(self._write(lambda: puts.put(self._state, lease, what)))

    def admit(
        self, lease: GroupLease, *, partition_id: str, cursor: int, tag: Tag, fields: Mapping[str, Any] | None = None
    ) -> "asyncio.Future[None]":
        """Begin a group, in one transaction: its lease, its prompt's row, the feed's cursor, and one more admitted.

        Acts at the call, so admissions have the order of the calls; the future is done when it is kept. cursor: number of prompts
        that the feed has handed out, this one included; it never goes back. Raises as `kv_put`, StaleLeaseError for a group that
        was admitted before, and StoreError for a lower cursor.
        """
        prompt = Put(partition_id=partition_id, keys=[lease.uid], fields=one_row(fields), tags=[tag])
        return self._keep(self._write(lambda: puts.admit(self._state, lease, prompt, cursor)))

    async def begin_sessions(self, group: GroupLease, sessions: Sequence[SessionLease], *, partition_id: str, tag: Tag) -> None:
        """Begin sessions of a group, in one transaction: their leases and its prompt's tag. Raises as `open_lease`, `kv_put`."""
        await self._commit(self._write(lambda: puts.begin_sessions(self._state, group, sessions, partition_id, tag)))

    def reopen_group(
        self, lease: GroupLease, *, partition_id: str, tag: Tag | None = None
    ) -> "tuple[list[SessionLease], asyncio.Future[None]]":
        """Go on with a group after a restart, in one transaction: its lease and those of its unsettled sessions get the incarnation
        of `lease`. Attempts and turns stay, settled sessions stay settled.

        Acts at the call. Returns the leases of the unsettled sessions (none where they had not begun), and a future that is done
        when it is kept. tag: merged into the prompt's. Raises StaleLeaseError for a group that has settled or is open already.
        """
        sessions: list[SessionLease] = []

        def verb() -> list[Op]:
            found, ops = puts.reopen_group(self._state, lease, partition_id, tag)
            sessions.extend(found)
            return ops

        return sessions, self._keep(self._write(verb))

    async def put_turn(self, lease: SessionLease, turn: int, fields: Mapping[str, Any]) -> None:
        """Keep what turn `turn` (from 0) of a session came to, until the session settles. fields: as `kv_put`.

        Raises StaleLeaseError, FieldError, and RecordError for a turn that does not follow the one before.
        """
        await self._commit(self._write(lambda: puts.put_turn(self._state, lease, turn, fields)))

    async def settle_session(
        self,
        lease: SessionLease,
        *,
        partition_id: str,
        keys: Sequence[str] = (),
        fields: Fields | None = None,
        tags: Sequence[Tag] | None = None,
        group_tag: Tag | None = None,
        ends_group: bool = True,
    ) -> None:
        """End a session, in one transaction: its trajectories, its lease, its turns. A session that failed has no keys.

        group_tag: merged into the prompt's; with `ends_group` it is the last one, since no sibling is left, and the group's lease
        ends as well. Raises as `kv_batch_put`.
        """
        rows = Put(partition_id=partition_id, keys=listed(keys), fields=fields, tags=tags)
        await self._commit(self._write(lambda: puts.settle_session(self._state, lease, rows, group_tag, ends_group=ends_group)))

    async def settle_group(self, lease: GroupLease, *, partition_id: str, tag: Tag) -> None:
        """End a group, in one transaction: its prompt's last tag and its lease. Raises as `kv_put`."""
        await self._commit(self._write(lambda: puts.settle_group(self._state, lease, partition_id, tag)))

    # --- read

    async def kv_batch_get(self, keys: Sequence[str], *, partition_id: str, fields: Sequence[str]) -> TensorDict:
        """Columns of `keys`, in their order and number (a key asked twice comes twice), copied into memory of the caller's own.

        Ragged fields are jagged tensors, those with equal lengths share one offsets tensor; others are [B, ...]; objects are a
        NonTensorStack. Raises UnknownPartitionError, UnknownKeyError or MissingColumnError, which name key, field and producer.
        """
        wanted = listed(keys)
        if not wanted:
            raise StoreError(f"a get of no keys from partition {partition_id!r}: there is no batch of nothing")
        partition = self._state.partition(partition_id)
        cells = {name: partition.cells(name, wanted) for name in listed(fields)}
        if not cells:
            for key in wanted:
                partition.row(key)
        self._state.counts["gets"] += 1
        return Gatherer().batch(cells, len(wanted))

    async def kv_turns(self, uid: str, session_id: int) -> list[TensorDict]:
        """What a session under way has kept of its turns: one TensorDict [1] a turn, copied."""
        kept = self._state.ledger.turns(uid, session_id)
        return [Gatherer().batch({name: [(block, 0)] for name, block in turn.items()}, 1) for turn in kept]

    async def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
        """Partition -> key -> tag, in the order the keys came. A partition that is asked for by name is there, if empty."""
        chosen = list(self._state.partitions) if partition_id is None else [partition_id]
        return {name: self._state.tags(name) for name in chosen}

    def groups_under_way(self, partition_id: str) -> list[GroupUnderWay]:
        """The groups that are alive, in admission order: their prompts are there, and no step trains on them. For a restart."""
        return under_way.groups_under_way(self._state, partition_id)

    def kv_watch(self, partition_id: str) -> Watch:
        """Async iterator of `{key: tag, or None when gone}`: a snapshot first, then the changed keys at each wake. Begins now."""
        state = self._state
        watch = Watch(snapshot=lambda: dict(state.tags(partition_id)), read=lambda key: state.tag(partition_id, key))
        state.watches.add(partition_id, watch)
        return watch

    # --- steps

    async def record(self, step: int, keys: Sequence[str], *, partition_id: str) -> int:
        """Step `step` trains on `keys`, in this order, whatever happens: kept (and synced) before any stage runs.

        Returns how often it was begun since it was last done, this time included; a repetition must have the same keys. Raises
        UnknownKeyError, and RecordError for other keys, for a step out of order or one that is done, for a key of another step, and
        for a group that is not whole or has not settled.
        """
        wanted = listed(keys)
        ops = self._write(lambda: endings.record(self._state, step, wanted, partition_id))
        tries = self._state.ledger.records[step].tries
        await self._commit(ops, synced=True)
        return tries

    async def retire(self, keys: Sequence[str], *, partition_id: str, step: int, lease: Lease) -> None:
        """Hide the rows of a trained step; the prompt of a group goes with its last trajectory. Gets and lists no longer see them.

        Its record counts no tries any more. Raises StaleLeaseError unless `lease` is the open lease of `step`, UnknownKeyError for
        a key that is not there, RecordError for less or more than the step's record, when it has one, and before an earlier step.
        """
        wanted = listed(keys)
        await self._commit(self._write(lambda: endings.retire(self._state, wanted, partition_id, step, lease)))

    async def revive(self, keys: Sequence[str], *, partition_id: str, step: int) -> None:
        """Give the rows of a step that failed in this process back as their sessions left them: stage columns deleted, the step's
        lease closed.

        Its record stays. Raises UnknownKeyError for a key that is not there.
        """
        wanted = listed(keys)
        await self._commit(self._write(lambda: endings.revive(self._state, wanted, partition_id, step)))

    async def purge(self, step: int) -> None:
        """Forget the records up to `step`, and what a journal kept of their rows: no checkpoint is left that would ask for them.

        Raises RecordError when one of them is not retired.
        """
        await self._commit(self._write(lambda: self._state.ledger.purge(step)))

    async def note_evaluation(self, version: int) -> None:
        """Version `version` has been evaluated, and its result is written: kept, and synced, so that a checkpoint that a failing
        journal leaves behind takes nothing for granted. A lower version than before changes nothing."""
        await self._commit(self._write(lambda: self._state.ledger.note_evaluation(version)), synced=True)

    async def sync(self) -> None:
        """Wait until all that was done before survives a power loss."""
        await self._commit(self._write(self._state.ledger.repeat), synced=True)

    # --- endings

    async def kv_clear(self, keys: Sequence[str], *, partition_id: str) -> None:
        """Delete keys for good, values and tags, and close the leases that could write them: a late write is refused.

        Clearing a prompt clears its whole group, and counts it as dropped by `cleared`. A key that is not there is fine: what is
        asked for is that it is gone.
        Raises DuplicateKeyError, and RecordError for a key that a step trains on.
        """
        wanted = listed(keys)
        await self._commit(self._write(lambda: endings.clear(self._state, wanted, partition_id)))

    async def drop(self, uids: Sequence[str], *, partition_id: str, reason: str) -> None:
        """Decide not to train these groups, in one transaction: clear them and count those that are there under `reason`; for
        `failure` also by the dataset row that the prompt's tag names.

        Raises as `kv_clear`, and StoreError for a trajectory.
        """
        wanted = listed(uids)
        await self._commit(self._write(lambda: endings.drop(self._state, wanted, partition_id, reason)))

    # --- sight and life

    async def describe(self, keys: Sequence[str], *, partition_id: str) -> tuple[HeldField, ...]:
        """Each field of `keys`: its schema and lengths, without a copy of any value. Raises UnknownKeyError."""
        return describe(self._state.partition(partition_id), keys)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._state.leases.close_all()
        self._state.watches.close()
        self._deadline.close()
