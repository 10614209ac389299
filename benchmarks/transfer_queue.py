"""Milliseconds of the TransferQueue's verbs: ours in memory, ours with its journal, and transferqueue 0.1.11; rounds A B C A B C.

A round, as in `benchmarks/peers/tq_bench.py`: 256 trajectories x 4 jagged fields, 3.3 MB, are put with their tags, listed, 64 of
them read, given a new field by a step, and cleared; 64 others are put one by one (`put_one` is the mean of one). Every value that
is read is compared. With the journal a put ends when it is acknowledged. The peer runs in an environment of its own, without a Ray
cluster (which makes it no slower); without one, that column is left out. Beside it, what one change of a tag costs with 100 and
with 100,000 keys alive (us); and with `--steps`, whether memory and files stay as they are over that many steps of a run.

    python benchmarks/transfer_queue.py --peer-python PATH [--rounds 15] [--sync full] [--steps 10000] [--json]
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

import torch
from tensordict import TensorDict

from asyncrl.event_loop import run_loop
from asyncrl.fields import Tag
from asyncrl.keys import TRAIN, GroupLease, SessionLease, StepLease
from asyncrl.protocol.ragged import ragged, rows_of
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.world import RealWorld

T = TypeVar("T")
Numbers = dict[str, float]
Sync = Literal["normal", "full"]

PEERS = Path(__file__).parent / "peers"
NUM_ROWS, NUM_READ, PROMPT_LEN, SHORTEST, LONGEST = 256, 64, 256, 100, 1000
WRITTEN = ("prompts", "responses", "response_mask", "rollout_log_probs")
READ = ("responses", "rollout_log_probs")
OPS = ("put_256x4", "get_64x2", "put_field_64", "put_one", "list_256", "clear_256")
PEER_OPS = {
    "put_256x4": "put_256_batch_tags",
    "get_64x2": "get_64_two_fields",
    "put_field_64": "put_64_new_field",
    "put_one": "put_one_x64_sequential",
    "list_256": "list_tags_256",
    "clear_256": "clear_256",
}
WARM_UP = 2
FEW, MANY, NUM_CHANGES = 100, 100_000, 400
AHEAD = 4
TIMEOUT_S = 60.0


# --- the workload ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """256 trajectories: rows of each field, the same as jagged columns, and tags."""

    rows: dict[str, list[torch.Tensor]]
    columns: TensorDict
    tags: list[Tag]
    advantages: list[torch.Tensor]


PICKED = range(0, NUM_ROWS, NUM_ROWS // NUM_READ)


def make_batch(seed: int) -> Batch:
    """The peer's numbers: `make_batch` of `peers/tq_bench.py`."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (NUM_ROWS,), generator=random).tolist()
    rows = {
        "prompts": [torch.randint(0, 150_000, (PROMPT_LEN,), generator=random) for _ in lengths],
        "responses": [torch.randint(0, 150_000, (length,), generator=random) for length in lengths],
        "response_mask": [torch.ones(length, dtype=torch.int64) for length in lengths],
        "rollout_log_probs": [-torch.rand(length, generator=random) for length in lengths],
    }
    tags: list[Tag] = [
        {
            "status": "success",
            "uid": f"p{at // 8}",
            "global_steps": 7,
            "min_v": 6,
            "max_v": 7,
            "reward": at * 0.5,
            "seq_len": PROMPT_LEN + length,
        }
        for at, length in enumerate(lengths)
    ]
    columns = TensorDict({name: ragged(values) for name, values in rows.items()}, batch_size=[NUM_ROWS])
    return Batch(rows=rows, columns=columns, tags=tags, advantages=[torch.randn(lengths[at], generator=random) for at in PICKED])


