"""Bugs of restarts, checkpoints, publication and evaluation: one for each promise of docs/proofs that a run can break."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from asyncrl import recovery, trainer, wiring
from asyncrl.agents import resuming, runner
from asyncrl.agents.runner import GroupRunner
from asyncrl.evaluations import Evaluations
from asyncrl.feed import Feed
from asyncrl.journal.entries import Saved
from asyncrl.replay import ReplayBuffer
from asyncrl.rollout.turn_gate import TurnGate
from asyncrl.simulation.machine import Machine
from asyncrl.trainer import Trainer
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.leases import Leases
from asyncrl.transfer_queue.ledger import Ledger
from tests.simulation.planted.bug import ASYNC, bug, replaced

SPARSE = (*ASYNC, "trainer.save_freq=2", "trainer.total_training_steps=6")
"""Steps between the checkpoints, so that a restart has some to repeat."""
WIDE = (*ASYNC, "trainer.publish_freq=2", "trainer.save_freq=2", "trainer.total_training_steps=6")
"""Versions of two steps."""
MEASURED = (*ASYNC, "sim.prompts.val_count=2", "trainer.test_freq=1")
"""With evaluations between the steps."""
BESIDE = (*MEASURED, "eval.where=snapshot", "sim.engine.decode_step_s=0.1")
"""With evaluations beside the steps, which they outlast."""
GATED = (*ASYNC, "rollout.in_flight_updates=false", "rollout.publish_timeout_s=2", "sim.times.restart_s=1")
"""Calls end under the weights that they began with."""


DAMAGED = ("sim.faults.checkpoint_damage=1", "sim.faults.sigterm=1", "trainer.save_freq=3", "trainer.total_training_steps=8")
"""Checkpoints that a stop has left where no other one will be made."""
SLOW_UPDATES = ("sim.training.update_call_s=5", "sim.training.stage_s=1")
"""So that most crashes come in the middle of a step."""


# --- what is kept, and what it is kept for


@bug("a checkpoint has the feed's cursor, and a restart takes it from there", changes=SPARSE)
def cursor_in_the_checkpoint() -> Iterator[None]:
    cursors: dict[int, int] = {}
    save, feed = Trainer._save, wiring._feed

    async def saved(self: Any) -> None:
        cursors[self.step] = self.feed.cursor
        await save(self)

    def fed(run: Any, edges: Any) -> Feed:
        made = feed(run, edges)
        made._cursor = cursors.get(edges.queue.weights_step, 0)
        return made

    with replaced(Trainer, _save=saved), replaced(wiring, _feed=fed):
        yield


@bug("a step is recorded after its update", changes=SPARSE)
def record_after_update() -> Iterator[None]:
    record, retire = TransferQueue.record, TransferQueue.retire

    async def late(self: Any, step: int, keys: Any, *, partition_id: str) -> int:
        return 1

    async def recorded(self: Any, keys: Any, *, partition_id: str, step: int, lease: Any) -> None:
        await record(self, step, keys, partition_id=partition_id)
        await retire(self, keys, partition_id=partition_id, step=step, lease=lease)

    with replaced(TransferQueue, record=late, retire=recorded):
        yield


@bug("a checkpoint is DONE before the journal is synced")
def checkpoint_before_the_sync() -> Iterator[None]:
    async def sync(self: Any) -> None:
        return

    with replaced(TransferQueue, sync=sync):
        yield


@bug("a checkpoint falls inside a version", changes=WIDE)
def checkpoint_inside_a_version() -> Iterator[None]:
    right = Trainer.train_step

    async def train_step(self: Any, step: int) -> Any:
        batch = await right(self, step)
        self.kept = await self.save(step)
        return batch

    with replaced(Trainer, train_step=train_step):
        yield


@bug("a damaged checkpoint is counted as kept", changes=DAMAGED)
def damaged_checkpoint_counts() -> Iterator[None]:
    with replaced(Machine, delete_damaged=lambda self: None):
        yield


@bug("a restart goes on with the weights, and forgets to publish their version", changes=SPARSE)
def loaded_weights_not_published() -> Iterator[None]:
    async def give_weights(version: int, *rest: Any) -> None:
        return

    with replaced(wiring, give_weights=give_weights):
        yield


# --- repeated steps


@bug("sessions go on before the recorded steps are repeated", changes=SPARSE)
def generation_before_the_repeated_steps() -> Iterator[None]:
    with replaced(Trainer, _open_generation=lambda self: self._caught_up.set()):
        yield


@bug("generation begins when the last recorded step is sampled, not when it is done", changes=SPARSE)
def generation_one_step_early() -> Iterator[None]:
    def early(self: Trainer) -> None:
        if self.step >= self._recorded - 1:
            self._caught_up.set()

    with replaced(Trainer, _open_generation=early):
        yield


@bug("a restart takes what is recorded for alive, and a repeated step takes what comes first", changes=SPARSE)
def records_forgotten_at_restart() -> Iterator[None]:
    right = recovery.found_groups

    def found_groups(queue: Any, *, step: int) -> Any:
        found = right(queue, step=step)
        again = tuple(uid for uids in found.records.values() for uid in uids)
        return replace(found, alive=(*found.alive, *again), records={})

    with replaced(wiring, found_groups=found_groups):
        yield


@bug("the rows of every recorded step are hidden at a restart, whatever the weights have seen", changes=SPARSE)
def recorded_rows_stay_hidden() -> Iterator[None]:
    right = Saved.hidden

    with replaced(Saved, hidden=lambda self, weights_step: right(self, max(self.records, default=0))):
        yield


@bug("no row is hidden at a restart: what the weights have learned is there again", changes=SPARSE)
def learned_rows_come_back() -> Iterator[None]:
    with replaced(Saved, hidden=lambda self, weights_step: set()):
        yield


@bug("the tries of a step are not counted")
def tries_not_counted() -> Iterator[None]:
    with replaced(Ledger, begin_again=lambda self, step: self._tried(step, 1)):
        yield


@bug("the tries of a step are not begun anew when it is done", changes=SPARSE)
def tries_never_reset() -> Iterator[None]:
    def retire(self: Any, step: int) -> Any:
        self.weights_step = step
        return self._tried(step, self.records[step].tries)

    with replaced(Ledger, retire=retire):
        yield


@bug("a step that was tried too often is tried again", changes=(*SPARSE, "trainer.max_step_tries=1", *SLOW_UPDATES))
def poisoned_step_is_tried() -> Iterator[None]:
    with replaced(ReplayBuffer, _check_tries=lambda self, step, batch, tries: None):
        yield


# --- sessions under way


@bug("a restart opens a new attempt of every session under way", changes=SPARSE)
def restart_opens_attempts() -> Iterator[None]:
    right = Leases.reopen_group

    def reopen_group(self: Any, lease: Any) -> Any:
        sessions = right(self, lease)
        raised = [replace(one, attempt=one.attempt + 1) for one in sessions]
        for one in raised:
            self._groups[lease.uid].sessions[one.session_id].lease = one
        return raised

    with replaced(Leases, reopen_group=reopen_group):
        yield


@bug("a restart opens the sessions that had settled, too", changes=SPARSE)
def restart_opens_settled_sessions() -> Iterator[None]:
    right = Leases.reopen_group

    def reopen_group(self: Any, lease: Any) -> Any:
        for one in self._groups[lease.uid].sessions.values():
            one.is_open = True
        return right(self, lease)

    with replaced(Leases, reopen_group=reopen_group):
        yield


@bug("a session begins again at turn 0 after a restart, and its turns are still kept", changes=SPARSE)
def turns_forgotten_at_restart() -> Iterator[None]:
    async def kv_turns(self: Any, uid: str, session_id: int) -> Any:
        return []

    with replaced(TransferQueue, kv_turns=kv_turns), replaced(Ledger, check_turn=lambda *which: None):
        yield


@bug("a session goes on after a restart without the last turn that was kept", changes=SPARSE)
def last_turn_forgotten_at_restart() -> Iterator[None]:
    with replaced(runner, kept_turns=lambda turns: tuple(map(resuming._kept_turn, turns[:-1]))):
        yield


@bug("tokens that were kept have the version of the restart", changes=SPARSE)
def versions_restamped_at_restart() -> Iterator[None]:
    right = resuming._kept_turn

    def kept_turn(turn: Any) -> Any:
        kept = right(turn)
        return replace(kept, versions=[number + 1 if number >= 0 else number for number in kept.versions])

    with replaced(resuming, _kept_turn=kept_turn):
        yield


@bug("the last group that a restart finds half done is left alone", changes=SPARSE)
def group_not_resumed() -> Iterator[None]:
    right = Trainer.admit

    async def admit(self: Any) -> None:
        self.open = self.open[:-1]
        await right(self)

    with replaced(Trainer, admit=admit):
        yield


@bug("why a session has failed is forgotten at a restart", changes=(*SPARSE, "agent.max_attempts=1", "rollout.n=4"))
def failure_forgotten_at_restart() -> Iterator[None]:
    right = GroupRunner.resume

    def resume(self: Any, prompt: Any, found: Any) -> None:
        tag = {name: value for name, value in found.tag.items() if name != "failure"}
        right(self, prompt, replace(found, tag=tag))

    with replaced(GroupRunner, resume=resume):
        yield


@bug("what was dropped before a restart is not counted after it", changes=SPARSE)
def drops_forgotten_at_restart() -> Iterator[None]:
    right = recovery.found_groups

    def found_groups(queue: Any, *, step: int) -> Any:
        return replace(right(queue, step=step), num_dropped={})

    with replaced(wiring, found_groups=found_groups):
        yield


# --- publication


@bug("a place is freed when its step is retired, not when its version is published", changes=WIDE)
def place_freed_by_retire() -> Iterator[None]:
    right = Trainer.train_step

    async def train_step(self: Any, step: int) -> Any:
        batch = await right(self, step)
        self.admission._recorded.difference_update(batch.groups)
        self.admission.changed.notify()
        return batch

    with replaced(Trainer, train_step=train_step):
        yield


@bug("new calls go past a publication that waits", changes=GATED)
def publication_starves() -> Iterator[None]:
    async def wait_for_gate(self: Any) -> None:
        return

    with replaced(TurnGate, _wait_for_gate=wait_for_gate):
        yield


@bug("a publication does not wait for the calls in flight", changes=GATED)
def publication_does_not_wait() -> Iterator[None]:
    async def drain(self: Any, version: int) -> None:
        return

    with replaced(TurnGate, _drain=drain):
        yield


@bug("versions are counted in steps", changes=WIDE)
def version_of_each_step() -> Iterator[None]:
    async def give_weights(version: int, actor: Any, engine: Any, run: Any, world: Any) -> None:
        await right(version * run.publish_freq, actor, engine, run, world)

    right = trainer.give_weights
    with replaced(trainer, give_weights=give_weights):
        yield


# --- evaluation


@bug("a publication ends the evaluation beside it", changes=BESIDE)
def evaluation_aborted_by_publication() -> Iterator[None]:
    right = Trainer.publish

    async def publish(self: Any, version: int) -> None:
        await self.evaluations.close()
        self.evaluations._beside = None
        await right(self, version)

    with replaced(Trainer, publish=publish):
        yield


@bug("an evaluation between two publications is not waited for", changes=MEASURED)
def evaluation_not_waited_for() -> Iterator[None]:
    right = Evaluations._end

    async def end(self: Any, measuring: Any, step: int, version: int) -> None:
        self._beside = asyncio.create_task(right(self, measuring, step, version), name="evaluation")

    with replaced(Evaluations, _end=end):
        yield


@bug("a checkpoint does not wait for the evaluations of older versions", changes=BESIDE)
def checkpoint_before_the_evaluation() -> Iterator[None]:
    right = Trainer._save

    async def save(self: Any) -> None:
        settle, self.evaluations.settle = self.evaluations.settle, _at_once
        try:
            await right(self)
        finally:
            self.evaluations.settle = settle

    with replaced(Trainer, _save=save):
        yield


async def _at_once(**named: Any) -> None:
    return


@bug("a version is noted as evaluated before its numbers are there", changes=MEASURED)
def evaluation_noted_early() -> Iterator[None]:
    right = Evaluations._end

    async def end(self: Any, measuring: Any, step: int, version: int) -> None:
        await self._queue.note_evaluation(version)
        await right(self, measuring, step, version)

    with replaced(Evaluations, _end=end):
        yield
