"""GroupRunner: runs every session of every admitted prompt as tasks, and writes their trajectories and the group's status.

Place: trainer.admit -> [GroupRunner.start] -> TransferQueue (rows, tags) -> replay; recovery -> [GroupRunner.resume]. It owns all
session tasks, nothing after them.

Invariants:
1. A group's prompt tag moves pending -> running -> finished | failure, and is terminal only when all its sessions have settled: no
   sibling writes afterwards.
2. A group is `finished` only if every session has written its trajectories; one failed session makes it `failure`, with the reason
   in its tag. The other sessions still run to their end.
3. Every started group becomes terminal, whatever is raised or cancelled inside it, as long as the runner is open.
4. A session that the machinery failed is tried again under a higher attempt, which shuts out whatever is left of the one before. It
   waits for that without a place of `agent.max_concurrent_sessions`.
5. A runner that is left writes nothing: what was under way stays so in the store, for `resume`.
"""

import asyncio
import functools
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from asyncrl.agents.alarm import Alarm
from asyncrl.agents.attempts import backoff_s, describe_retry, is_retried
from asyncrl.agents.group import CANCELLED_FROM_INSIDE, Group, baseline_of
from asyncrl.agents.live import Live
from asyncrl.agents.prompts import prompt_fields, prompt_tag
from asyncrl.agents.resuming import goes_on, kept_turns
from asyncrl.agents.rows import Rows, rows_of
from asyncrl.agents.session import SessionFailure, SessionParts, failure_of, run_session, session_parts
from asyncrl.agents.settling import Settling
from asyncrl.agents.tool_runner import ToolRunner
from asyncrl.config import TrainRun
from asyncrl.errors import DeadlineError, EngineLostError, JournalWriteError, StaleLeaseError
from asyncrl.keys import TRAIN, GroupLease, SessionLease
from asyncrl.observe.spans import untraced
from asyncrl.ports import (
    FailureClass,
    GroupStatus,
    Incident,
    IncidentKind,
    Prompt,
    Report,
    RewardScorer,
    RolloutEngine,
    SamplingParams,
    SessionSpan,
    Template,
    World,
    ignore_incident,
)
from asyncrl.tools import Tool
from asyncrl.transfer_queue import GroupUnderWay, TransferQueue
from asyncrl.waiting import back_off
from asyncrl.wording import first_of

if TYPE_CHECKING:
    from tensordict import TensorDict

LOST_STATE = SessionFailure(
    kind=FailureClass.INFRA,
    error="StaleLeaseError",
    message="its agent loop or a tool of it cannot go on in the middle after a restart: the session begins again",
)
"""Why a session begins again that no error has ended."""