class OurSide:
    """The rounds on one store; every lease is opened and closed outside the clock."""

    def __init__(self, queue: TransferQueue) -> None:
        self._queue = queue
        self._ms: Numbers = {}

    async def _time(self, op: str, work: Awaitable[T]) -> T:
        start = time.perf_counter()
        done = await work
        self._ms[op] = (time.perf_counter() - start) * 1e3
        return done

    async def round(self, number: int) -> Numbers:
        """op -> milliseconds."""
        queue, batch, uid, partition = self._queue, make_batch(100 + number), f"p{number}", f"bench_{number}"
        group, session, step = GroupLease(uid=uid), SessionLease(uid=uid, session_id=0), StepLease(step=number + 1)
        keys = [f"{uid}_0_{at}" for at in range(NUM_ROWS)]
        some = [keys[at] for at in PICKED]
        new_field = TensorDict({"advantages": ragged(batch.advantages)}, batch_size=[NUM_READ])
        await queue.open_lease(group)
        await queue.open_lease(session)
        put = queue.kv_batch_put(keys, partition_id=partition, lease=session, fields=batch.columns, tags=batch.tags)
        await self._time("put_256x4", put)
        listed = (await self._time("list_256", queue.kv_list(partition)))[partition]
        got = await self._time("get_64x2", queue.kv_batch_get(some, partition_id=partition, fields=READ))
        await queue.open_lease(step, keys=some, partition_id=partition)
        await self._time("put_field_64", queue.kv_batch_put(some, partition_id=partition, lease=step, fields=new_field))
        _compare(got, {name: [batch.rows[name][at] for at in PICKED] for name in READ})
        assert len(listed) == NUM_ROWS
        assert listed[keys[3]]["uid"] == "p0"
        _compare(await queue.kv_batch_get(keys, partition_id=partition, fields=WRITTEN), batch.rows)
        _compare(await queue.kv_batch_get(some, partition_id=partition, fields=["advantages"]), {"advantages": batch.advantages})
        await self._put_one_by_one(batch, uid, f"{partition}_s")
        await self._time("clear_256", queue.kv_clear(keys, partition_id=partition))
        await queue.close_lease(step)
        await queue.close_lease(group)
        return {op: self._ms[op] for op in OPS}

    async def _put_one_by_one(self, batch: Batch, uid: str, partition: str) -> None:
        """64 sessions, a trajectory each, one after the other; the mean of one."""
        leases = [SessionLease(uid=uid, session_id=1 + at) for at in range(NUM_READ)]
        for lease in leases:
            await self._queue.open_lease(lease)
        keys = [f"{uid}_{lease.session_id}_0" for lease in leases]
        puts = [({name: batch.rows[name][at] for name in WRITTEN}, batch.tags[at]) for at in PICKED]
        start = time.perf_counter()
        for key, lease, (fields, tag) in zip(keys, leases, puts, strict=True):
            await self._queue.kv_put(key, partition_id=partition, lease=lease, fields=fields, tag=tag)
        self._ms["put_one"] = (time.perf_counter() - start) * 1e3 / NUM_READ
        stored = await self._queue.kv_batch_get(keys, partition_id=partition, fields=WRITTEN)
        _compare(stored, {name: [batch.rows[name][at] for at in PICKED] for name in WRITTEN})
        await self._queue.kv_clear(keys, partition_id=partition)


def _compare(stored: TensorDict, rows: Mapping[str, list[torch.Tensor]]) -> None:
    for name, values in rows.items():
        column = cast("torch.Tensor", stored[name])
        assert all(torch.equal(got, value) for got, value in zip(rows_of(column), values, strict=True)), name


