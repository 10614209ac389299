"""A user's project in a fresh folder, and scorers on it."""

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from asyncrl.config import RewardConfig
from asyncrl.ports import RewardRequest
from asyncrl.rewards.scoring import Scorer, open_scorer
from asyncrl.world import RealWorld

OpenScorer = Callable[..., AbstractAsyncContextManager[Scorer]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """project(source) writes my_rewards.py into the working directory, a fresh folder."""
    monkeypatch.chdir(tmp_path)

    def write(source: str) -> Path:
        path = tmp_path / "my_rewards.py"
        path.write_text("import asyncio, os, signal, sys, threading, time\n" + dedent(source))
        return path

    yield write
    sys.modules.pop("my_rewards", None)


@pytest.fixture
def opened(tmp_path: Path) -> OpenScorer:
    """opened(function, rules=..., **reward keys): a scorer whose workers' output goes to worker.log."""

    @asynccontextmanager
    async def opened(function: str = "exact_match", *, rules: dict[str, Any] = {}, **keys: Any) -> AsyncIterator[Scorer]:  # noqa: B006
        config = RewardConfig(function=function, **{"timeout_s": 20.0, **keys})
        async with RealWorld() as world, open_scorer(config, world=world, log=tmp_path / "worker.log", **rules) as scorer:
            yield scorer

    return opened


@pytest.fixture
def ask() -> Callable[..., RewardRequest]:
    """ask(solution, truth): a request."""

    def ask(solution_str: str = "", ground_truth: object = "", *, response_len: int = 1, **extra_info: object) -> RewardRequest:
        return RewardRequest(
            data_source="test",
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
            response_len=response_len,
        )

    return ask


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = _children()
    yield
    assert _children() <= before


def _children() -> set[int]:
    """Of this process, running or zombie, where the system tells. Another test may have started one that stays: the server that
    multiprocessing forks from."""
    return {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _parent(folder) == os.getpid()}


def _parent(folder: Path) -> int | None:
    """None: it has ended meanwhile. The name, in brackets, may hold anything; the parent is the second word after it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return None