class GroupRunner:
    """An async context manager; leaving it cancels the groups in flight. report: told of deadlines, retries and failed sessions."""

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
        report: Report = ignore_incident,
    ) -> None:
        """Raises ConfigError for an unknown agent loop or tool format."""
        self._queue = queue
        self._world = world
        self._report = report
        self._config = run.agent
        self._tools = ToolRunner(tools, run.agent, world)
        self._parts = session_parts(
            run,
            engine=engine,
            scorer=scorer,
            template=template,
            tools=self._tools,
            world=world,
            session_span=session_span,
            report=report,
        )
        self._group_size = run.rollout.n
        self._baseline_parts = replace(self._parts, sampling=SamplingParams(temperature=0.0)) if run.needs_baseline else None
        limit = run.agent.max_concurrent_sessions
        self._places = asyncio.Semaphore(limit) if limit else None
        self._groups: dict[str, Group] = {}
        self._group_tasks: set[asyncio.Task[None]] = set()
        self._owner = asyncio.TaskGroup()
        self._stack = AsyncExitStack()
        self._is_closing = False
        self.has_failed = False
        """A group's task has raised: the runner is at its end, and raises it when it is left."""
        self._counts: Counter[str] = Counter()
        self._settling = Settling(queue, self._counts, report)

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
        """Admit a group, at once and in the order of the calls, and begin it. Raises what the store refuses.

        What a group's own task raises ends the runner, and cancels the task that entered it; no group begins after it.
        """
        if self.has_failed:
            return
        group = self._new_group(prompt)
        fields, cursor = prompt_fields(prompt), prompt.number + 1
        kept = self._queue.admit(group.lease, partition_id=TRAIN, cursor=cursor, tag=prompt_tag(prompt), fields=fields)
        self._begin(group, kept)

    def resume(self, prompt: Prompt, found: GroupUnderWay) -> None:
        """Go on with a group that a restart found under way, at once, as `start`. Its settled sessions stay as they are; the others
        go on at their next turn, or are scored, where the last one had ended them."""
        if self.has_failed:
            return
        group = self._new_group(prompt)
        leases, kept = self._queue.reopen_group(group.lease, partition_id=TRAIN)
        group.told_failure = str(found.tag.get("failure", ""))
        if found.sessions:
            group.resumed = tuple(leases)
            group.num_settled = group.size - len(leases)
        self._begin(group, kept)

    def _new_group(self, prompt: Prompt) -> Group:
        lease = GroupLease(uid=prompt.uid, incarnation=self._queue.incarnation)
        return Group(prompt=prompt, lease=lease, size=self._group_size)

    def _begin(self, group: Group, kept: "asyncio.Future[None]") -> None:
        kept.add_done_callback(_look_at)
        self._own(group, self._run_group(group, kept))

    def _own(self, group: Group, work: Coroutine[None, None, None]) -> None:
        task = self._owner.create_task(work, name=f"group {group.prompt.uid}")
        self._groups[group.prompt.uid] = group
        self._group_tasks.add(task)
        task.add_done_callback(functools.partial(self._note_end, group))

    def _note_end(self, group: Group, task: "asyncio.Task[None]") -> None:
        self._groups.pop(group.prompt.uid, None)
        self._group_tasks.discard(task)
        self.has_failed |= not task.cancelled() and task.exception() is not None
        if task.cancelled() and not (group.is_settled or self._is_ending):  # before its first turn, where no code of its own runs
            self._own(group, self._settling.settle_group(group, CANCELLED_FROM_INSIDE))

    async def join(self) -> None:
        """Wait until every started group is terminal; bounded by the groups' deadlines."""
        while self._group_tasks:
            await asyncio.wait(self._group_tasks)

    @property
    def _is_ending(self) -> bool:
        """Who is cancelled now has been asked to end: by the runner's end, or because another group has ended the run."""
        return self._is_closing or self.has_failed

    # --- sight ------------------------------------------------------------------------------------------------------------------

    def describe(self, uid: str) -> str:
        """What each session of a group is at: attempt, turn, state, seconds. One line."""
        group = self._groups.get(uid)
        return f"group {uid} is not under way" if group is None else group.describe()

    def take_lengths(self) -> list[int]:
        """Policy tokens of each trajectory that was settled since the last call."""
        lengths, self._settling.lengths = self._settling.lengths, []
        return lengths

    def stats(self) -> dict[str, float]:
        """Counts so far: groups_<status>, sessions_finished, sessions_failed, sessions_retried (attempts that were followed by
        another), stop_<cause>, tools/<outcome>; and now: groups_in_flight, sessions_abandoned, tools/abandoned."""
        now = {"groups_in_flight": len(self._group_tasks), "sessions_abandoned": self._parts.guests.num_late}
        tools = {f"tools/{name}": count for name, count in self._tools.stats().items()}
        return {**{name: float(count) for name, count in {**self._counts, **now}.items()}, **tools}

    # --- one group --------------------------------------------------------------------------------------------------------------

    async def _run_group(self, group: Group, kept: "asyncio.Future[None]") -> None:
        try:
            await kept
            async with Alarm(self._config.group_timeout_s, functools.partial(self._note_late, group)):
                await self._run_sessions(group)
        except DeadlineError as error:
            if not group.is_late:  # it is the journal's
                raise
            self._counts["sessions_failed"] += group.size - group.num_settled
            await self._settling.settle_group(group, group.failure or failure_of(error))
        except asyncio.CancelledError as error:
            if not self._is_ending:  # nobody who may end a group has: it must not stay `running` for ever
                await self._settling.settle_group(group, failure_of(error, "the group was cancelled from inside"))
            raise

    def _note_late(self, group: Group) -> str:
        """For the alarm: "" for a group that only waits until its end is kept."""
        if group.is_settled:
            return ""
        group.is_late = True
        uid, limit = group.prompt.uid, "agent.group_timeout_s"
        text = f"group {uid} took longer than {limit} = {self._config.group_timeout_s:g} s: {group.describe()}"
        self._report(Incident(kind=IncidentKind.DEADLINE, what="group", text=text, uid=uid, limit=limit))
        return text

    async def _run_sessions(self, group: Group) -> None:
        """Run all sessions to their end; the last one that settles ends the group, and otherwise this does."""
        if group.num_settled == group.size:  # before a restart, and the process did not come to the group's own end
            await self._settling.settle_group(group, group.failure)
            return
        try:
            # Off the loop: a long prompt takes milliseconds, and a thread hop is nothing beside a group.
            group.prompt_ids = tuple(await self._world.offload(self._parts.template.prompt_ids, group.prompt.messages))
            leases = group.resumed or await self._begin_sessions(group)
        except JournalWriteError:
            raise
        except Exception as error:  # a template may raise anything; it costs this group and is told by its class
            await self._settling.settle_group(group, failure_of(error))
            return
        async with asyncio.TaskGroup() as siblings:
            if self._baseline_parts is not None:
                work = self._run_baseline(group, self._baseline_parts)
                group.baseline = siblings.create_task(work, name=f"baseline {group.prompt.uid}")
            for lease in leases:
                siblings.create_task(self._run_session(group, lease), name=f"session {group.prompt.uid}_{lease.session_id}")
        if not group.is_settled:
            await self._settling.settle_group(group, group.failure or CANCELLED_FROM_INSIDE)

    async def _begin_sessions(self, group: Group) -> list[SessionLease]:
        uid, incarnation = group.lease.uid, group.lease.incarnation
        leases = [SessionLease(uid=uid, session_id=number, incarnation=incarnation) for number in range(group.size)]
        await self._queue.begin_sessions(group.lease, leases, partition_id=TRAIN, tag={"status": GroupStatus.RUNNING})
        return leases

    # --- the greedy session -----------------------------------------------------------------------------------------------------

    async def _run_baseline(self, group: Group, parts: SessionParts) -> "float | SessionFailure":
        """The score of one greedy session, which writes nothing and is tried again as the others are. It takes no place of
        `agent.max_concurrent_sessions`: those who hold one wait for it."""
        attempt = 0
        while True:
            live = group.live[group.size] = Live(group.prompt.uid, group.size, self._world.now, attempt=attempt)
            result = await run_session(group.prompt, group.size, parts, prompt_ids=group.prompt_ids, live=live)
            if result.failure is None:
                break
            if not is_retried(result.failure, attempt=attempt, config=self._config):
                del group.live[group.size]
                failure = replace(result.failure, message=f"the greedy session failed: {result.failure.message}")
                self._report(live.incident(IncidentKind.FAILURE, "session", str(failure)))
                return failure
            attempt += 1
            await self._back_off(live, result.failure, attempt)
        del group.live[group.size]
        score = result.outputs[-1].reward_score
        assert score is not None
        return score

    # --- one session ------------------------------------------------------------------------------------------------------------

    async def _run_session(self, group: Group, lease: SessionLease) -> None:
        """Attempt after attempt, until one of them settles the session, or its group is gone."""
        turns: Sequence[TensorDict] = await self._queue.kv_turns(lease.uid, lease.session_id) if group.resumed else ()
        attempt: SessionLease | None = lease
        if turns and not goes_on(self._parts.loop, self._tools.tools, turns):
            live = Live(lease.uid, lease.session_id, self._world.now, attempt=lease.attempt)
            attempt, turns = await self._open_next(group, lease, live, LOST_STATE), ()
        while attempt is not None:
            attempt, turns = await self._run_attempt(group, attempt, turns), ()

    async def _run_attempt(self, group: Group, lease: SessionLease, turns: "Sequence[TensorDict]") -> SessionLease | None:
        """Run a session and settle it. Returns the lease of the next attempt, when there is to be one and its time has come."""
        live = group.live[lease.session_id] = Live(lease.uid, lease.session_id, self._world.now, attempt=lease.attempt)
        async with AsyncExitStack() as place:
            if self._places is not None:
                with live.at("wait for a place"):
                    await place.enter_async_context(self._places)  # bounded: each holder has a deadline
            try:
                await self._world.site("agents.session")  # its lease is open and nobody else writes: it may begin late
                rows = await self._run(group, lease, live, turns)
            except Exception as error:  # the store refused, or the rows could not be made
                rows = failure_of(error)
            if not isinstance(rows, Rows):
                self._check_engine(rows)
            if isinstance(rows, Rows) or not self._is_retried(group, lease, rows):
                await self._world.site("agents.settle")  # nothing of it is written yet, and its siblings do not wait for it
                with live.at("settle"):
                    await self._settling.settle_session(group, lease, rows)
                return None
        again = await self._open_next(group, lease, live, rows)
        if again is not None:
            await self._back_off(live, rows, again.attempt)
        return again

    def _check_engine(self, failure: SessionFailure) -> None:
        """A run without an engine ends at once: its groups stay under way for the next start, which no failed one would."""
        if failure.kind is FailureClass.INFRA and (reason := self._parts.engine.failure) is not None:
            raise EngineLostError(f"{reason}; go on with --resume")

    def _is_retried(self, group: Group, lease: SessionLease, failure: SessionFailure) -> bool:
        """Not for the greedy session's sake: that had its own attempts."""
        return failure is not group.baseline_failure and is_retried(failure, attempt=lease.attempt, config=self._config)

    async def _open_next(self, group: Group, lease: SessionLease, live: Live, failure: SessionFailure) -> SessionLease | None:
        """The lease of the next attempt, which takes away what this one has written. None: the group was dropped meanwhile."""
        again = replace(lease, attempt=lease.attempt + 1)
        try:
            await self._queue.open_lease(again)
        except StaleLeaseError as error:
            self._settling.note_refused(group, lease, error)
            return None
        self._counts["sessions_retried"] += 1
        if failure is LOST_STATE:
            self._report(live.incident(IncidentKind.RETRY, "session", failure.message))
        return again

    async def _back_off(self, live: Live, failure: SessionFailure, attempt: int) -> None:
        """Wait before attempt `attempt`."""
        self._report(live.incident(IncidentKind.RETRY, "session", describe_retry(failure, attempt=attempt, config=self._config)))
        with live.at("back-off"):
            await back_off(backoff_s(attempt=attempt, config=self._config))

    async def _run(self, group: Group, lease: SessionLease, live: Live, turns: "Sequence[TensorDict]") -> "Rows | SessionFailure":
        version = self._parts.engine.version
        result = await run_session(
            group.prompt,
            lease.session_id,
            self._parts,
            prompt_ids=group.prompt_ids,
            keep_turn=functools.partial(self._queue.put_turn, lease),
            kept=kept_turns(turns),
            live=live,
        )
        if result.failure is not None:
            return result.failure
        self._counts.update(f"stop_{output.extra_fields.get('stop_reason', 'unknown')}" for output in result.outputs)
        with live.at("wait for the greedy session"):
            baseline = await baseline_of(group)
        if isinstance(baseline, SessionFailure):
            return baseline
        return rows_of(group.prompt, lease.session_id, result.outputs, version=version, baseline=baseline)


def _look_at(kept: "asyncio.Future[None]") -> None:
    """A group that was cancelled before its first turn of the loop has not waited for it, and asyncio would log it as forgotten."""
    if not kept.cancelled():
        kept.exception()
