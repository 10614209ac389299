"""The table of invariants says where each runs, at which level: here the borders of a step are walked, and it is seen which do."""

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict

from asyncrl.keys import TRAIN, GroupLease, SessionLease, StepLease
from asyncrl.ports import StepContext
from asyncrl.protocol import invariants
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import lengths_of, ragged
from asyncrl.protocol_page import example
from asyncrl.protocol_page.tables import ALWAYS, CHECKED
from asyncrl.stages.contract import ROW_FIELDS, check_cleanup, check_sample
from asyncrl.stages.stage import Stage, StageOutput, StepScope, run_stage
from asyncrl.trainer import Trainer
from asyncrl.transfer_queue import TransferQueue
from asyncrl.world import RealWorld

NAMED = [name for name in invariants.__all__ if inspect.isfunction(getattr(invariants, name)) and not name.startswith("check_")]
CODES = {getattr(invariants, name).__code__: name for name in NAMED}
VERSION = 8
"""Of the newest token of the example."""


class Watcher:
    """Which invariants are called at which border, in this thread and in those that are started meanwhile (and go on)."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = {}
        self._border = ""

    def at(self, border: str) -> None:
        self._border = border
        self.seen[border] = set()

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in CODES:
            self.seen[self._border].add(CODES[frame.f_code])


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    threading.setprofile(watcher.note)
    sys.setprofile(watcher.note)
    yield watcher
    sys.setprofile(None)
    threading.setprofile(None)


async def sampled(*, check: bool) -> StepScope:
    """The example as a group of one session, sampled by step 9."""
    queue, rows = TransferQueue(), example.rows()
    group, session = GroupLease(uid="a1b2"), SessionLease(uid="a1b2", session_id=0)
    await queue.admit(group, partition_id=TRAIN, cursor=1, tag={"is_prompt": True})
    await queue.open_lease(session)
    await queue.settle_session(
        session, partition_id=TRAIN, keys=rows.keys, fields=rows.fields, tags=rows.tags, group_tag={"status": "finished"}
    )
    lease = StepLease(step=VERSION + 1)
    await queue.open_lease(lease)
    return StepScope(
        queue=queue,
        world=RealWorld(),
        batch=KVBatchMeta(partition_id=TRAIN, keys=tuple(rows.keys), tags=tuple(rows.tags)),
        lease=lease,
        context=StepContext(step=VERSION + 1, version=VERSION, seed=0),
        check=check,
    )


def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
    zeros = ragged([torch.zeros(int(length)) for length in lengths_of(columns["responses"])])
    return StageOutput(columns={"advantages": zeros, "returns": zeros, "old_log_probs": zeros})


STAGE = Stage(
    name="any", reads=frozenset(ROW_FIELDS), writes=frozenset({"advantages", "returns", "old_log_probs"}), compute=compute
)


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
async def test_the_invariants_run_where_the_table_says(check: bool, watcher: Watcher) -> None:
    scope = await sampled(check=check)
    watcher.at("sample")
    await check_sample(scope, group_size=1, max_staleness=1)
    watcher.at("balance")
    rooms = SimpleNamespace(
        sight=SimpleNamespace(timing=lambda name: nullcontext(), add=lambda result: None),
        actor=SimpleNamespace(num_ranks=1),
        run=SimpleNamespace(mini_batch_groups=1),
        world=scope.world,
    )
    await Trainer._balance(cast(Any, rooms), scope)
    watcher.at("stage")
    await run_stage(STAGE, scope)
    await run_stage(STAGE, scope)  # once more, for what must hold of a repetition
    await scope.queue.retire(scope.batch.keys, partition_id=TRAIN, step=scope.lease.step, lease=scope.lease)
    watcher.at("cleanup")
    await check_cleanup(scope)
    expected = {border: {*ALWAYS.get(border, ()), *(CHECKED.get(border, ()) if check else ())} for border in CHECKED}
    assert watcher.seen == expected


@pytest.mark.parametrize(("level", "count"), [("off", 0), ("sampled", 10), ("all", 100)])
def test_values_are_checked_in_as_many_steps_as_the_page_says(level: str, count: int) -> None:
    rooms = SimpleNamespace(run=SimpleNamespace(trainer=SimpleNamespace(invariants=level)))
    assert sum(Trainer._checks_invariants(cast(Any, rooms), step) for step in range(1, 101)) == count
