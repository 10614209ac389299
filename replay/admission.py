"""Admission: how many groups may be under way. The staleness bound is kept here and nowhere else.

feed -> [Admission] -> runner ... ReplayBuffer -> record -> trainer -> publish

The rule: a group is admitted only if afterwards

    alive + groups recorded since the published version <= (max_staleness + 1) x batch_size x updates

alive: admitted, neither recorded nor dropped. With max_staleness = 0 this is the synchronous trainer: nothing is admitted before
the version that trained the last batch is published. And no more groups are alive than the steps that are left will take, so that
a run ends with none. Invariants:
1. A place is freed by a publication or a drop, never by a record or a retirement.
2. Admission order never changes; a drop only moves later groups forward.
3. Conservation: admitted = trained + dropped + open, where open = alive + recorded.
4. Steps are recorded in order, each once, and keep their groups until they are published.
5. A step that failed and was not taken again is not trained: it holds up every publication. After a restart that is every recorded
   step that the loaded weights have not seen.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from asyncrl.errors import AdmissionError
from asyncrl.replay.signal import Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a restart finds of the groups. alive: uids in admission order; records: uids of each recorded step after the loaded
    weights; counts of groups: admitted, trained by the loaded weights, dropped by reason."""

    alive: tuple[str, ...] = ()
    records: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    num_admitted: int = 0
    num_trained: int = 0
    num_dropped: Mapping[str, int] = field(default_factory=dict)


