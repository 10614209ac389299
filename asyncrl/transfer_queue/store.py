"""The TransferQueue: the only door between those who produce trajectories and those who train on them.

agents -> [TransferQueue] -> replay (tags), stages (values) -> retire

It owns partitions, leases and watches, in memory; one process owns a store and is its only writer. It knows nothing of models, and
of groups only which keys they have. Invariants:
1. Each verb checks everything, then acts, with no await in between: it is whole or it raises and nothing has changed.
2. Every put is made under an open lease that covers its keys (`leases.py`).
3. After a clear or retire of a key no put brings it back: its group's or session's lease is closed, and no lower one opens.
4. What goes in and what comes out are copies: nobody shares memory with the store.
5. A partition without a key is no partition: nothing of it remains.

Three endings. `kv_clear` deletes for good. `retire` hides the rows of a trained step: their memory is freed at once, since here
nothing could ask for them again. `revive` gives the rows of a step back as their sessions left them, without the columns that its
stages wrote; of a retired row nothing is left to revive.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import Any, Self

from tensordict import TensorDict

from asyncrl.errors import DuplicateKeyError, FieldError, LeaseScopeError, StaleLeaseError, StoreError, TagCountError, TagValueError
from asyncrl.keys import GroupLease, Lease, SessionLease, StepLease
from asyncrl.ports import HeldField
from asyncrl.protocol.batch_meta import Tag, TagValue
from asyncrl.transfer_queue.columns import Fields, Gatherer, encode_fields
from asyncrl.transfer_queue.describe import describe
from asyncrl.transfer_queue.leases import Leases
from asyncrl.transfer_queue.partition import Owner, Partition
from asyncrl.transfer_queue.watch import Watch

_NO_TAG: Tag = MappingProxyType({})


class TransferQueue:
    """Keys, tags and columns of all partitions. An async context manager: leaving it closes all leases and ends all watches."""

    def __init__(self) -> None:
        self._partitions: dict[str, Partition] = {}
        self._leases = Leases()
        self._watches: dict[str, list[weakref.ref[Watch]]] = {}
        self._counts = dict.fromkeys(("puts", "gets", "cleared", "retired", "refused_writes"), 0)

    # --- leases

    async def open_lease(self, lease: Lease, *, keys: Collection[str] | None = None, partition_id: str | None = None) -> None:
        """Open a group's, session's or step's lease.

        A session needs the open lease of its group. A higher attempt deletes every row of the session's lower attempts, and a
        higher attempt or incarnation makes the older lease stale. `keys` and `partition_id` bound what a step may write; without
        them it may add columns to any key that exists. Raises StaleLeaseError for a lease that is open, has settled, or is lower
        than one before.
        """
        with self._counting_refusals():
            if isinstance(lease, StepLease):
                self._leases.open_step(lease, keys=keys, partition_id=partition_id)
                return
            if keys is not None or partition_id is not None:
                raise LeaseScopeError(f"{lease} covers its own keys; only a step's lease takes keys and a partition")
            self._refuse_lower(lease)
            if isinstance(lease, GroupLease):
                self._leases.open_group(lease)
            else:
                self._leases.open_session(lease)
                for partition, key, owner in self._rows_of(lease):
                    if owner.attempt < lease.attempt:
                        self._remove(partition, [key])

    async def close_lease(self, lease: Lease) -> None:
        """End a lease, and with a group's those of its sessions. One that is not open (its group was cleared, say) is fine."""
        self._leases.close(lease)

    def _refuse_lower(self, lease: GroupLease | SessionLease) -> None:
        """Rows remember who wrote them, so that a settled writer cannot come back after its lease was forgotten."""
        for _, _, owner in self._rows_of(lease):
            if isinstance(lease, SessionLease) and lease.attempt < owner.attempt:
                raise StaleLeaseError(f"{lease} cannot be opened: attempt {owner.attempt} has written")
            if lease.incarnation < owner.incarnation or (isinstance(lease, GroupLease) and lease.incarnation == owner.incarnation):
                raise StaleLeaseError(f"{lease} cannot be opened: incarnation {owner.incarnation} has written")

    def _rows_of(self, lease: GroupLease | SessionLease) -> list[tuple[Partition, str, Owner]]:
        session_id = lease.session_id if isinstance(lease, SessionLease) else None
        found = [
            (partition, key, partition.rows[key].owner)
            for partition in self._partitions.values()
            for key in partition.group_keys(lease.uid)
        ]
        return [row for row in found if row[2].session_id == session_id]

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except StaleLeaseError:
            self._counts["refused_writes"] += 1
            raise

    def _partition(self, partition_id: str) -> Partition:
        """The partition; where there is none, an empty one that nobody keeps."""
        return self._partitions.get(partition_id) or Partition(partition_id)

    # --- put

    async def kv_put(
        self, key: str, *, partition_id: str, lease: Lease, fields: Mapping[str, Any] | None = None, tag: Tag | None = None
    ) -> None:
        """One key: `fields` holds its values themselves (a ragged row is a tensor of its own length). Raises as `kv_batch_put`."""
        columns = None if fields is None else {name: [value] for name, value in fields.items()}
        self._put([key], partition_id, lease, columns, None if tag is None else [tag])

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
        self._put(_listed(keys), partition_id, lease, fields, tags)

    def _put(self, keys: list[str], partition_id: str, lease: Lease, fields: Fields | None, tags: Sequence[Tag] | None) -> None:
        if not keys:
            raise StoreError(f"a put of no keys into partition {partition_id!r}")
        _check_unique(keys)
        with self._counting_refusals():
            self._leases.check(lease, keys, partition_id)
            if tags is not None and isinstance(lease, StepLease):
                raise LeaseScopeError(f"{lease} may add columns, not tags; refused for key {keys[0]!r}")
        step = lease.step if isinstance(lease, StepLease) else None
        blocks = encode_fields(fields, keys, step=step)
        partition = self._partition(partition_id)
        merged = None if tags is None else self._merge(partition, keys, tags)
        with self._counting_refusals():
            partition.check_put(keys, blocks, lease)
        # Everything is checked: from here on nothing raises.
        self._partitions[partition_id] = partition
        new = partition.put(keys, blocks, merged, None if isinstance(lease, StepLease) else Owner.of(lease))
        self._counts["puts"] += 1
        if new or merged is not None:
            created = set(new)
            for watch in self._watchers(partition_id):
                for key in keys if merged is not None else new:
                    watch.note(key, existed=key not in created, exists=True)

    def _merge(self, partition: Partition, keys: Sequence[str], tags: Sequence[Tag]) -> list[Tag]:
        if len(tags) != len(keys):
            where = f"none for {keys[len(tags)]!r}" if len(tags) < len(keys) else f"the last key is {keys[-1]!r}"
            raise TagCountError(f"{len(tags)} tags for {len(keys)} keys of partition {partition.partition_id!r}: {where}")
        rows = partition.rows
        return [
            MappingProxyType({**(rows[key].tag if key in rows else _NO_TAG), **_checked_tag(key, tag)})
            for key, tag in zip(keys, tags, strict=True)
        ]

    # --- read

    async def kv_batch_get(self, keys: Sequence[str], *, partition_id: str, fields: Sequence[str]) -> TensorDict:
        """Columns of `keys`, in their order and number (a key asked twice comes twice), copied into memory of the caller's own.

        Ragged fields are jagged tensors, those with equal lengths share one offsets tensor; others are [B, ...]; objects are a
        NonTensorStack. Raises UnknownPartitionError, UnknownKeyError or MissingColumnError, which name key, field and producer.
        """
        wanted = _listed(keys)
        if not wanted:
            raise StoreError(f"a get of no keys from partition {partition_id!r}: there is no batch of nothing")
        partition = self._partition(partition_id)
        cells = {name: partition.cells(name, wanted) for name in _listed(fields)}
        if not cells:
            for key in wanted:
                partition.row(key)
        gatherer = Gatherer()
        columns = {name: gatherer.gather(column) for name, column in cells.items()}
        self._counts["gets"] += 1
        return TensorDict(columns, batch_size=[len(wanted)])

    async def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
        """Partition -> key -> tag, in the order the keys came. A partition that is asked for by name is there, if empty."""
        chosen = list(self._partitions) if partition_id is None else [partition_id]
        return {name: self._tags(name) for name in chosen}

    def kv_watch(self, partition_id: str) -> Watch:
        """Async iterator of `{key: tag, or None when gone}`: a snapshot first, then the changed keys at each wake. Begins now."""
        watch = Watch(snapshot=lambda: dict(self._tags(partition_id)), read=lambda key: self._tag(partition_id, key))
        self._watches.setdefault(partition_id, []).append(weakref.ref(watch))
        return watch

    def _tag(self, partition_id: str, key: str) -> Tag | None:
        row = self._partition(partition_id).rows.get(key)
        return None if row is None else row.tag

    def _tags(self, partition_id: str) -> dict[str, Tag]:
        return {key: row.tag for key, row in self._partition(partition_id).rows.items()}

    # --- endings

    async def kv_clear(self, keys: Sequence[str], *, partition_id: str) -> None:
        """Delete keys for good, values and tags, and close the leases that could write them: a late write is refused.

        Clearing a prompt clears its whole group. A key that is not there is fine: what is asked for is that it is gone.
        Raises DuplicateKeyError.
        """
        wanted = _listed(keys)
        _check_unique(wanted)
        partition = self._partition(partition_id)
        gone: dict[str, None] = {}
        for key in wanted:
            row = partition.rows.get(key)
            if row is None:
                self._leases.close_owner_of(key)
            else:
                gone.update(dict.fromkeys(partition.group_keys(key) if row.owner.session_id is None else [key]))
        self._leases.close_owners(partition.owners(gone))
        self._remove(partition, gone)
        self._counts["cleared"] += len(gone)

    async def retire(self, keys: Sequence[str], *, partition_id: str, step: int, lease: Lease) -> None:
        """Hide the rows of a trained step; the prompt of a group goes with its last trajectory. Gets and lists no longer see them.

        Raises StaleLeaseError unless `lease` is the open lease of `step`, UnknownKeyError for a key that is not there.
        """
        wanted = _listed(keys)
        _check_unique(wanted)
        with self._counting_refusals():
            if not isinstance(lease, StepLease) or lease.step != step or not self._leases.is_open(lease):
                raise StaleLeaseError(f"refused to retire {len(wanted)} keys of step {step}: {lease} is not its open lease")
        partition = self._partition(partition_id)
        gone = dict.fromkeys(wanted)
        for uid in {partition.row(key).owner.uid: None for key in wanted}:
            left = [key for key in partition.group_keys(uid) if key not in gone]
            if left == [uid]:
                gone[uid] = None
        self._leases.close_owners(partition.owners(gone))
        self._remove(partition, gone)
        self._counts["retired"] += len(gone)

    async def revive(self, keys: Sequence[str], *, partition_id: str, step: int) -> None:
        """Give the rows of a failed step back as their sessions left them: stage columns deleted, the step's lease closed.

        Raises UnknownKeyError for a key that is not there.
        """
        wanted = _listed(keys)
        partition = self._partition(partition_id)
        for key in wanted:
            partition.row(key)
        self._leases.revive_step(step)
        partition.remove_step_columns(wanted)

    def _remove(self, partition: Partition, keys: Collection[str]) -> None:
        partition.remove(keys)
        for watch in self._watchers(partition.partition_id):
            for key in keys:
                watch.note(key, existed=True, exists=False)
        if not partition.rows:
            self._partitions.pop(partition.partition_id, None)

    # --- watches, sight, life

    def _watchers(self, partition_id: str) -> list[Watch]:
        """The watches that somebody still holds; the others are forgotten here."""
        refs = self._watches.get(partition_id)
        if not refs:
            return []
        alive = [watch for watch in (ref() for ref in refs) if watch is not None and not watch.is_closed]
        if not alive:
            del self._watches[partition_id]
        elif len(alive) < len(refs):
            self._watches[partition_id] = [weakref.ref(watch) for watch in alive]
        return alive

    def stats(self) -> dict[str, float]:
        """Numbers now: keys, bytes (held), live_bytes (needed), open_leases, watchers; and counters since the start: puts, gets,
        cleared and retired keys, refused_writes (StaleLeaseError)."""
        partitions = self._partitions.values()
        return {
            "keys": sum(len(partition.rows) for partition in partitions),
            "bytes": sum(partition.size_bytes for partition in partitions),
            "live_bytes": sum(partition.live_bytes for partition in partitions),
            "open_leases": len(self._leases),
            "watchers": sum(len(self._watchers(name)) for name in list(self._watches)),
            **self._counts,
        }

    async def describe(self, keys: Sequence[str], *, partition_id: str) -> tuple[HeldField, ...]:
        """Each field that any of `keys` has: its schema and lengths, no value of it.

        Raises UnknownPartitionError or UnknownKeyError.
        """
        return describe(self._partition(partition_id), keys)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leases.close_all()
        for watch in [watch for name in list(self._watches) for watch in self._watchers(name)]:
            watch.close()


def _listed(names: Sequence[str]) -> list[str]:
    if isinstance(names, str):
        raise FieldError(f"{names!r} is one name; give a list of names")
    return list(names)


def _check_unique(keys: Sequence[str]) -> None:
    if len(set(keys)) != len(keys):
        twice = next(key for position, key in enumerate(keys) if key in keys[:position])
        raise DuplicateKeyError(f"key {twice!r} stands twice in one call")


_TAG_TYPES = frozenset({bool, int, float, str})


def _checked_tag(key: str, tag: Tag) -> dict[str, TagValue]:
    """Plain scalars under plain names; a StrEnum or IntEnum becomes the value it stands for."""
    return {
        name: value if type(value) in _TAG_TYPES and type(name) is str else _plain(key, name, value) for name, value in tag.items()
    }


def _plain(key: str, name: str, value: TagValue) -> TagValue:
    if isinstance(name, str):
        for kind in (bool, int, float, str):
            if isinstance(value, kind):
                return kind(value)
    raise TagValueError(f"tag entry {name!r} of key {key!r} is {type(value).__name__} {value!r}; allowed: bool, int, float, str")
