"""Groups of ranks that serve `rank_targets`, ended after each test; and a wait for processes to be gone."""

import os
import select
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cluster import ForkServer, RankGroup


@pytest.fixture
def make_group(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RankGroup]]:
    """make_group(num_ranks, target="serve", payload=None, timeout_s=60, is_started=True, **options)"""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    groups: list[RankGroup] = []

    def make(
        num_ranks: int = 2, target: str = "serve", payload: object = None, *, is_started: bool = True, **more: Any
    ) -> RankGroup:
        options = {"timeout_s": 60.0, "grace_s": 1.0, "server": fork_server, **more}
        group = RankGroup(num_ranks, target if ":" in target else f"rank_targets:{target}", **options)
        groups.append(group)
        if is_started:
            group.start(payload)
        return group

    yield make
    for group in groups:
        group.close()


@pytest.fixture
def wait_until_gone() -> Callable[[Iterable[int]], None]:
    """wait_until_gone(pids): of processes that are no children of this one. Fails after 20 s."""

    def wait(pids: Iterable[int]) -> None:
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            ready, _, _ = select.select([fd], [], [], 20.0)
            os.close(fd)
            assert ready, f"process {pid} is still there"

    return wait