class PeerSide:
    """The peer's own script in its own process, which makes one round a line that it is sent."""

    def __init__(self, python: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            [python, str(PEERS / "tq_bench.py"), "--backend", "tq_noray:inproc", "--ask"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PEERS), "PYTHONSAFEPATH": "1"},
        )

    def round(self) -> Numbers:
        """op -> milliseconds. Waits as long as the peer takes, or until it ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and has written why
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise SystemExit(f"the peer failed:\n{self._errors.read()[-2000:]}")
        ms = json.loads(answer)
        return {op: ms[theirs] for op, theirs in PEER_OPS.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


# --- one change of a tag --------------------------------------------------------------------------------------------------------


class Crowd:
    """`count` keys alive, a hundred a session, in one partition that somebody watches."""

    def __init__(self, queue: TransferQueue, count: int) -> None:
        self._queue = queue
        self._partition = f"crowd_{count}"
        self._leases = [SessionLease(uid=f"crowd{count}x{at}", session_id=0) for at in range(count // 100)]
        self._watch = queue.kv_watch(self._partition)

    async def gather(self) -> None:
        for lease in self._leases:
            await self._queue.open_lease(GroupLease(uid=lease.uid))
            await self._queue.open_lease(lease)
            keys = [f"{lease.uid}_0_{at}" for at in range(100)]
            tags: list[Tag] = [{"status": "running", "seq_len": at} for at in range(100)]
            await self._queue.kv_batch_put(keys, partition_id=self._partition, lease=lease, tags=tags)
        await anext(self._watch)

    async def change(self, number: int) -> float:
        """One tag changes, and the watcher sees it: microseconds."""
        lease = self._leases[number * 7919 % len(self._leases)]
        key = f"{lease.uid}_0_{number % 100}"
        start = time.perf_counter()
        await self._queue.kv_put(key, partition_id=self._partition, lease=lease, tag={"seq_len": 1000 + number})
        changes = await anext(self._watch)
        took = (time.perf_counter() - start) * 1e6
        assert list(changes) == [key]
        return took


async def measure_tag_change(queue: TransferQueue) -> Numbers:
    few, many = Crowd(queue, FEW), Crowd(queue, MANY)
    await few.gather()
    await many.gather()
    took = [(await few.change(number), await many.change(number)) for number in range(NUM_CHANGES)]
    with_few, with_many = (statistics.median(each[at] for each in took) for at in (0, 1))
    return {f"tag_change_{FEW}": with_few, f"tag_change_{MANY}": with_many, "tag_change_ratio": with_many / with_few}


# --- ten thousand steps ---------------------------------------------------------------------------------------------------------


class Steps:
    """A run without its model: two groups of two sessions a step, admitted `AHEAD` steps before they are trained on.

    Lengths follow the session, so that every step holds as many bytes as the one before.
    """

    def __init__(self, queue: TransferQueue) -> None:
        self._queue = queue
        self._watch = queue.kv_watch(TRAIN)
        self._sessions: list[SessionLease] = []

    async def step(self, step: int) -> None:
        """Two groups come, two are trained on, and what no checkpoint would ask for is purged every ten steps."""
        queue = self._queue
        await self._produce(2 * step)
        await self._produce(2 * step + 1)
        await anext(self._watch)
        step -= AHEAD
        if step < 1:
            return
        keys = [f"{lease.uid}_{lease.session_id}_0" for lease in self._sessions[:4]]
        del self._sessions[:4]
        await queue.record(step, keys, partition_id=TRAIN)
        lease = StepLease(step=step)
        await queue.open_lease(lease, keys=keys, partition_id=TRAIN)
        batch = await queue.kv_batch_get(keys, partition_id=TRAIN, fields=["rollout_log_probs"])
        await queue.kv_batch_put(keys, partition_id=TRAIN, lease=lease, fields={"advantages": batch["rollout_log_probs"]})
        await queue.retire(keys, partition_id=TRAIN, step=step, lease=lease)
        await queue.close_lease(lease)
        if step % 10 == 0:
            await queue.purge(step - 10)

    async def _produce(self, number: int) -> None:
        queue, group = self._queue, GroupLease(uid=f"{number:016x}")
        tag: Tag = {"is_prompt": True, "status": "running"}
        prompt = {"raw_prompt": [{"role": "user", "content": "12 * 34 = ?"}]}
        await queue.admit(group, partition_id=TRAIN, cursor=number, tag=tag, fields=prompt)
        for session_id, length in enumerate((400, 900)):
            lease = SessionLease(uid=group.uid, session_id=session_id)
            row = {"responses": torch.arange(length), "rollout_log_probs": torch.zeros(length)}
            await queue.open_lease(lease)
            await queue.put_turn(lease, 0, row)
            await queue.settle_session(
                lease,
                partition_id=TRAIN,
                keys=[f"{lease.uid}_{session_id}_0"],
                fields={name: [values] for name, values in row.items()},
                tags=[{"status": "finished", "seq_len": length}],
                group_tag={"status": "finished"} if session_id else None,
            )
            self._sessions.append(lease)


async def measure_steps(steps: int, sync: Sync) -> dict[str, list[float]]:
    """Megabytes of the process, of the store and of the journal's files, and milliseconds a step: at ten points of the way."""
    found: dict[str, list[float]] = defaultdict(list)
    async with RealWorld() as world, _journaled(sync, world) as (folder, queue):
        life, each, start = Steps(queue), steps // 10, time.perf_counter()
        for step in range(1, steps + 1):
            await life.step(step)
            if step % each == 0:
                found["step_ms"].append((time.perf_counter() - start) * 1e3 / each)
                for name, size in _sizes(queue, folder).items():
                    found[name].append(size)
                start = time.perf_counter()
    return {name: [round(value, 3) for value in values] for name, values in found.items()}


