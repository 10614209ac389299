"""A store that is opened with the weights that its journal fits, and one that is left while its journal's disk hangs."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import CheckpointError, DeadlineError, JournalInUseError
from asyncrl.journal.entries import KeptSteps
from asyncrl.journal.sqlite import open_journal
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.world import RealWorld


class HangingWorld(RealWorld):
    """Once `hangs` no file job of its begins, and who has a deadline gives up soon."""

    def __init__(self) -> None:
        super().__init__(pools={"files": 1})
        self.let_go = threading.Event()

    def hang(self) -> None:
        self._pools["files"].submit(self.let_go.wait)

    async def offload(
        self, function: Callable[..., Any], *args: object, pool: str = "files", timeout_s: float | None = None
    ) -> Any:
        return await super().offload(function, *args, pool=pool, timeout_s=timeout_s and 0.05)


async def make(path: Path, num_steps: int) -> None:
    """A journal of so many trained steps, of which the first is purged."""
    async with RealWorld() as world, open_queue(path, world=world) as queue:
        for step in range(1, num_steps + 1):
            group, session = GroupLease(uid=f"g{step}"), SessionLease(uid=f"g{step}", session_id=0)
            await queue.admit(group, partition_id="train", cursor=step, tag={})
            await queue.open_lease(session)
            keys = [f"g{step}_0_0"]
            await queue.settle_session(session, partition_id="train", keys=keys, tags=[{"n": 1}], group_tag={})
            await queue.record(step, keys, partition_id="train")
            await queue.open_lease(StepLease(step=step))
            await queue.retire(keys, partition_id="train", step=step, lease=StepLease(step=step))
        await queue.purge(1)


async def test_the_weights_are_chosen_once_the_journal_is_locked_and_off_the_loop(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    await make(path, 3)
    asked: list[KeptSteps] = []

    def choose(steps: KeptSteps) -> int:
        asked.append(steps)
        assert threading.current_thread() is not threading.main_thread()
        with pytest.raises(JournalInUseError):
            open_journal(path)
        return 2

    async with RealWorld() as world, open_queue(path, world=world, weights_step=choose) as queue:
        assert (queue.weights_step, list((await queue.kv_list())["train"])) == (2, ["g3", "g3_0_0"])
    assert asked == [KeptSteps(purged=1, last=3)]


async def test_a_refusal_of_all_weights_lets_the_journal_go(tmp_path: Path) -> None:
    def refuse(steps: KeptSteps) -> int:
        raise CheckpointError("no weights fit")

    async with RealWorld() as world:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="no weights fit"):
                async with open_queue(tmp_path / "journal.db", world=world, weights_step=refuse):
                    raise AssertionError("it is not opened")
        async with open_queue(tmp_path / "journal.db", world=world) as queue:
            assert queue.incarnation == 2


async def test_a_sync_writes_although_nothing_changes(tmp_path: Path) -> None:
    """SQLite syncs what a commit writes, and a commit that writes nothing is none."""
    async with RealWorld() as world, open_queue(tmp_path / "journal.db", world=world) as queue:
        sizes = [queue.stats()["journal_bytes"]]
        for _ in range(3):
            await queue.sync()
            sizes.append(queue.stats()["journal_bytes"])
    assert sizes == sorted(set(sizes))


async def test_a_journal_that_does_not_close_is_named(tmp_path: Path) -> None:
    async with HangingWorld() as world:
        with pytest.raises(DeadlineError, match=r"journal\.db did not close within 12 s; what was acknowledged is kept"):
            async with open_queue(tmp_path / "journal.db", world=world, commit_timeout_s=2.0):
                world.hang()
        world.let_go.set()


async def test_what_ended_the_run_is_told_before_the_journal_that_does_not_close(tmp_path: Path) -> None:
    async with HangingWorld() as world:
        with pytest.raises(ZeroDivisionError):
            await fail_while_the_disk_hangs(tmp_path / "journal.db", world)
        world.let_go.set()


async def fail_while_the_disk_hangs(path: Path, world: HangingWorld) -> None:
    async with open_queue(path, world=world):
        world.hang()
        raise ZeroDivisionError