class Admission:
    """The groups of one run between admission and publication.

    batch_size: groups a step samples; updates: steps between two publications; max_staleness: versions a token may be behind;
    version: the published version at the start (a resumed run: step / updates); total_steps: of the run (None: it does not end by
    itself); found: by a restart.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        updates: int = 1,
        max_staleness: int = 0,
        version: int = 0,
        total_steps: int | None = None,
        found: Found | None = None,
    ) -> None:
        found = found or Found()
        self.max_staleness = max_staleness
        """Versions that a token may be behind the weights that train on it: what the rule below keeps, and a check can ask for."""
        self._batch_size = batch_size
        self._updates = updates
        self._total_steps = total_steps
        self._limit = (max_staleness + 1) * batch_size * updates
        self._version = version
        self._last_step = max(found.records, default=version * updates)
        self._alive: dict[str, None] = dict.fromkeys(found.alive)
        self._records: dict[int, tuple[str, ...]] = dict(found.records)
        self._recorded: set[str] = {uid for uids in found.records.values() for uid in uids}
        self._restored: set[int] = set(found.records)
        self._num_admitted = found.num_admitted
        self._num_trained = found.num_trained
        self._num_dropped: Counter[str] = Counter(found.num_dropped)
        self._is_closed = False
        self.changed = Signal()
        """Notified at every admission, drop, record and publication."""

    # --- sight

    @property
    def alive(self) -> tuple[str, ...]:
        """uids in admission order, neither recorded nor dropped."""
        return tuple(self._alive)

    def first_alive(self, number: int) -> tuple[str, ...]:
        """The first `number` of `alive`, or all."""
        return tuple(islice(self._alive, number))

    @property
    def num_alive(self) -> int:
        return len(self._alive)

    @property
    def num_recorded(self) -> int:
        """Groups of the steps recorded since the published version."""
        return len(self._recorded)

    @property
    def version(self) -> int:
        """The published weight version."""
        return self._version

    @property
    def last_step(self) -> int:
        """The last recorded step."""
        return self._last_step

    @property
    def has_place(self) -> bool:
        return not self._is_closed and self.num_alive + self.num_recorded + 1 <= self._limit and self._is_wanted

    @property
    def _is_wanted(self) -> bool:
        """Will a step that is left take one more group?"""
        return self._total_steps is None or self.num_alive + 1 <= (self._total_steps - self._last_step) * self._batch_size

    def is_alive(self, uid: str) -> bool:
        return uid in self._alive

    def is_open(self, uid: str) -> bool:
        """Alive, or of a step that is not published yet."""
        return uid in self._alive or uid in self._recorded

    def recorded(self, step: int) -> tuple[str, ...] | None:
        """uids of a recorded step in admission order; None when it is not recorded or already published."""
        return self._records.get(step)

    @property
    def restored(self) -> int | None:
        """The first step that failed and was not taken again."""
        return min(self._restored, default=None)

    def counters(self) -> dict[str, int]:
        """admitted, trained, open, dropped, and dropped/<reason> for each reason."""
        return {
            "admitted": self._num_admitted,
            "trained": self._num_trained,
            "open": self.num_alive + self.num_recorded,
            "dropped": self._num_dropped.total(),
            **{f"dropped/{reason}": count for reason, count in sorted(self._num_dropped.items())},
        }

    def summary(self) -> str:
        """The law of conservation with its numbers, for a person."""
        count = self.counters()
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(self._num_dropped.items()) if number)
        dropped = f"dropped {count['dropped']}{f' ({reasons})' if reasons else ''}"
        return f"groups: admitted {count['admitted']} = trained {count['trained']} + {dropped} + open {count['open']}"

    def check_conservation(self) -> None:
        """Raises AdmissionError with the numbers unless every admitted group is trained, dropped or open."""
        count = self.counters()
        if count["admitted"] != count["trained"] + count["dropped"] + count["open"]:
            raise AdmissionError(
                f"groups are lost: admitted {count['admitted']} != "
                f"trained {count['trained']} + dropped {count['dropped']} + open {count['open']}"
            )

    # --- act

    def admit(self, uid: str) -> None:
        """Raises AdmissionError when there is no place, or when the group is already open."""
        if self.is_open(uid):
            raise AdmissionError(f"group {uid!r} is already admitted")
        if not self.has_place:
            raise AdmissionError(
                f"no place for group {uid!r}: {self.num_alive} alive and {self.num_recorded} recorded since version "
                f"{self._version}, {self._limit} allowed, {self._total_steps} steps in all; wait for wait_for_place()"
            )
        self._alive[uid] = None
        self._num_admitted += 1
        self.changed.notify()

    def close(self) -> None:
        """No group is admitted any more: the run is at its end."""
        self._is_closed = True

    def drop(self, uid: str, reason: str) -> None:
        """Decide not to train a group; frees its place. Raises AdmissionError unless it is alive."""
        if uid not in self._alive:
            raise AdmissionError(f"group {uid!r} cannot be dropped ({reason}): it is not alive")
        del self._alive[uid]
        self._num_dropped[reason] += 1
        self.changed.notify()

    def record(self, step: int, uids: Iterable[str]) -> None:
        """Step `step` trains on these groups. Frees no place. Raises AdmissionError for a step out of order or a dead group."""
        chosen = tuple(uids)
        if step != self._last_step + 1:
            raise AdmissionError(
                f"step {step} cannot be recorded after step {self._last_step}: steps are recorded in order, each once"
            )
        strange = [uid for uid in chosen if uid not in self._alive]
        if strange or len(set(chosen)) != len(chosen):
            raise AdmissionError(f"step {step} cannot be recorded: {strange or chosen} are not alive, or not distinct")
        for uid in chosen:
            del self._alive[uid]
        self._records[step] = chosen
        self._recorded.update(chosen)
        self._last_step = step
        self.changed.notify()

    def restore(self, step: int) -> None:
        """Step `step` failed; it keeps its groups and their places. Raises AdmissionError unless it is under way."""
        if step not in self._records or step in self._restored:
            raise AdmissionError(f"step {step} cannot be restored: it is not under way")
        self._restored.add(step)

    def take_again(self, step: int) -> tuple[str, ...]:
        """The groups of a restored step, which is under way again. Raises AdmissionError for any other step."""
        if step not in self._restored:
            raise AdmissionError(f"step {step} cannot be taken again: it was not restored")
        self._restored.remove(step)
        return self._records[step]

    def publish(self, version: int) -> None:
        """The engines sample from weights `version` now: the places of the steps that made it are free.

        The version already published changes nothing. Raises AdmissionError for an older one, or one whose steps are missing or
        were restored and not taken again.
        """
        if self.restored is not None and self.restored <= version * self._updates:
            raise AdmissionError(
                f"version {version} cannot be published: step {self.restored} failed and was not trained; sample it again"
            )
        if version < self._version or version * self._updates > self._last_step:
            raise AdmissionError(
                f"version {version} cannot be published after version {self._version} and step {self._last_step} "
                f"with {self._updates} step(s) a version"
            )
        for step in [step for step in self._records if step <= version * self._updates]:
            trained = self._records.pop(step)
            self._recorded.difference_update(trained)
            self._num_trained += len(trained)
        self._version = version
        self.changed.notify()

    async def wait_for_place(self) -> None:
        """Until a group may be admitted. Bounded by the steps: places come with them, and one that waits too long ends the run."""
        while not self.has_place:
            await self.changed.wait()
