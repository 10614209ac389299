"""GroupRunner: runs every session of every admitted prompt as tasks, and writes their trajectories and the group's status.

Place: trainer.admit -> [GroupRunner.start] -> TransferQueue (rows, tags) -> replay. It owns all session tasks, nothing after them.

Invariants:
1. A group's prompt tag moves pending -> running -> finished | failure, and is terminal only when all its sessions have settled: no
   sibling writes afterwards.
2. A group is `finished` only if every session has written its trajectories; one failed session makes it `failure`, with the reason
   in its tag. The other sessions still run to their end.
3. Every started group becomes terminal, whatever is raised or cancelled inside it, as long as the runner is open.
4. A session writes under its own lease. Its rows, the end of its lease and, when it is the last, the group's status and the end of
   the group's lease are one transaction: no moment shows a part of them.
"""

import asyncio
import functools
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from asyncrl.agents.rows import Rows, rows_of
from asyncrl.agents.session import SessionFailure, SessionParts, failure_of, run_session, session_parts
from asyncrl.agents.tool_runner import ToolRunner
from asyncrl.config import TrainRun
from asyncrl.errors import FieldError, JournalWriteError, StaleLeaseError, StoreError, StrayCancelError
from asyncrl.fields import Tag
from asyncrl.keys import TRAIN, GroupLease, SessionLease
from asyncrl.observe.spans import untraced
from asyncrl.ports import (
    FailureClass,
    GroupStatus,
    Prompt,
    RewardScorer,
    RolloutEngine,
    SamplingParams,
    SessionSpan,
    Template,
    World,
)
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
        template: Template,
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
        self._baseline_parts = replace(self._parts, sampling=SamplingParams(temperature=0.0)) if run.needs_baseline else None
        limit = run.agent.max_concurrent_sessions
        self._places = asyncio.Semaphore(limit) if limit else None
        self._group_tasks: set[asyncio.Task[None]] = set()
        self._owner = asyncio.TaskGroup()
        self._stack = AsyncExitStack()
        self._is_closing = False
        self.has_failed = False
        """A group's task has raised: the runner is at its end, and raises it when it is left."""
        self._counts: Counter[str] = Counter()

    # --- life -------------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._world.offload(self._parts.template.prepare)
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
        """Begin a group and return at once. What the store refuses of a group's own tag ends the runner with that error, and
        cancels the task that entered it; no group begins after it."""
        if self.has_failed:
            return
        task = self._owner.create_task(self._run_group(prompt), name=f"group {prompt.uid}")
        self._group_tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._group_tasks.discard(task)
        self.has_failed |= not task.cancelled() and task.exception() is not None

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
        group = _Group(prompt=prompt, lease=GroupLease(uid=prompt.uid, incarnation=self._queue.incarnation), size=self._group_size)
        try:
            await self._admit(group)
            await self._run_sessions(group)
        except asyncio.CancelledError as error:
            if not self._is_closing:  # nobody who may end a group has: it must not stay `running` for ever
                await self._settle_group(group, failure_of(error, "the group was cancelled from inside"))
            raise
        finally:
            await self._close(group)

    async def _close(self, group: "_Group") -> None:
        """End the group's lease. A group that is not at its end takes the run along: no cancellation from inside may hide that."""
        try:
            await self._queue.close_lease(group.lease)
        except asyncio.CancelledError as error:
            if group.is_settled or self._is_closing or self.has_failed:
                raise
            raise StrayCancelError(f"group {group.prompt.uid} was cancelled at its end, and nobody had asked for it") from error

    async def _admit(self, group: "_Group") -> None:
        prompt = group.prompt
        tag: Tag = {"status": GroupStatus.PENDING, "is_prompt": True, "global_steps": prompt.global_steps}
        fields = {"raw_prompt": prompt.messages, "data_source": prompt.data_source}
        await self._queue.admit(group.lease, partition_id=TRAIN, cursor=prompt.number + 1, tag=tag, fields=fields)

    async def _run_sessions(self, group: "_Group") -> None:
        """Run all sessions to their end; the last one that settles ends the group, and otherwise this does."""
        try:
            # Off the loop: a long prompt takes milliseconds, and a thread hop is nothing beside a group.
            group.prompt_ids = tuple(await self._world.offload(self._parts.template.prompt_ids, group.prompt.messages))
            leases = await self._begin_sessions(group)
        except JournalWriteError:
            raise
        except Exception as error:  # a template may raise anything; it costs this group and is told by its class
            await self._settle_group(group, failure_of(error))
            return
        async with asyncio.TaskGroup() as siblings:
            if self._baseline_parts is not None:
                work = self._run_baseline(group, self._baseline_parts)
                group.baseline = siblings.create_task(work, name=f"baseline {group.prompt.uid}")
            for lease in leases:
                siblings.create_task(self._run_session(group, lease), name=f"session {group.prompt.uid}_{lease.session_id}")
        if not group.is_settled:
            await self._settle_group(group, group.failure or CANCELLED_FROM_INSIDE)

    async def _run_baseline(self, group: "_Group", parts: SessionParts) -> "float | SessionFailure":
        """The score of one greedy session, which writes nothing. It takes no place of `agent.max_concurrent_sessions`: those who
        hold one wait for it."""
        result = await run_session(group.prompt, group.size, parts, prompt_ids=group.prompt_ids)
        if result.failure is not None:
            return replace(result.failure, message=f"the greedy session failed: {result.failure.message}")
        score = result.outputs[-1].reward_score
        assert score is not None
        return score

    async def _begin_sessions(self, group: "_Group") -> list[SessionLease]:
        uid, incarnation = group.lease.uid, group.lease.incarnation
        leases = [SessionLease(uid=uid, session_id=number, incarnation=incarnation) for number in range(group.size)]
        tag: Tag = {"status": GroupStatus.RUNNING}
        await self._queue.begin_sessions(group.lease, leases, partition_id=TRAIN, tag=tag)
        return leases

    async def _settle_group(self, group: "_Group", failure: SessionFailure) -> None:
        """End a group that no session ended."""
        if group.is_settled:
            return
        group.is_settled = True
        try:
            await self._queue.settle_group(group.lease, partition_id=TRAIN, tag=_last_tag(failure))
        except StaleLeaseError:  # the group was dropped meanwhile: its keys are gone, and nobody waits for it
            self._counts["groups_dropped"] += 1
        else:
            self._counts[f"groups_{GroupStatus.FAILURE}"] += 1

    # --- one session ------------------------------------------------------------------------------------------------------------

    async def _run_session(self, group: "_Group", lease: SessionLease) -> None:
        async with AsyncExitStack() as place:
            if self._places is not None:
                await place.enter_async_context(self._places)  # bounded: each holder has a deadline
            try:
                await self._world.site("agents.session")  # its lease is open and nobody else writes: it may begin late
                rows = await self._run(group, lease)
            except Exception as error:  # the store refused, or the rows could not be made
                rows = failure_of(error)
            await self._world.site("agents.settle")  # nothing of it is written yet, and its siblings do not wait for it
            await self._settle_session(group, lease, rows)

    async def _run(self, group: "_Group", lease: SessionLease) -> "Rows | SessionFailure":
        version = self._parts.engine.version
        keep_turn = functools.partial(self._queue.put_turn, lease)
        result = await run_session(group.prompt, lease.session_id, self._parts, prompt_ids=group.prompt_ids, keep_turn=keep_turn)
        if result.failure is not None:
            return result.failure
        self._counts.update(f"stop_{output.extra_fields.get('stop_reason', 'unknown')}" for output in result.outputs)
        baseline = await _baseline_of(group)
        if isinstance(baseline, SessionFailure):
            return baseline
        return rows_of(group.prompt, lease.session_id, result.outputs, version=version, baseline=baseline)

    async def _settle_session(self, group: "_Group", lease: SessionLease, rows: "Rows | SessionFailure") -> None:
        """Write a session's rows and end it, and with the last of its siblings the group. What the store refuses is its failure."""
        try:
            await self._write(group, lease, rows)
        except JournalWriteError:
            raise  # nothing can be kept any more: that is the run's end, not the session's
        except (StoreError, FieldError) as error:
            if isinstance(rows, Rows) and not isinstance(error, StaleLeaseError):  # a put is whole or it is not there
                await self._write(group, lease, failure_of(error))
                return
            group.failures[lease.session_id] = failure_of(error)  # its lease was not open, or is not any more
            self._counts["sessions_failed"] += 1

    async def _write(self, group: "_Group", lease: SessionLease, rows: "Rows | SessionFailure") -> None:
        if isinstance(rows, SessionFailure):
            group.failures[lease.session_id] = rows
            rows = NO_ROWS
        is_last = group.num_settled + 1 == group.size
        last_tag = _last_tag(group.failure) if is_last else None
        if is_last and group.baseline is not None:
            group.baseline.cancel()  # nobody waits for it any more: it asks for nothing after the group's end
        group.num_settled += 1
        group.is_settled = is_last
        try:
            await self._queue.settle_session(
                lease, partition_id=TRAIN, keys=rows.keys, fields=rows.fields, tags=rows.tags, group_tag=last_tag
            )
        except (StoreError, FieldError):
            group.num_settled -= 1
            group.is_settled = False
            raise
        self._counts["sessions_failed" if lease.session_id in group.failures else "sessions_finished"] += 1
        if last_tag is not None:
            self._counts[f"groups_{last_tag['status']}"] += 1


