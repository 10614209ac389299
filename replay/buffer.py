"""ReplayBuffer: groups in admission order, served as whole batches.

TransferQueue -> kv_watch -> [ReplayBuffer] -> sample -> stages

`run` follows the tags of a partition in the background; `sample` waits for it. Order is admission's, never the order in which
groups finish: the make-up of every batch is a function of admissions and drops. It owns no key and no value. Invariants:
1. A batch is the first `batch_size` alive groups in admission order, all terminal, with all their trajectories.
2. A group that is not trained on (`verdicts.py`) is dropped and counted as soon as it is seen; its place is free.
3. What `run` raises, `sample` raises: a dead watch is never a silent wait.
4. A step keeps its groups: after `restore`, a restart, or a sample that was cut short, the same step samples the same keys.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from asyncrl.config import ReplayConfig
from asyncrl.errors import (
    AdmissionError,
    DeadlineError,
    GroupFailedError,
    GroupsExhaustedError,
    PoisonedStepError,
    ReplayError,
    StalledError,
    TooManyFailuresError,
    TransitionError,
)
from asyncrl.fields import Tag
from asyncrl.keys import TRAIN, TrajectoryKey
from asyncrl.ports import GroupStatus, Report, World, ignore_incident
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.replay.admission import Admission
from asyncrl.replay.groups import PromptGroup, follow
from asyncrl.replay.verdicts import Verdicts
from asyncrl.transfer_queue import TransferQueue
from asyncrl.waiting import no_stray_cancel, within

_NAMED_GROUPS = 16
"""Groups named by a deadline's message at most: enough to see the pattern, short enough to read."""