def _sizes(queue: TransferQueue, folder: Path) -> Numbers:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = sum(path.stat().st_size for path in folder.iterdir())
    return {"rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6, "store_mb": queue.stats()["bytes"] / 1e6, "files_mb": files / 1e6}


def _growth(found: Mapping[str, list[float]]) -> Numbers:
    """From the first tenth, which is the warm-up, to the last: 0.05 is five per cent more."""
    return {f"{name}_growth": round(found[name][-1] / found[name][0] - 1, 4) for name in ("rss_mb", "store_mb", "files_mb")}


# --- all of it ------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _journaled(sync: Sync, world: RealWorld) -> AsyncIterator[tuple[Path, TransferQueue]]:
    with tempfile.TemporaryDirectory() as folder:
        async with open_queue(Path(folder) / "journal.db", sync=sync, world=world, commit_timeout_s=TIMEOUT_S) as queue:
            yield Path(folder), queue


async def measure(rounds: int, sync: Sync, peer_python: str) -> dict[str, Numbers]:
    """Side -> op -> median milliseconds, and what a change of a tag costs."""
    taken: dict[str, list[Numbers]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(RealWorld())
        memory = await stack.enter_async_context(TransferQueue())
        _, journal = await stack.enter_async_context(_journaled(sync, world))
        sides = {"memory": OurSide(memory), "journal": OurSide(journal)}
        with ExitStack() as peers:
            peer = peers.enter_context(PeerSide(peer_python)) if peer_python else None
            for number in range(WARM_UP + rounds):
                for name, side in sides.items():
                    taken[name].append(await side.round(number))
                if peer is not None:
                    taken["transferqueue"].append(peer.round())
        result = {name: _medians(each[WARM_UP:]) for name, each in taken.items()}
        result["memory"] |= await measure_tag_change(memory)
        result["journal"] |= await measure_tag_change(journal)
    return {name: {op: round(value, 4) for op, value in numbers.items()} for name, numbers in result.items()}


def _medians(rounds: list[Numbers]) -> Numbers:
    return {op: statistics.median(each[op] for each in rounds) for op in OPS}


def _with_ratios(result: dict[str, Numbers]) -> dict[str, Any]:
    """Beside the medians, how many times faster than the peer each of our columns is."""
    theirs = result.get("transferqueue")
    if theirs is None:
        return dict(result)
    ratios = {name: {op: round(theirs[op] / result[name][op], 1) for op in OPS} for name in ("memory", "journal")}
    return {**result, "times_faster": ratios}


def _print(result: dict[str, Numbers], rounds: int, sync: Sync) -> None:
    print(f"median of {rounds} rounds, ms; journal: acknowledged, sync = {sync}")
    print(f"{'':14s}" + "".join(f"{name:>15s}" for name in result))
    for op in OPS:
        print(f"{op:14s}" + "".join(f"{numbers[op]:15.3f}" for numbers in result.values()))
    for name in ("memory", "journal"):
        few, many, ratio = (result[name][f"tag_change_{which}"] for which in (FEW, MANY, "ratio"))
        print(f"one change of a tag, {name}: {few:.1f} us with {FEW} keys alive, {many:.1f} us with {MANY:,}: {ratio:.2f} x")


def _print_steps(steps: Mapping[str, list[float]], number: int) -> None:
    print(f"{number:,} steps of a run, at each tenth:")
    for name, values in steps.items():
        print(f"{name:14s}" + "".join(f"{value:9.2f}" for value in values))
    print(", ".join(f"{name} {value:+.1%}" for name, value in _growth(steps).items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer-python", default=os.environ.get("TQ_PYTHON", ""), help="Python with transferqueue 0.1.11; $TQ_PYTHON"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sync", choices=["normal", "full"], default="normal", help="what an acknowledged put survives")
    parser.add_argument("--steps", type=int, default=0, help="steps of a run through the store, to see memory and files stay flat")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    if args.peer_python and shutil.which(args.peer_python) is None:
        parser.error(f"--peer-python {args.peer_python}: no such program")
    torch.set_num_threads(1)  # small copies: a second thread costs more than it brings
    if not args.peer_python:
        print("no --peer-python: transferqueue is not measured")
    steps = run_loop(measure_steps(args.steps, args.sync)) if args.steps else {}
    result = run_loop(measure(args.rounds, args.sync, args.peer_python))
    _print(result, args.rounds, args.sync)
    if steps:
        _print_steps(steps, args.steps)
    if args.json:
        print(json.dumps({**_with_ratios(result), **({"steps": {**steps, **_growth(steps)}} if steps else {})}))


if __name__ == "__main__":
    main()
