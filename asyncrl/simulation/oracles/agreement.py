"""The store holds what its entries say, no more and no less: after every turn of the groups that changed, and of everything at the
end, when the journal must give the same back.
"""

from collections import Counter
from collections.abc import Iterable

from asyncrl.journal.entries import PutColumn, Saved
from asyncrl.journal.model import JournalDisk
from asyncrl.keys import TRAIN
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes, ShadowRow, changed_groups
from asyncrl.transfer_queue.partition import Row
from asyncrl.transfer_queue.state import State


class Forgotten(Oracle):
    """What replay has seen go from the store it forgets. A watch may be late, but tells everything in its order: who knows a newer
    group has been told of the older one's end."""

    name = "I4"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._born: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        """Group -> the entry with which it came, and went."""

    def entry(self, changes: Changes) -> None:
        if changes.recorded:
            self._check()
        for put in changes.put:
            if put.row.is_prompt and put.tag_before is None:
                self._born[put.row.entry.uid] = changes.number
        gone = [row.entry.uid for row in changes.removed if row.is_prompt]
        gone += [uid for record in changes.retired for uid in record.uids]
        for uid in gone:
            self._gone.setdefault(uid, changes.number)

    def _check(self) -> None:
        """At the record of a step: the one before went a while ago."""
        groups = self.ground.replay._groups
        newest = max((self._born.get(uid, 0) for uid in groups), default=0)
        known = [uid for uid in groups if self._gone.get(uid, newest) < newest]
        if known:
            self.fail(f"replay still follows groups {known[:4]}, of which the store has no key any more")


class Agreement(Oracle):
    """Keys that should be gone are I4's; the rest is called `store`."""

    name = "I4"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._changed: list[Changes] = []

    def entry(self, changes: Changes) -> None:
        self._changed.append(changes)

    def turn(self) -> None:
        if self._changed:
            self.check(changed_groups(self._changed))
            self._changed.clear()
            self._check_number()

    def check(self, uids: Iterable[str]) -> None:
        """Keys, tags, owners and leases of these groups."""
        partition, leases, shadow = self.ground.state.partition(TRAIN), self.ground.state.leases, self.ground.shadow
        for uid in uids:
            held, expected = partition.group_keys(uid), shadow.groups.get(uid, {})
            if len(held) != len(expected) or any(key not in expected for key in held):
                self._fail_keys(uid, held, list(expected))
            for key, row in expected.items():
                self._check_row(partition.rows[key], row)
            found = {entry.session_id: entry for entry in leases.entries(uid)}
            if found != shadow.leases.get(uid, {}):
                self.fail(f"the leases of group {uid!r} are {found}; its entries say {shadow.leases.get(uid, {})}")

    def _fail_keys(self, uid: str, held: list[str], expected: list[str]) -> None:
        more, less = sorted(set(held) - set(expected)), sorted(set(expected) - set(held))
        self.fail(
            f"the store holds keys {more[:4]} of group {uid!r}, which its entries removed or never made, and lacks {less[:4]}"
        )

    def _check_row(self, held: Row, expected: ShadowRow) -> None:
        entry, owner = expected.entry, held.owner
        if held.tag != entry.tag:
            self.fail(f"the tag of key {entry.key!r} is {dict(held.tag)}; its entries say {dict(entry.tag)}")
        if (held.row_id, owner.attempt, owner.incarnation) != (entry.row_id, entry.attempt, entry.incarnation):
            self.fail(f"key {entry.key!r} is row {held.row_id} of {owner}; its entries say {entry}")

    def _check_number(self) -> None:
        """No group that nobody changed came or went."""
        held = sum(len(partition.rows) for partition in self.ground.state.partitions.values())
        if held != len(self.ground.shadow.keys):
            self.fail(f"the store holds {held} keys; its entries say {len(self.ground.shadow.keys)}")

    def begin(self) -> None:
        """A restart gives back what was kept, values included; rows of steps that the weights have not seen are there again."""
        if self.ground.run.store.journal:
            self._check_values(self.ground.state, "the store that a restart begins with")
            self._check_rest(self.ground.state, "the store that a restart begins with")

    def end(self) -> None:
        """Memory, entries and what the next life would find are the same, values included."""
        ground, shadow = self.ground, self.ground.shadow
        self._check_values(ground.state, "the store")
        if ground.state.ledger.counters != Counter(shadow.counters):
            self.fail(f"the ledger counts {dict(ground.state.ledger.counters)}; its entries say {shadow.counters}")
        if ground.run.store.journal and not ground.has_journal_failed:
            found = kept(ground.machine.journal, has_values=bool(shadow.keys))
            step = max(shadow.done, default=found.steps.purged)
            state = State(found, is_journaled=True, weights_step=step)
            self._check_values(state, "what the journal gives back")
            self._check_rest(state, "what the journal gives back")

    def _check_values(self, state: State, who: str) -> None:
        expected = self.ground.shadow.keys
        found = {(name, key) for name, partition in state.partitions.items() for key in partition.rows}
        if found != set(expected):
            self.fail(f"{who} has keys {sorted(found - set(expected))[:4]} too many and lacks {sorted(set(expected) - found)[:4]}")
        for (partition_id, key), row in expected.items():
            held = state.partition(partition_id).rows[key]
            self._check_row(held, row)
            cells = {name: cell for name, cell in held.cells.items() if cell[0].step is None}
            values = {name: bytes(block.values[block.bounds[at] : block.bounds[at + 1]]) for name, (block, at) in cells.items()}
            written = {name: bytes(data) for name, (_, data) in row.cells.items()}
            if values != written:
                differ = sorted(name for name in {*values, *written} if values.get(name) != written.get(name))
                self.fail(f"{who} has other values in fields {differ} of key {key!r} than its entries say")

    def _check_rest(self, found: State, who: str) -> None:
        """Leases, turns, records and counters."""
        shadow = self.ground.shadow
        for uid in {*found.leases.uids, *shadow.leases}:
            leases = {entry.session_id: entry for entry in found.leases.entries(uid)}
            if leases != shadow.leases.get(uid, {}):
                self.fail(f"{who} has the leases {leases} of group {uid!r}; written were {shadow.leases.get(uid, {})}")
        turns = {(uid, number): len(found.ledger.turns(uid, number)) for uid, number in found.ledger.sessions}
        written = {(uid, number): count for uid, sessions in shadow.turns.items() for number, count in sessions.items()}
        if turns != written:
            self.fail(f"{who} has turns {turns}; written were {written}")
        if found.ledger.records != shadow.records or found.ledger.counters != Counter(shadow.counters):
            back = f"records of steps {sorted(found.ledger.records)} and {dict(found.ledger.counters)}"
            self.fail(f"{who} has {back}; written were {sorted(shadow.records)} and {shadow.counters}")


def kept(disk: JournalDisk, *, has_values: bool) -> Saved:
    """What a journal of this disk would load. `has_values` False: without columns, for a store that has no row left."""
    saved = disk.saved.copy()
    for entry in disk.entries:
        saved.apply(entry if has_values else [op for op in entry if type(op) is not PutColumn])
    return saved
