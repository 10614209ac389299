"""What the tests of the rules have in common: moments at which a life ends, what its journal has then, checkpoints."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asyncrl.errors import (
    EngineError,
)
from asyncrl.journal.entries import Saved
from asyncrl.journal.model import MemoryJournal
from asyncrl.training.checkpoint import FORMAT
from asyncrl.world import RealWorld

NewLife = Callable[..., Any]
"""Of conftest.py."""

BATCH = 2
KEEP_ALL = {"trainer": {"save_freq": 1000}}
"""No checkpoint before the last step: nothing is purged."""
ASYNC = {"trainer": {"save_freq": 1000, "mode": "async", "max_staleness": 1}}


def prefixes(journal: MemoryJournal) -> Iterator[Saved]:
    """What a crash may leave of a journal: after each of its entries."""
    saved = Saved()
    yield saved.copy()
    for entry in journal.disk.entries:
        saved.apply(entry)
        yield saved.copy()


def leaving_at(*event: Any) -> Callable[[Any, tuple[Any, ...]], None]:
    """Puts the journal away at the first event that begins so, under `event`."""

    def at(life: Any, seen: tuple[Any, ...]) -> None:
        if seen[: len(event)] == event:
            life.leave(event)

    return at


def losing_the_engine(*request_ids: str) -> Callable[[Any, tuple[Any, ...]], None]:
    """The first call of these requests is lost."""
    lost = set(request_ids)

    def at(life: Any, seen: tuple[Any, ...]) -> None:
        if seen[0] == "generate" and seen[1] in lost:
            lost.discard(seen[1])
            raise EngineError("the engine was lost")

    return at


def uid(number: int) -> str:
    return RealWorld(run_seed=1).uid(number)


def num_admitted_rows(saved: Saved) -> int:
    return sum(saved_row.row.session_id is None for saved_row in saved.rows.values())


def num_dropped(saved: Saved) -> int:
    return sum(count for name, count in saved.counters.items() if name.startswith("dropped/"))


def make_checkpoint(folder: Path, step: int, *, is_whole: bool = True) -> Path:
    """As far as its manifest and DONE go."""
    path = folder / f"global_step_{step}"
    path.mkdir(parents=True)
    facts = {"format": FORMAT, "step": step, "version": step, "controllers": {}, "counters": {}, "files": {}}
    content = json.dumps(facts).encode()
    (path / "manifest.json").write_bytes(content if is_whole else content[:-1])
    (path / "DONE").write_text(hashlib.blake2b(content, digest_size=16).hexdigest(), encoding="utf-8")
    return path
