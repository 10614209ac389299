"""Bugs in replay: admission, following, sampling, refilling."""

import asyncio
from collections.abc import Iterator
from typing import Any

from asyncrl.replay import Admission, ReplayBuffer, buffer
from asyncrl.replay.signal import Signal
from asyncrl.transfer_queue.watch import Watch
from tests.simulation.planted.bug import ASYNC, bug, replaced

# --- admission


@bug("a place is freed when a step is recorded, not when its version is published")
def place_freed_by_sample() -> Iterator[None]:
    with replaced(Admission, has_place=property(lambda self: self.num_alive + 1 <= self._limit)):
        yield


@bug("one group more than there are places is admitted")
def admission_off_by_one() -> Iterator[None]:
    with replaced(Admission, has_place=property(lambda self: self.num_alive + self.num_recorded <= self._limit)):
        yield


@bug("a dropped group is counted twice")
def double_count() -> Iterator[None]:
    right = Admission.drop

    def drop(self: Any, uid: str, reason: str) -> None:
        right(self, uid, reason)
        self._num_dropped[reason] += 1

    with replaced(Admission, drop=drop):
        yield


@bug("a dropped group stays alive")
def dropped_group_stays_alive() -> Iterator[None]:
    def drop(self: Any, uid: str, reason: str) -> None:
        self._num_dropped[reason] += 1
        self.changed.notify()

    with replaced(Admission, drop=drop):
        yield


@bug("who waits for a place looks once, and takes a turn before it waits")
def place_missed() -> Iterator[None]:
    async def wait_for_place(self: Any) -> None:
        while not self.has_place:
            await asyncio.sleep(0.1)
            await self.changed.wait()

    with replaced(Admission, wait_for_place=wait_for_place):
        yield


@bug("a publication wakes nobody")
def publication_wakes_nobody() -> Iterator[None]:
    right = Admission.publish

    def publish(self: Any, version: int) -> None:
        notify, self.changed.notify = self.changed.notify, lambda: None
        right(self, version)
        self.changed.notify = notify

    with replaced(Admission, publish=publish):
        yield


@bug("a notification wakes one waiter, not all")
def signal_wakes_one() -> Iterator[None]:
    def init(self: Any) -> None:
        self._waiters = []
        self._next = object()

    def notify(self: Any) -> None:
        self._next = object()
        if self._waiters:
            waiter = self._waiters.pop(0)
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self: Any) -> None:
        self._waiters.append(asyncio.get_running_loop().create_future())
        await self._waiters[-1]

    with replaced(Signal, __init__=init, notify=notify, wait=wait):
        yield


# --- following


@bug("a watch gives an older tag after a newer one, and a status follows whatever comes")
def status_not_monotone() -> Iterator[None]:
    right = Watch.__anext__

    async def following(self: Any) -> Any:
        older = self.__dict__.setdefault("older", [])
        if len(older) == 2:
            await asyncio.sleep(0)
            newer = older.pop()
            return {key: tag for key, tag in older.pop().items() if tag is not None and newer.get(key) is not None}
        older.append(await right(self))
        return older[-1]

    def follow(group: Any, seen: Any) -> None:
        group.status = seen

    with replaced(Watch, __anext__=following), replaced(buffer, follow=follow):
        yield


@bug("a failed group is replaced, and its keys stay in the store")
def dropped_but_not_cleared() -> Iterator[None]:
    async def refill(self: Any) -> None:
        for reason in set(self._leaving.values()):
            self._take_leaving(reason)

    with replaced(ReplayBuffer, _refill=refill):
        yield


@bug("a failed group is cleared, and its place stays taken")
def cleared_but_not_dropped() -> Iterator[None]:
    async def refill(self: Any) -> None:
        leaving, self._leaving = self._leaving, {}
        for uid in leaving:
            await self._queue.drop([uid], partition_id=self._partition_id, reason="failure")

    with replaced(ReplayBuffer, _refill=refill, _forget=lambda self, uid: self._groups.pop(uid, None)):
        yield


@bug("a group is dropped as soon as one of its sessions has failed")
def cleared_before_settled() -> Iterator[None]:
    right = ReplayBuffer._refill

    async def refill(self: Any) -> None:
        await right(self)
        for uid, leases in list(self._queue._state.leases._groups.items()):
            settled = [number for number, one in leases.sessions.items() if not one.is_open]
            group = self._groups.get(uid)
            if group is not None and self._admission.is_alive(uid) and len(settled) > len(group.sessions):
                self._groups.pop(uid)
                self._admission.drop(uid, "failure")
                await self._queue.drop([uid], partition_id=self._partition_id, reason="failure")

    with replaced(ReplayBuffer, _refill=refill):
        yield


# --- sampling


@bug("a batch is in the order in which its groups finished")
def finish_order() -> Iterator[None]:
    right = ReplayBuffer._batch

    def batch(self: Any, uids: Any) -> Any:
        rows = self._queue._state.partition(self._partition_id).rows
        last = {uid: max(rows[key].row_id for key in self._groups[uid].trajectories) for uid in uids}
        return right(self, sorted(uids, key=last.__getitem__))

    with replaced(ReplayBuffer, _batch=batch):
        yield


@bug("who waits for a batch does not look again when it is woken")
def sample_without_second_look() -> Iterator[None]:
    async def wait_for_groups(self: Any, batch_size: int) -> Any:
        head = self._admission.alive[:batch_size]
        if len(head) < batch_size or not all(self._is_ready(uid) for uid in head):
            await self._admission.changed.wait()
        return self._admission.alive[:batch_size]

    right = ReplayBuffer._batch

    def batch(self: Any, uids: Any) -> Any:
        return right(self, [uid for uid in uids if uid in self._groups])

    with replaced(ReplayBuffer, _wait_for_groups=wait_for_groups, _batch=batch):
        yield


@bug("a batch leaves out the last trajectory")
def last_trajectory_left_out() -> Iterator[None]:
    right = ReplayBuffer._batch

    def batch(self: Any, uids: Any) -> Any:
        whole = right(self, uids)
        return whole.select(range(len(whole) - 1))

    with replaced(ReplayBuffer, _batch=batch):
        yield


@bug("a batch is not recorded in the store")
def step_not_recorded() -> Iterator[None]:
    async def sample(self: Any, step: int, batch_size: int) -> Any:
        uids = await self._wait_for_groups(batch_size)
        self._admission.record(step, uids)
        return self._batch(uids)

    with replaced(ReplayBuffer, sample=sample):
        yield


@bug("a batch waits only for groups that are due, and takes whatever is ready beside them", changes=ASYNC)
def waits_only_for_due_groups() -> Iterator[None]:
    async def wait_for_groups(self: Any, batch_size: int) -> Any:
        while True:
            self._raise_if_broken()
            admission = self._admission
            oldest = admission.version - admission.max_staleness
            tags = self._queue._state.tags(self._partition_id)
            due = [uid for uid in admission.alive if int(tags[uid]["global_steps"]) <= oldest]
            ready = [uid for uid in admission.alive if self._is_ready(uid)]
            if len(ready) >= batch_size and set(due[:batch_size]) <= set(ready):
                chosen = {*due[:batch_size], *ready[: batch_size - len(due[:batch_size])]}
                if len(chosen) == batch_size:
                    return tuple(uid for uid in admission.alive if uid in chosen)
            await admission.changed.wait()

    with replaced(ReplayBuffer, _wait_for_groups=wait_for_groups):
        yield
