"""A runner that is left, in the middle of whatever: a restart finds all of it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.config import TrainRun
from asyncrl.errors import EngineError
from asyncrl.journal.model import JournalDisk, MemoryJournal
from asyncrl.keys import TRAIN, GroupLease, SessionLease
from asyncrl.ports import GenerateRequest, GroupStatus, Prompt
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.tools import FunctionTool
from asyncrl.transfer_queue import TransferQueue

NewRun = Callable[..., TrainRun]
Rig = Any  # the fixtures' classes live in conftest, which is no module
Virtual = Callable[..., Any]


@pytest.mark.parametrize("leave_s", [0.0, 0.5, 1.5, 3.0, 5.5, 7.0])
def test_a_runner_that_is_left_writes_nothing(leave_s: float, in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    """At any moment: while its prompt is rendered, in a turn, in a tool, in a back-off, in the reward."""
    run = new_run(agent={"max_attempts": 2, "retry_backoff_s": 2.0}, rollout={"n": 2}, algorithm={"adv_estimator": "remax"})

    async def slow() -> str:
        """Be slow."""
        await asyncio.sleep(1.0)
        return "ok"

    async def main(rig: Rig) -> Any:
        left = [EngineError("gone")]

        def script(request: GenerateRequest) -> str:
            if left and request.sampling.temperature:
                raise left.pop()
            return '<tool_call>{"name": "slow", "arguments": {}}</tool_call>' if request.request_id.endswith("_0") else "3"

        rig.scorer.delay_s = 5.0
        disk = JournalDisk()
        journal = MemoryJournal(disk=disk)
        async with TransferQueue(journal, journal.load()) as queue:
            async with rig.runner(queue, rig.engine(script), run, {"slow": FunctionTool(slow)}) as runner:
                runner.start(prompt)
                await asyncio.sleep(leave_s)
                num_entries = disk.num_entries
            assert disk.num_entries == num_entries
        journal = MemoryJournal(disk=disk)
        (found,) = TransferQueue(journal, journal.load()).groups_under_way(TRAIN)
        return found, rig

    found, rig = in_virtual_time(main)
    assert not found.is_settled
    assert found.tag["status"] in (GroupStatus.PENDING, GroupStatus.RUNNING)
    assert "failure" not in found.tag
    assert ("failure", "session") not in rig.told()


class _Broken(TransferQueue):
    """What ends a session of group b2 fails by a mistake of ours. `is_slow`: sessions of group a1 never begin."""

    is_slow = False

    async def begin_sessions(self, group: GroupLease, *arguments: Any, **named: Any) -> None:
        if self.is_slow and group.uid == "a1":
            await asyncio.Event().wait()
        await super().begin_sessions(group, *arguments, **named)

    async def settle_session(self, lease: SessionLease, **named: Any) -> None:
        if lease.uid == "b2":
            raise RuntimeError("our own mistake")
        await super().settle_session(lease, **named)


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_group_that_ends_the_run_leaves_the_others_as_they_are(
    is_slow: bool, rig: Rig, prompt: Prompt, new_run: NewRun
) -> None:
    async def answer(request: GenerateRequest) -> list[int]:
        if request.request_id.startswith("a1"):
            await asyncio.Event().wait()
        ids: list[int] = rig.template.encode_assistant("3")
        return ids

    async def run(queue: TransferQueue) -> None:
        async with rig.runner(queue, ScriptedEngine(answer), new_run(agent={"name": "single_turn"}), {}) as runner:
            runner.start(prompt)
            runner.start(replace(prompt, uid="b2", number=1))
            await asyncio.Event().wait()

    async with _Broken() as queue:
        queue.is_slow = is_slow
        with pytest.raises(RuntimeError, match="our own mistake"):
            await run(queue)
        tags = await rig.tags(queue)
        found = queue.groups_under_way(TRAIN)
    assert {uid: tag["status"] for uid, tag in tags.items()} == {"a1": "pending" if is_slow else "running", "b2": "running"}
    assert [group.is_settled for group in found] == [False, False]