class ReplayBuffer:
    """Groups of one partition. `run` must run in a task beside `sample`.

    group_size: sessions a group; max_tries: of a step, before it is said to be poisonous; describe: what the sessions of a group
    are doing, by its uid, for a report of a run that stands.
    """

    def __init__(
        self,
        queue: TransferQueue,
        admission: Admission,
        *,
        group_size: int,
        config: ReplayConfig,
        world: World,
        filter_groups: bool = False,
        partition_id: str = TRAIN,
        max_tries: int = 5,
        report: Report = ignore_incident,
        describe: Callable[[str], str] = lambda uid: "",
    ) -> None:
        self._queue = queue
        self._admission = admission
        self._group_size = group_size
        self._config = config
        self._world = world
        self._partition_id = partition_id
        self._max_tries = max_tries
        self._describe_sessions = describe
        self._verdicts = Verdicts(config, group_size=group_size, filter_groups=filter_groups, report=report)
        self._groups: dict[str, PromptGroup] = {}
        self._gone: dict[str, None] = {}  # dropped here, and not yet seen to be gone from the store: what is told of them is old
        self._leaving: dict[str, str] = {}  # terminal, to be dropped for this reason, and not yet dropped
        self._is_feed_closed = False
        self._broken: BaseException | None = None

    # --- follow

    async def run(self) -> None:
        """Follow the partition until cancelled; whatever ends it is raised by `sample` too."""
        try:
            with no_stray_cancel("replay"):
                async for changes in self._queue.kv_watch(self._partition_id):
                    await self._world.site("replay.changes")  # what changes meanwhile comes with the next set
                    self._apply(changes)
                    self._admission.changed.notify()
                    await self._refill()
        except BaseException as error:
            self._break(error)
            raise
        self._break(ReplayError("the TransferQueue was closed"))

    def _apply(self, changes: Mapping[str, Tag | None]) -> None:
        """Rows first, then prompts: a coalesced set may show a terminal prompt beside the rows that were written before it.

        A set may come late, or twice.
        """
        if self._gone:
            changes = self._without_old(changes)
        prompts = {
            key: tag for key, tag in changes.items() if key in self._groups or (tag is not None and tag.get("is_prompt", False))
        }
        for key, tag in changes.items():
            if key not in prompts:
                self._apply_trajectory(key, tag)
        for uid, tag in prompts.items():
            if tag is None:
                self._forget(uid)
            else:
                self._apply_prompt(uid, tag)

    def _without_old(self, changes: Mapping[str, Tag | None]) -> Mapping[str, Tag | None]:
        """The changes of groups that were not dropped here; those whose prompt is gone are forgotten."""
        news = {key: tag for key, tag in changes.items() if not self._is_old(key, tag)}
        for uid in [uid for uid in self._gone if uid in changes and changes[uid] is None]:
            del self._gone[uid]
        return news

    def _is_old(self, key: str, tag: Tag | None) -> bool:
        if key in self._gone:
            return True
        is_prompt = key in self._groups or (tag is not None and tag.get("is_prompt", False))
        return not is_prompt and key.rsplit("_", 2)[0] in self._gone

    def _apply_trajectory(self, key: str, tag: Tag | None) -> None:
        if tag is not None:
            self._group(TrajectoryKey.parse(key).uid).trajectories[key] = tag
            return
        group = self._groups.get(key.rsplit("_", 2)[0])  # no group: it was forgotten before its rows
        if group is not None:
            group.trajectories.pop(key, None)

    def _apply_prompt(self, uid: str, tag: Tag) -> None:
        group = self._group(uid)
        before = group.status
        group.row = int(tag.get("row", -1))
        follow(group, _status_of(uid, tag))
        if group.status is before or not group.status.is_terminal:
            return
        if group.status is GroupStatus.FAILURE:
            group.failure = str(tag.get("failure", "no reason was given"))
        if self._admission.is_alive(uid) and (reason := self._verdicts.of(group)) is not None:
            self._leaving[uid] = reason

    def _group(self, uid: str) -> PromptGroup:
        group = self._groups.get(uid)
        if group is None:
            if not self._admission.is_open(uid):
                raise AdmissionError(
                    f"group {uid!r} is in partition {self._partition_id!r} but was not admitted, or was dropped before"
                )
            group = self._groups[uid] = PromptGroup(uid=uid, since=self._world.now())
        return group

    def _forget(self, uid: str) -> None:
        """The prompt is gone: retired after its step, or cleared. One that somebody else cleared while it was alive is dropped."""
        del self._groups[uid]
        if self._admission.is_alive(uid):
            self._admission.drop(uid, "cleared")

    def _drop_known(self, uid: str) -> None:
        if self._groups.pop(uid, None) is not None:
            self._gone[uid] = None

    async def _refill(self) -> None:
        """Groups that are not trained on make room for new ones. First the counts, then the clearing, so that no sample sees one of
        them again; with no await in between, so that nothing is admitted in its place that a crash would find beside it."""
        if not self._leaving:
            return
        await self._world.site("replay.refill")  # they are alive and no batch may have them: their places may be free later
        failed: list[PromptGroup] = []
        for reason in dict.fromkeys(self._leaving.values()):
            groups = self._take_leaving(reason)
            failed += groups if reason == "failure" else []
            if self._broken is None and (enough := self._verdicts.had_enough()) is not None:
                self._break(enough)
            if groups:
                await self._queue.drop([group.uid for group in groups], partition_id=self._partition_id, reason=reason)
        self._verdicts.tell(failed, self._queue.failures_of)

    def _take_leaving(self, reason: str) -> list[PromptGroup]:
        """The groups that leave for this reason, which are forgotten here; those that are gone already count for nothing."""
        uids = [uid for uid, its in self._leaving.items() if its == reason]
        groups = [group for uid in uids if (group := self._groups.get(uid)) is not None]
        for uid in uids:
            del self._leaving[uid]
            self._drop_known(uid)
            if self._admission.is_alive(uid):
                self._admission.drop(uid, reason)
        return groups

    def _break(self, reason: BaseException) -> None:
        """`sample` will raise it, a long step later perhaps: what would fail until then has no place, and costs no row its turn."""
        self._broken = reason
        self._admission.close()
        self._admission.changed.notify()

    # --- sample

    async def sample(self, step: int, batch_size: int) -> KVBatchMeta:
        """Keys and tags of step `step`: whole groups in admission order, their trajectories by session and index.

        A step that has a record takes its keys from there: one that failed, or that a restart repeats. Any other waits until the
        first `batch_size` alive groups are all terminal, and records them, in admission and in the store, before it returns.
        Raises StalledError after replay.sample_timeout_s, naming the groups and what their sessions do; GroupsExhaustedError when
        the feed is closed and too few groups are left; AdmissionError for a step out of order; PoisonedStepError for one that was
        begun too often; GroupFailedError; TooManyFailuresError; and ReplayError when `run` has ended.
        """
        started = self._world.now()
        try:
            async with within(self._config.sample_timeout_s, partial(self._waiting_text, step, batch_size, started)):
                uids = await self._recorded(step) if self._is_recorded(step) else await self._wait_for_groups(batch_size)
        except DeadlineError as error:
            raise StalledError(str(error)) from error
        batch = self._batch(uids)
        held = self._queue.recorded(step)
        self._check_tries(step, batch, held.tries if held is not None else 0)
        # The store acts at once, and none of these groups can go from then on: who is cut short in this wait samples them again.
        await self._queue.record(step, batch.keys, partition_id=self._partition_id)
        if step > self._admission.last_step:
            self._admission.record(step, uids)
        else:
            self._admission.take_again(step)
        return batch

    def _is_recorded(self, step: int) -> bool:
        """Is it a step that is taken again? Raises AdmissionError for one that is not the next."""
        restored = self._admission.restored
        if restored is None:
            self._check_order(step)
        elif step != restored:
            raise AdmissionError(f"step {step} cannot be sampled: step {restored} was restored and comes first")
        return restored is not None

    async def _recorded(self, step: int) -> tuple[str, ...]:
        """The groups of a record, once the watch has told of them: at a restart it has not yet."""
        uids = self._admission.recorded(step) or ()
        while any((group := self._groups.get(uid)) is None or not group.status.is_terminal for uid in uids):
            self._raise_if_broken()
            await self._admission.changed.wait()  # bounded by the sample's deadline
        return uids

    def _check_tries(self, step: int, batch: KVBatchMeta, tries: int) -> None:
        """Before one more is counted: a step that is refused has not begun."""
        if tries >= self._max_tries:
            raise PoisonedStepError(
                f"step {step} was begun {tries} times and never came to its end (trainer.max_step_tries = {self._max_tries}): "
                "something in its batch may end the process; raise the key to try again; "
                f"its {len(batch.keys)} keys: {', '.join(batch.keys)}"
            )

    def _check_order(self, step: int) -> None:
        if step != self._admission.last_step + 1:
            raise AdmissionError(
                f"step {step} cannot be sampled after step {self._admission.last_step}: steps go in order, and a failed one is "
                "restored before it is sampled again"
            )

    async def _wait_for_groups(self, batch_size: int) -> tuple[str, ...]:
        """Returns without an await after the check, so the groups are still those when the store records them.

        A change of any group wakes it up: while the first one that it waits for is what it was, nothing else is looked at.
        """
        waited_for: str | None = None
        while True:
            self._raise_if_broken()
            if waited_for is None or self._is_ready(waited_for) or not self._admission.is_alive(waited_for):
                head = self._admission.first_alive(batch_size)
                waited_for = next((uid for uid in head if not self._is_ready(uid)), None)
                if waited_for is None and len(head) == batch_size:
                    return head
                if waited_for is None and self._is_feed_closed:
                    await self._drop_rest(head, batch_size)
            await self._admission.changed.wait()

    async def _drop_rest(self, uids: tuple[str, ...], batch_size: int) -> None:
        """The feed has ended and these groups cannot fill a batch."""
        for uid in uids:
            self._admission.drop(uid, "feed_end")
            self._drop_known(uid)
        await self._queue.drop(uids, partition_id=self._partition_id, reason="feed_end")
        raise GroupsExhaustedError(f"the feed ended with {len(uids)} groups left, a batch needs {batch_size}; they were dropped")

    def _is_ready(self, uid: str) -> bool:
        """Terminal, and to be trained on."""
        group = self._groups.get(uid)
        return group is not None and group.status.is_terminal and uid not in self._leaving

    def _raise_if_broken(self) -> None:
        if isinstance(self._broken, (TooManyFailuresError, GroupFailedError)):
            raise self._broken
        if self._broken is not None:
            why = str(self._broken) or type(self._broken).__name__
            raise ReplayError(f"replay no longer follows partition {self._partition_id!r}: {why}") from self._broken

    def _waiting_text(self, step: int, batch_size: int, started: float) -> str:
        waited_s = self._world.now() - started
        head = self._admission.first_alive(batch_size)
        waiting = [uid for uid in head if not self._is_ready(uid)]
        text = f"step {step} waited {waited_s:.1f} s (replay.sample_timeout_s) for {len(waiting)} of its {batch_size} groups"
        if waiting:
            text += ": " + "; ".join(self._describe(uid) for uid in waiting[:_NAMED_GROUPS])
        if len(waiting) > _NAMED_GROUPS:
            text += f"; and {len(waiting) - _NAMED_GROUPS} more"
        if len(head) < batch_size:
            text += f"; only {len(head)} groups are admitted, and the feed is {'closed' if self._is_feed_closed else 'open'}"
        return text

    def _describe(self, uid: str) -> str:
        group = self._groups.get(uid)
        if group is None:
            return f"{uid} admitted, not in the store yet"
        age_s = self._world.now() - group.since
        told = f"{uid} {group.status}, {len(group.sessions)} of {self._group_size} sessions done, for {age_s:.1f} s"
        sessions = self._describe_sessions(uid)
        return f"{told} ({sessions})" if sessions else told

    def _batch(self, uids: Iterable[str]) -> KVBatchMeta:
        rows = [(key, self._groups[uid].trajectories[key]) for uid in uids for key in self._groups[uid].keys]
        return KVBatchMeta(partition_id=self._partition_id, keys=tuple(key for key, _ in rows), tags=tuple(tag for _, tag in rows))

    # --- after sample

    async def restore(self, step: int) -> None:
        """Step `step` failed: its rows are as their sessions left them, and sampling the step again gives the same keys.

        Raises AdmissionError when the step is not under way, ReplayError or UnknownKeyError when its rows are already retired.
        """
        uids = self._admission.recorded(step)
        if uids is None:
            raise AdmissionError(f"step {step} cannot be restored: it is not under way")
        gone = [uid for uid in uids if uid not in self._groups]
        if gone:
            raise ReplayError(f"step {step} cannot be restored: groups {gone} were retired or cleared")
        self._admission.restore(step)
        await self._queue.revive(self._batch(uids).keys, partition_id=self._partition_id, step=step)

    def close_feed(self) -> None:
        """No group will be admitted any more."""
        self._is_feed_closed = True
        self._admission.changed.notify()

    def stats(self) -> dict[str, float]:
        """`partial`: failed groups that were trained on without the sessions that failed; `quarantined_rows`: of the dataset."""
        limit = self._config.quarantine_after
        quarantined = sum(number >= limit for number in self._queue.failed_rows().values()) if limit else 0
        return {"partial": float(self._verdicts.num_partial), "quarantined_rows": float(quarantined)}

    def counts(self) -> dict[str, int]:
        """pending, running, finished: groups alive now (admitted, not sampled); failure: groups that failed since the start."""
        alive = [self._groups.get(uid) for uid in self._admission.alive]
        found = Counter(GroupStatus.PENDING if group is None else group.status for group in alive)
        waiting = (GroupStatus.PENDING, GroupStatus.RUNNING, GroupStatus.FINISHED)
        return {**{str(status): found[status] for status in waiting}, str(GroupStatus.FAILURE): self._verdicts.num_failures}


def _status_of(uid: str, tag: Tag) -> GroupStatus:
    try:
        return GroupStatus(str(tag["status"]))
    except (KeyError, ValueError):
        raise TransitionError(
            f"group {uid!r} has the tag {dict(tag)}; its status must be one of {[str(s) for s in GroupStatus]}"
        ) from None
