"""One partition in memory: rows (tag and cells), the columns' schemas, and the index from a group to its keys.

A row is a tag and, a field, where its value lies (a block and a row in it). Everything here is synchronous and takes effect whole:
`check_put` may refuse, `put` may not. Owns no lease and no watch. Invariants:
1. A field has one schema as long as any row has a value of it.
2. A tag mapping is never changed in place: a merge makes a new one, so what was handed out stays as it was.
3. A block lives exactly as long as a row needs a value of it, and is at least half needed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from asyncrl.errors import DtypeChangeError, LeaseScopeError, MissingColumnError, UnknownKeyError, UnknownPartitionError
from asyncrl.fields import CATALOGUE, Tag
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.transfer_queue.columns import Block, Cell, Schema, compact

NO_TAG: Tag = MappingProxyType({})
"""Of a row that was put without one: like every tag that is handed out it cannot be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who may write a row: a group its prompt (session_id None), a session its trajectories. The lease that wrote it last."""

    uid: str
    session_id: int | None
    attempt: int
    incarnation: int

    @classmethod
    def of(cls, lease: GroupLease | SessionLease) -> "Owner":
        if isinstance(lease, GroupLease):
            return cls(uid=lease.uid, session_id=None, attempt=0, incarnation=lease.incarnation)
        return cls(uid=lease.uid, session_id=lease.session_id, attempt=lease.attempt, incarnation=lease.incarnation)


@dataclass(slots=True)
class Row:
    """One key: its tag, where its values lie, who wrote it. `row_id`: its number, which no other row ever has."""

    row_id: int
    tag: Tag
    owner: Owner
    cells: dict[str, Cell] = field(default_factory=dict)


@dataclass(slots=True)
class _Column:
    schema: Schema
    num_cells: int = 0


class Partition:
    """Rows of one partition. `size_bytes`: bytes held; `live_bytes`: bytes that rows need, at least half of them.

    row_ids: numbers of new rows, shared by all partitions.
    """

    def __init__(self, partition_id: str, row_ids: Iterator[int]) -> None:
        self.partition_id = partition_id
        self._row_ids = row_ids
        self.rows: dict[str, Row] = {}
        self.size_bytes = 0
        self.live_bytes = 0
        self._columns: dict[str, _Column] = {}
        self._groups: dict[str, dict[str, None]] = {}

    # --- read

    def row(self, key: str) -> Row:
        """Raises UnknownPartitionError or UnknownKeyError."""
        row = self.rows.get(key)
        if row is not None:
            return row
        if not self.rows:
            raise UnknownPartitionError(f"partition {self.partition_id!r} holds no key at all; asked for key {key!r}")
        raise UnknownKeyError(f"key {key!r} is not in partition {self.partition_id!r}, which holds {len(self.rows)} others")

    def cells(self, name: str, keys: Iterable[str]) -> list[Cell]:
        """Where the values of one field lie, in the order of `keys`. Raises MissingColumnError for the first key without one."""
        rows = self.rows
        try:
            return [rows[key].cells[name] for key in keys]
        except KeyError:
            pass
        key = next(key for key in keys if name not in self.row(key).cells)
        raise MissingColumnError(f"key {key!r} in partition {self.partition_id!r} has no field {name!r}; {_producer(name)}")

    def owners(self, keys: Iterable[str]) -> list[tuple[str, int | None]]:
        """(uid, session_id; None for a prompt) of the rows, each once. Every key exists."""
        return list({(owner.uid, owner.session_id): None for owner in (self.rows[key].owner for key in keys)})

    @property
    def uids(self) -> list[str]:
        """Groups that have a row, in the order they came."""
        return list(self._groups)

    def group_keys(self, uid: str) -> list[str]:
        """Keys of the group, its prompt included, in the order they came."""
        return list(self._groups.get(uid, ()))

    # --- check and put

    def check_put(self, keys: Sequence[str], blocks: Mapping[str, Block], lease: GroupLease | SessionLease | StepLease) -> None:
        """Raises what `put` would run into: DtypeChangeError, LeaseScopeError or UnknownKeyError."""
        for name, block in blocks.items():
            column = self._columns.get(name)
            # The same object, mostly: `Schema.of`.
            if column is not None and column.schema is not block.schema and column.schema != block.schema:
                raise DtypeChangeError(
                    f"field {name!r} of key {keys[0]!r} came as {block.schema}; {self.partition_id!r} holds it as {column.schema}"
                )
        if isinstance(lease, StepLease):
            self._check_step(keys, blocks, lease)
        else:
            self._check_owner(keys, lease)

    def _check_step(self, keys: Sequence[str], blocks: Mapping[str, Block], lease: StepLease) -> None:
        """A step adds columns to rows that exist, and writes over nothing that an agent wrote: a failed step can be undone."""
        rows = [self.row(key) for key in keys]
        for name in blocks:
            for key, row in zip(keys, rows, strict=True):
                held = row.cells.get(name)
                if held is not None and held[0].step is None:
                    raise LeaseScopeError(f"{lease} may not write over field {name!r} of key {key!r}: its session wrote it")

    def _check_owner(self, keys: Sequence[str], lease: GroupLease | SessionLease) -> None:
        session_id = lease.session_id if isinstance(lease, SessionLease) else None
        for key in keys:
            row = self.rows.get(key)
            if row is not None and (row.owner.uid != lease.uid or row.owner.session_id != session_id):
                raise LeaseScopeError(f"key {key!r} in partition {self.partition_id!r} belongs to {row.owner}, not to {lease}")

    def put(self, keys: Sequence[str], blocks: Mapping[str, Block], tags: Sequence[Tag] | None, owner: Owner | None) -> list[str]:
        """Rows that are new come to be, columns are written over, tags are replaced. Returns the keys that are new.

        owner None: a step's put, which makes no rows.
        """
        new = [] if owner is None else [key for key in keys if self._own(key, owner)]
        rows = [self.rows[key] for key in keys]
        if tags is not None:
            for row, tag in zip(rows, tags, strict=True):
                row.tag = tag
        touched: _Touched = {}
        for name, block in blocks.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Column(block.schema)
            column.num_cells += len(rows)
            self.size_bytes += block.size_bytes
            self.live_bytes += block.live_bytes
            for position, row in enumerate(rows):
                if name in row.cells:
                    self._release(name, row.cells[name], touched)
                row.cells[name] = (block, position)
        self._tidy(touched)
        return new

    def _own(self, key: str, owner: Owner) -> bool:
        row = self.rows.get(key)
        if row is not None:
            row.owner = owner
            return False
        self._add(key, Row(next(self._row_ids), NO_TAG, owner))
        return True

    def _add(self, key: str, row: Row) -> None:
        self.rows[key] = row
        self._groups.setdefault(row.owner.uid, {})[key] = None

    def add_saved(self, rows: Mapping[str, Row], blocks: Mapping[str, Sequence[Block]]) -> None:
        """Rows and blocks as they were kept; the owners of a block's rows are among `rows`."""
        for key, row in rows.items():
            self._add(key, row)
        for name, parts in blocks.items():
            for block in parts:
                self._columns.setdefault(name, _Column(block.schema)).num_cells += block.num_owned
                self.size_bytes += block.size_bytes
                self.live_bytes += block.live_bytes
                for position, owner in enumerate(block.owners):
                    assert owner is not None
                    self.rows[owner].cells[name] = (block, position)

    # --- remove

    def remove(self, keys: Collection[str]) -> None:
        """The rows are gone, with their values. Every key exists."""
        touched: _Touched = {}
        for key in keys:
            row = self.rows.pop(key)
            group = self._groups[row.owner.uid]
            del group[key]
            if not group:
                del self._groups[row.owner.uid]
            for name, cell in row.cells.items():
                self._release(name, cell, touched)
        self._tidy(touched)

    def remove_step_columns(self, keys: Iterable[str]) -> None:
        """The rows as their sessions left them: without the columns that steps wrote. Every key exists."""
        touched: _Touched = {}
        for key in keys:
            cells = self.rows[key].cells
            for name in [name for name, (block, _) in cells.items() if block.step is not None]:
                self._release(name, cells.pop(name), touched)
        self._tidy(touched)

    @staticmethod
    def _release(name: str, cell: Cell, touched: "_Touched") -> None:
        block, position = cell
        if block not in touched:
            touched[block] = (name, block.live_bytes, block.num_owned)
        block.release(position)

    def _tidy(self, touched: "_Touched") -> None:
        """Settle the counts and rewrite what is mostly waste: once a call, so that clearing a batch copies a block once."""
        for block, (name, live_bytes, num_owned) in touched.items():
            self.live_bytes += block.live_bytes - live_bytes
            column = self._columns[name]
            column.num_cells += block.num_owned - num_owned
            if column.num_cells == 0:
                del self._columns[name]
            if block.is_wasteful:
                self.size_bytes -= block.size_bytes
                self._rewrite(name, block)

    def _rewrite(self, name: str, block: Block) -> None:
        if block.num_owned == 0:
            return
        smaller = compact(block)
        self.size_bytes += smaller.size_bytes
        for position, owner in enumerate(smaller.owners):
            assert owner is not None
            self.rows[owner].cells[name] = (smaller, position)


_Touched = dict[Block, tuple[str, int, int]]
"""Blocks that lost rows in this call: field, and live_bytes and num_owned before."""


def _producer(name: str) -> str:
    entry = CATALOGUE.get(name)
    if entry is None:
        return "the catalogue (asyncrl/fields.py) does not know it"
    return f"{entry.producer!r} writes it ({entry.when})"