CANCELLED_FROM_INSIDE = SessionFailure(
    kind=FailureClass.INFRA, error="CancelledError", message="the session was cancelled from inside"
)
NO_ROWS = Rows(keys=[], fields={}, tags=[])
"""Of a session that failed."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """What the sessions of one prompt share. `failures`: by session."""

    prompt: Prompt
    lease: GroupLease
    size: int
    prompt_ids: tuple[int, ...] = ()
    baseline: "asyncio.Task[float | SessionFailure] | None" = None
    num_settled: int = 0
    is_settled: bool = False
    failures: dict[int, SessionFailure] = field(default_factory=dict)

    @property
    def failure(self) -> SessionFailure | None:
        """The first one, in the order of the sessions."""
        return self.failures[min(self.failures)] if self.failures else None


async def _baseline_of(group: _Group) -> "float | SessionFailure | None":
    """The score of the group's greedy session, once it is there; bounded by that session's deadline. None: there is none."""
    if group.baseline is None:
        return None
    await asyncio.wait([group.baseline])  # not the task itself: whoever is cancelled here must not cancel it for the others
    return CANCELLED_FROM_INSIDE if group.baseline.cancelled() else group.baseline.result()


def _last_tag(failure: SessionFailure | None) -> Tag:
    if failure is None:
        return {"status": GroupStatus.FINISHED}
    return {"status": GroupStatus.FAILURE, "failure": str(failure)}
