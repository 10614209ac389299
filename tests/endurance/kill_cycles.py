"""Processes that die in the middle of their puts (`kill -9`), and what the journal says afterwards.

    python tests/endurance/kill_cycles.py [--cycles 500] [--seed 1] [--sync full]

A cycle: a worker is forked, opens the journal in the folder that all share, finds in it what its predecessors left, and goes on
with puts, turns, retries, settlings, drops, records, retirements and purges, several at once, until it is killed at a random
moment. Its weights are of any step that the journal can be gone on from, so steps are done again. It announces each command before
it gives it, and reports each one that was acknowledged. The next worker knows which commands were given, and `Model` what each of
them means; what it reads must be what the first p of them come to, for one p that covers all that were acknowledged. This is
durability (no acknowledged command is missing), atomicity (none is there in part) and order at once.

The parent forks only: it has no thread and no loop, so that a worker costs milliseconds and not seconds of imports.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDict

from asyncrl.event_loop import run_loop
from asyncrl.journal.entries import KeptSteps
from asyncrl.keys import TRAIN, GroupLease, SessionLease, StepLease
from asyncrl.protocol.ragged import ragged
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.world import RealWorld

if TYPE_CHECKING:
    from tests.endurance.commands import FIELDS, Command, Model, Values, find_prefix, read, value_of
else:
    sys.path.insert(0, str(Path(__file__).parent))  # a script's own folder is not on the path with PYTHONSAFEPATH
    from commands import FIELDS, Command, Model, Values, find_prefix, read, value_of

Report = Callable[[dict[str, Any]], None]
"""Sends one message to the parent: `found`, `given`, `done` or `error`."""

STAGE_FIELD = "advantages"
NUM_AT_ONCE, NUM_ALIVE = 4, 6
LONGEST_LIFE_S = 0.06
HANG_TIMEOUT_S = 60.0


class Worker:
    """Gives commands at random, several at once, each group at most one; ends when it is killed."""

    def __init__(self, queue: TransferQueue, model: Model, report: Report, rng: random.Random) -> None:
        self._queue = queue
        self._model = model
        self._report = report
        self._rng = rng
        self._num_given = 0
        self._busy: set[str] = set()
        self._is_training = False

    async def live(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(self._produce())

    async def _do(self, verb: str, **what: Any) -> None:
        """Announce, act, report. No await before the act: commands have the order in which they were announced."""
        command, number = {"verb": verb, **what}, self._num_given
        self._num_given += 1
        self._report({"given": command})
        self._model.apply(command)
        await give(self._queue, command)
        self._report({"done": number})

    async def _produce(self) -> None:
        while True:
            alive = self._model.alive
            finished = [uid for uid in alive if self._model.groups[uid].is_finished(uid)]
            free = [uid for uid in alive if uid not in self._busy and uid not in finished]
            if (len(finished) >= 2 or self._lost_step() is not None) and not self._is_training and self._rng.random() < 0.5:
                self._is_training = True
                await self._train(finished[:2])
                self._is_training = False
            elif not free or (len(alive) < NUM_ALIVE and self._rng.random() < 0.3):
                await self._admit()
            else:
                uid = self._rng.choice(free)
                self._busy.add(uid)
                await self._advance(uid)
                self._busy.discard(uid)

    async def _admit(self) -> None:
        number = self._model.counters["admitted"] + 1
        self._busy.add(uid := f"g{number}")
        values = self._choose_values(self._choose_fields())
        await self._do("admit", uid=uid, incarnation=self._queue.incarnation, cursor=number, values=values)
        self._busy.discard(uid)

    async def _advance(self, uid: str) -> None:
        """The next command of a group under way. One of an earlier process is reopened first."""
        group, incarnation, rng = self._model.groups[uid], self._queue.incarnation, self._rng
        under_way = [number for number, session in enumerate(group.sessions) if not session.is_settled]
        if group.incarnation < incarnation:
            return await self._do("reopen", uid=uid, incarnation=incarnation)
        if not under_way:
            return await self._do("settle_group", uid=uid, incarnation=incarnation)
        number = rng.choice(under_way)
        session = group.sessions[number]
        which = {"uid": uid, "session_id": number, "attempt": session.attempt, "incarnation": incarnation}
        if session.incarnation < incarnation or (roll := rng.random()) < 0.05:
            retry = session.attempt + (session.incarnation == incarnation or rng.random() < 0.2)
            return await self._do("open_session", **which | {"attempt": retry})
        if roll < 0.35:
            return await self._do("turn", **which, turn=len(session.turns), values=self._choose_values(self._choose_fields()))
        if roll < 0.65:
            return await self._do("put", **which, **self._choose_rows(uid, number))
        if roll < 0.70:
            return await self._do("drop", uids=[uid])
        if roll < 0.72:
            return await self._do("clear", uid=uid)
        is_last = len(under_way) == 1 and rng.random() < 0.7
        return await self._do("settle", **which, **self._choose_rows(uid, number), is_last=is_last)

    def _choose_fields(self) -> list[str]:
        return self._rng.sample(list(FIELDS), self._rng.randint(1, len(FIELDS)))

    def _choose_values(self, names: Sequence[str]) -> Values:
        """Rows of none to many entries: some transactions are many pages long."""
        return {name: (self._rng.getrandbits(32), self._rng.choice([0, 1, 7, 200, 200, 5000])) for name in names}

    def _choose_rows(self, uid: str, session_id: int) -> Command:
        """Up to three keys, new ones and those that are there, with the same fields and a tag each."""
        names, numbers = self._choose_fields(), self._rng.sample(range(6), self._rng.randint(1, 3))
        return {
            "keys": [f"{uid}_{session_id}_{number}" for number in numbers],
            "columns": [self._choose_values(names) for _ in numbers],
            "tags": [{"status": "running", f"n{self._rng.randrange(3)}": self._rng.random()} for _ in numbers],
        }

    async def _train(self, uids: Sequence[str]) -> None:
        """Record, write a column that no journal keeps, retire, perhaps purge. A step that was recorded before is gone on with."""
        model, step = self._model, self._lost_step()
        if step is None:
            step = max([model.counters["purged_step"], *model.records]) + 1
            keys = [key for uid in uids for key in model.groups[uid].rows if key != uid]
        else:
            keys = list(model.records[step])
        await self._do("record", step=step, keys=keys)
        lease = StepLease(step=step, incarnation=self._queue.incarnation)
        await self._queue.open_lease(lease, keys=keys, partition_id=TRAIN)
        stage = {STAGE_FIELD: [torch.ones(3)] * len(keys)}
        await self._queue.kv_batch_put(keys, partition_id=TRAIN, lease=lease, fields=stage)
        await self._do("retire", step=step, keys=keys, incarnation=lease.incarnation)
        await self._queue.close_lease(lease)
        if self._rng.random() < 0.5:
            await self._do("purge", step=self._rng.choice([done for done in model.records if done <= model.weights]))

    def _lost_step(self) -> int | None:
        """The first one that the weights do not have."""
        return min((step for step in self._model.records if step > self._model.weights), default=None)


async def give(queue: TransferQueue, command: Command) -> None:
    """The call that a command stands for."""
    verb, where = command["verb"], {"partition_id": TRAIN}
    if verb in ("admit", "reopen", "settle_group"):
        await _give_to_group(queue, command, GroupLease(uid=command["uid"], incarnation=command["incarnation"]))
    elif verb in ("open_session", "turn", "put", "settle"):
        names = ("uid", "session_id", "attempt", "incarnation")
        await _give_to_session(queue, command, SessionLease(**{name: command[name] for name in names}))
    elif verb == "drop":
        await queue.drop(command["uids"], reason="test", **where)
    elif verb == "clear":
        await queue.kv_clear([command["uid"]], **where)
    elif verb == "record":
        await queue.record(command["step"], command["keys"], **where)
    elif verb == "retire":
        lease = StepLease(step=command["step"], incarnation=command["incarnation"])
        await queue.retire(command["keys"], step=lease.step, lease=lease, **where)
    else:
        await queue.purge(command["step"])


async def _give_to_group(queue: TransferQueue, command: Command, lease: GroupLease) -> None:
    if command["verb"] == "admit":
        tag: dict[str, bool | str] = {"is_prompt": True, "status": "running"}
        await queue.admit(lease, partition_id=TRAIN, cursor=command["cursor"], tag=tag, fields=_values(command["values"]))
    elif command["verb"] == "reopen":
        await queue.reopen_group(lease, partition_id=TRAIN)[1]
    else:
        await queue.settle_group(lease, partition_id=TRAIN, tag={"status": "finished"})


async def _give_to_session(queue: TransferQueue, command: Command, lease: SessionLease) -> None:
    verb = command["verb"]
    if verb == "open_session":
        return await queue.open_lease(lease)
    if verb == "turn":
        return await queue.put_turn(lease, command["turn"], _values(command["values"]))
    keys, rows = command["keys"], [_values(values) for values in command["columns"]]
    fields = {name: [row[name] for row in rows] for name in rows[0]}
    if verb == "put":
        return await queue.kv_batch_put(keys, partition_id=TRAIN, lease=lease, fields=fields, tags=command["tags"])
    group_tag = {"status": "finished"} if command["is_last"] else None
    tags = command["tags"]
    return await queue.settle_session(lease, partition_id=TRAIN, keys=keys, fields=fields, tags=tags, group_tag=group_tag)


def _values(values: Values) -> dict[str, Any]:
    return {name: value_of(name, *cell) for name, cell in values.items()}


# --- a cycle --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class History:
    """What the parent knows: `model` is what was found last, `commands` were given since, `num_done` of them acknowledged."""

    model: Model = field(default_factory=Model)
    commands: list[Command] = field(default_factory=list)
    num_done: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def hear(self, message: dict[str, Any]) -> None:
        """Raises SystemExit for an error."""
        if "error" in message:
            raise SystemExit(message["error"])
        if "given" in message:
            self.commands.append(message["given"])
            self.counts["given"] += 1
        elif "done" in message:
            self.num_done = max(self.num_done, message["done"] + 1)
            self.counts["acknowledged"] += 1
        else:
            self._settle(message["found"], message["weights"])

    def _settle(self, number: int, weights: int) -> None:
        self.counts["verified"] += 1
        self.counts["kept_unacknowledged"] += number - self.num_done
        self.counts["lost_unacknowledged"] += len(self.commands) - number
        for command in self.commands[:number]:
            self.model.apply(command)
        self.counts["steps_lost"] += max(0, max(self.model.records, default=0) - weights)
        self.model.weights = weights
        self.commands, self.num_done = [], 0


async def work(folder: Path, history: History, rng: random.Random, report: Report, sync: Literal["normal", "full"]) -> None:
    """What a worker does with its life."""

    def choose(steps: KeptSteps) -> int:
        return rng.randint(max(steps.purged, steps.last - 2), steps.last)

    async with RealWorld() as world, open_queue(folder / "journal.db", sync=sync, world=world, weights_step=choose) as queue:
        admitted = [command["uid"] for command in history.commands if command["verb"] == "admit"]
        seen = await read(queue, [*history.model.groups, *admitted])
        weights = queue.weights_step
        found = {
            "found": find_prefix(seen, history.model, history.commands, history.num_done, weights=weights),
            "weights": weights,
        }
        report(found)
        history.hear(found)
        await Worker(queue, history.model, report, rng).live()


def fork_worker(folder: Path, history: History, rng: random.Random, sync: Literal["normal", "full"]) -> tuple[int, int]:
    """Process id, and the end of the pipe that its messages come out of."""
    assert threading.active_count() == 1, "a forked process has one thread; the others' locks would stay locked in it"
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out

    def report(message: dict[str, Any]) -> None:
        os.write(into, json.dumps(message).encode() + b"\n")

    try:
        run_loop(work(folder, history, rng, report, sync))
    except BaseException:
        report({"error": traceback.format_exc()})
    finally:
        os._exit(1)


def listen(out: int, until: float | None, heard: bytearray) -> bool:
    """Append what the worker says until the clock shows `until`, it has said a line (None), or it ends: then False."""
    while True:
        timeout_s = HANG_TIMEOUT_S if until is None else until - time.monotonic()
        if timeout_s <= 0 or not select.select([out], [], [], timeout_s)[0]:
            return True
        data = os.read(out, 1 << 16)
        heard += data
        if not data or (until is None and b"\n" in data):
            return bool(data)


def cycle(folder: Path, history: History, rng: random.Random, sync: Literal["normal", "full"]) -> None:
    """One worker from its fork to its death, in one of ten cycles while it opens the journal."""
    pid, out = fork_worker(folder, history, random.Random(rng.getrandbits(64)), sync)
    heard = bytearray()
    try:
        is_alive = rng.random() < 0.1 or listen(out, None, heard)
        if is_alive:
            listen(out, time.monotonic() + rng.uniform(0, LONGEST_LIFE_S), heard)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    listen(out, time.monotonic() + HANG_TIMEOUT_S, heard)
    os.close(out)
    for line in heard.splitlines():
        history.hear(json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", choices=["normal", "full"], default="normal")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng, history, start = random.Random(args.seed), History(), time.monotonic()
    TensorDict({"x": ragged([torch.ones(1)])}, batch_size=[1])  # loads what torch loads late, once for all workers
    gc.freeze()  # a collection in a worker would copy every page of the parent
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.cycles):
            cycle(Path(folder), history, rng, args.sync)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    took = time.monotonic() - start
    assert history.counts["acknowledged"] >= args.cycles, "the workers hardly did anything"
    sys.stdout.write(json.dumps({"cycles": args.cycles, "seconds": round(took, 1), "journal_bytes": size, **history.counts}) + "\n")


if __name__ == "__main__":
    main()
