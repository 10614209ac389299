"""A store that is left while its journal's disk hangs."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import DeadlineError
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
