"""Bugs in the way of a step: update, retire, publish, checkpoint, purge."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from asyncrl import trainer
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.simulation.edges.policy import SimPolicy
from asyncrl.simulation.errors import InjectedError
from asyncrl.trainer import Trainer
from tests.simulation.planted.bug import bug, replaced


@contextmanager
def failing_updates() -> Iterator[None]:
    """Some updates fail before they begin."""
    right = SimPolicy.update

    def update(self: Any, columns: Any, group_ids: Any, session_ids: Any, *, seed: int, shards: Any = ()) -> dict[str, float]:
        if int(self._world.now() * 1000) % 3 == 0:
            raise InjectedError("update")
        return right(self, columns, group_ids, session_ids, seed=seed, shards=shards)

    with replaced(SimPolicy, update=update):
        yield


@bug("a step that fails is retired", provoke=failing_updates)
def retired_though_failed() -> Iterator[None]:
    async def restore(self: Any, step: int) -> None:
        keys = self._batch(self._admission.recorded(step)).keys
        lease = self._queue._state.leases._steps[step].lease
        await self._queue.retire(keys, partition_id=self._partition_id, step=step, lease=lease)

    with replaced(ReplayBuffer, restore=restore):
        yield


@bug("a step that fails is called done: a checkpoint is made of it", provoke=failing_updates)
def failed_step_is_saved() -> Iterator[None]:
    right = Trainer.train_step

    async def train_step(self: Any, step: int) -> Any:
        try:
            return await right(self, step)
        except Exception:
            self.step, self._is_updating = step, False
            raise

    with replaced(Trainer, train_step=train_step):
        yield


@bug("a checkpoint is made before the update")
def saved_before_update() -> Iterator[None]:
    right = Trainer.train_step

    async def train_step(self: Any, step: int) -> Any:
        await self.save(step)
        return await right(self, step)

    with replaced(Trainer, train_step=train_step):
        yield


@bug("steps are purged up to the newest checkpoint")
def purged_by_the_newest() -> Iterator[None]:
    async def purge(self: Any) -> None:
        if self.kept:
            await self.queue.purge(self.kept[-1])

    with replaced(Trainer, _purge=purge):
        yield


@bug("a version is published before its step is retired")
def published_before_retired() -> Iterator[None]:
    right = Trainer.train_step

    async def train_step(self: Any, step: int) -> Any:
        retire = self.queue.retire

        async def late(*which: Any, **named: Any) -> None:
            await trainer.give_weights(step, self.actor, self.engine, self.run, self.world)
            await retire(*which, **named)

        self.queue.retire = late
        try:
            return await right(self, step)
        finally:
            del self.queue.retire

    with replaced(Trainer, train_step=train_step):
        yield


@bug("places are freed before the engines have the weights")
def places_freed_before_publication() -> Iterator[None]:
    right = Trainer.publish

    async def publish(self: Any, version: int) -> None:
        self.admission.publish(version)
        await right(self, version)

    with replaced(Trainer, publish=publish):
        yield


@bug("groups are admitted two versions ahead, and nobody asks how old a token is before it is trained on")
def stale_tokens() -> Iterator[None]:
    async def check_sample(*arguments: Any, **named: Any) -> None:
        return

    limitless = property(lambda self: self.num_alive + self.num_recorded + 1 <= 2 * self._limit)
    with replaced(Admission, has_place=limitless), replaced(trainer, check_sample=check_sample):
        yield


@bug("the engines are never given the new weights")
def weights_not_given() -> Iterator[None]:
    async def publish(self: Any, version: int) -> None:
        self.admission.publish(version)

    with replaced(Trainer, publish=publish):
        yield


@bug("balancing loses a row")
def balance_loses_a_row() -> Iterator[None]:
    right = Trainer._balance

    async def balance(self: Any, scope: Any) -> Any:
        whole = await right(self, scope)
        return replace(whole, batch=whole.batch.select(range(1, len(whole.batch))))

    with replaced(Trainer, _balance=balance):
        yield


@bug("balancing turns the rows round, and not their groups")
def groups_of_other_rows() -> Iterator[None]:
    right = SimPolicy.update

    def update(self: Any, columns: Any, group_ids: Any, session_ids: Any, *, seed: int, shards: Any = ()) -> Any:
        return right(self, columns, group_ids[::-1], session_ids, seed=seed, shards=shards)

    with replaced(SimPolicy, update=update):
        yield


@bug("an update is repeated on the same batch")
def trained_twice() -> Iterator[None]:
    right = SimPolicy.update

    def update(self: Any, columns: Any, group_ids: Any, session_ids: Any, *, seed: int, shards: Any = ()) -> Any:
        right(self, columns, group_ids, session_ids, seed=seed, shards=shards)
        return right(self, columns, group_ids, session_ids, seed=seed, shards=shards)

    with replaced(SimPolicy, update=update):
        yield
