"""GroupRunner: runs every session of every admitted prompt as tasks, and writes their trajectories and the group's status.

Place: trainer.admit -> [GroupRunner.start] -> TransferQueue (rows, tags) -> replay. It owns all session tasks, nothing after them.

Invariants:
1. A group's prompt tag moves pending -> running -> finished | failure, and is terminal only when all its sessions have settled: no
   sibling writes afterwards.
2. A group is `finished` only if every session has written its trajectories; one failed session makes it `failure`, with the reason
   in its tag. The other sessions still run to their end.
3. Every started group becomes terminal, whatever is raised or cancelled inside it, as long as the runner is open.
4. A session writes under its own lease, which is closed when it settles.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from asyncrl.agents.chat_template import ChatTemplate
from asyncrl.agents.rows import rows_of
from asyncrl.agents.session import SessionFailure, failure_of, run_session, session_parts
from asyncrl.agents.tool_runner import ToolRunner
from asyncrl.config import TrainRun
from asyncrl.errors import StaleLeaseError
from asyncrl.keys import TRAIN, GroupLease, SessionLease
from asyncrl.observe.spans import untraced
from asyncrl.ports import FailureClass, GroupStatus, Prompt, RewardScorer, RolloutEngine, SessionSpan, World
from asyncrl.protocol.batch_meta import TagValue
from asyncrl.tools import Tool
from asyncrl.transfer_queue import TransferQueue
from asyncrl.wording import first_of


class GroupRunner:
    """An async context manager; leaving it cancels the groups in flight."""

    def __init__(
        self,
        queue: TransferQueue,
        engine: RolloutEngine,
        scorer: RewardScorer,
        template: ChatTemplate,
        tools: Mapping[str, Tool],
        run: TrainRun,
        world: World,
        session_span: SessionSpan = untraced,
    ) -> None:
        """Raises ConfigError for an unknown agent loop or tool format."""
        self._queue = queue
        self._world = world
        self._tools = ToolRunner(tools, run.agent, world)
        self._parts = session_parts(
            run, engine=engine, scorer=scorer, template=template, tools=self._tools, world=world, session_span=session_span
        )
        self._group_size = run.rollout.n
        limit = run.agent.max_concurrent_sessions
        self._places = asyncio.Semaphore(limit) if limit else None
        self._group_tasks: set[asyncio.Task[None]] = set()
        self._owner = asyncio.TaskGroup()
        self._stack = AsyncExitStack()
        self._is_closing = False
        self._counts: Counter[str] = Counter()

    # --- life -------------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._world.offload(self._parts.template.codec.prepare)
        await self._stack.enter_async_context(self._tools)
        await self._owner.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_closing = True
        for task in self._group_tasks:
            task.cancel()
        # An error of the body is the body's: it leaves as it is, not wrapped into a group. A cancellation may be the group's own.
        cause = (kind, error, trace) if isinstance(error, asyncio.CancelledError) else (None, None, None)
        try:
            await self._owner.__aexit__(*cause)
        except BaseExceptionGroup as errors:
            first = first_of(errors)
            raise first from first.__cause__
        finally:
            await self._parts.guests.close()
            await self._stack.aclose()

    def start(self, prompt: Prompt) -> None:
        """Begin a group and return at once. What the store refuses of a group's own tag ends the runner with that error."""
        task = self._owner.create_task(self._run_group(prompt), name=f"group {prompt.uid}")
        self._group_tasks.add(task)
        task.add_done_callback(self._group_tasks.discard)

    async def join(self) -> None:
        """Wait until every started group is terminal; bounded by the sessions' deadlines."""
        while self._group_tasks:
            await asyncio.wait(self._group_tasks)

    def stats(self) -> dict[str, float]:
        """Counts so far: groups_<status>, sessions_<status>, stop_<cause>, tools/<outcome>; and now: groups_in_flight,
        sessions_abandoned, tools/abandoned."""
        now = {"groups_in_flight": len(self._group_tasks), "sessions_abandoned": self._parts.guests.num_late}
        tools = {f"tools/{name}": count for name, count in self._tools.stats().items()}
        return {**{name: float(count) for name, count in {**self._counts, **now}.items()}, **tools}

    # --- one group --------------------------------------------------------------------------------------------------------------

    async def _run_group(self, prompt: Prompt) -> None:
        lease = GroupLease(uid=prompt.uid)
        await self._queue.open_lease(lease)
        try:
            await self._tag(lease, status=GroupStatus.PENDING, is_prompt=True, global_steps=prompt.global_steps)
            failure = await self._run_sessions(prompt, lease)
            await self._settle(lease, failure)
        except asyncio.CancelledError as error:
            if not self._is_closing:  # nobody who may end a group has: it must not stay `running` for ever
                await self._settle(lease, failure_of(error, "the group was cancelled from inside"))
            raise
        finally:
            await self._queue.close_lease(lease)

    async def _run_sessions(self, prompt: Prompt, lease: GroupLease) -> SessionFailure | None:
        """Run all sessions to their end; returns the first failure in the order of the sessions."""
        try:
            # Off the loop: a long prompt takes milliseconds, and a thread hop is nothing beside a group.
            prompt_ids = tuple(await self._world.offload(self._parts.template.prompt_ids, prompt.messages))
        except Exception as error:  # a template may raise anything; it costs this group and is told by its class
            return failure_of(error)
        async with asyncio.TaskGroup() as siblings:
            tasks = [
                siblings.create_task(self._run_session(prompt, number, prompt_ids, lease), name=f"session {prompt.uid}_{number}")
                for number in range(self._group_size)
            ]
        return next(filter(None, map(_failure_in, tasks)), None)

    async def _settle(self, lease: GroupLease, failure: SessionFailure | None) -> None:
        status = GroupStatus.FINISHED if failure is None else GroupStatus.FAILURE
        try:
            await self._tag(lease, status=status, **({} if failure is None else {"failure": str(failure)}))
        except StaleLeaseError:  # the group was dropped meanwhile: its keys are gone, and nobody waits for it
            self._counts["groups_dropped"] += 1
        else:
            self._counts[f"groups_{status}"] += 1

    async def _tag(self, lease: GroupLease, **tag: TagValue) -> None:
        await self._queue.kv_put(lease.uid, partition_id=TRAIN, lease=lease, tag=tag)

    # --- one session ------------------------------------------------------------------------------------------------------------

    async def _run_session(
        self, prompt: Prompt, session_id: int, prompt_ids: tuple[int, ...], group: GroupLease
    ) -> SessionFailure | None:
        lease = SessionLease(uid=prompt.uid, session_id=session_id)
        async with AsyncExitStack() as place:
            if self._places is not None:
                await place.enter_async_context(self._places)  # bounded: each holder has a deadline
            try:
                failure = await self._run_and_write(prompt, lease, prompt_ids, group)
            except Exception as error:  # the store refused, or the rows could not be made: a put is whole or it is not there
                failure = failure_of(error)
            finally:
                await self._queue.close_lease(lease)
        self._counts["sessions_failed" if failure else "sessions_finished"] += 1
        return failure

    async def _run_and_write(
        self, prompt: Prompt, lease: SessionLease, prompt_ids: tuple[int, ...], group: GroupLease
    ) -> SessionFailure | None:
        if lease.session_id == 0:
            await self._tag(group, status=GroupStatus.RUNNING)
        await self._queue.open_lease(lease)
        version = self._parts.engine.version
        result = await run_session(prompt, lease.session_id, self._parts, prompt_ids=prompt_ids)
        if result.failure is not None:
            return result.failure
        self._counts.update(f"stop_{output.extra_fields.get('stop_reason', 'unknown')}" for output in result.outputs)
        rows = rows_of(prompt, lease.session_id, result.outputs, version=version)
        await self._queue.kv_batch_put(rows.keys, partition_id=TRAIN, lease=lease, fields=rows.fields, tags=rows.tags)
        return None


def _failure_in(task: asyncio.Task[SessionFailure | None]) -> SessionFailure | None:
    if task.cancelled():
        return SessionFailure(kind=FailureClass.INFRA, error="CancelledError", message="the session was cancelled from inside")
    return task.result()
