"""Bugs in the room of the agents: groups, sessions, tools, tokens."""

import asyncio
from collections.abc import Iterator
from typing import Any

from asyncrl.agents import rows, runner, session, settling
from asyncrl.agents.group import NO_ROWS, last_tag
from asyncrl.agents.guests import Guests
from asyncrl.agents.live import Live
from asyncrl.agents.rows import Rows
from asyncrl.agents.runner import GroupRunner
from asyncrl.agents.session import SessionFailure
from asyncrl.agents.settling import Settling
from asyncrl.agents.token_builder import NO_VERSION, TokenBuilder
from asyncrl.agents.tool_runner import ToolAnswer, ToolRunner
from asyncrl.errors import DeadlineError, RewardError
from asyncrl.keys import TRAIN
from asyncrl.ports import GroupStatus, RewardResult
from asyncrl.rewards.scoring import Scorer
from tests.simulation.planted.bug import bug, replaced

# --- groups


@bug("a group that is cancelled from inside keeps its tag `running`: `except Exception` does not see a cancellation")
def cancelled_group_stays_running() -> Iterator[None]:
    async def run_group(self: Any, group: Any, kept: Any) -> None:
        try:
            await kept
            await self._run_sessions(group)
        except Exception as error:
            await self._settling.settle_group(group, session.failure_of(error))
            raise

    with replaced(GroupRunner, _run_group=run_group):
        yield


@bug("a group whose session was cancelled from inside is left alone: the other sessions ended it, or nobody did")
def last_session_may_be_lost() -> Iterator[None]:
    async def run_sessions(self: Any, group: Any) -> None:
        group.prompt_ids = tuple(await self._world.offload(self._parts.template.prompt_ids, group.prompt.messages))
        leases = group.resumed or await self._begin_sessions(group)
        async with asyncio.TaskGroup() as siblings:
            for lease in leases:
                siblings.create_task(self._run_session(group, lease), name=f"session {group.prompt.uid}_{lease.session_id}")

    with replaced(GroupRunner, _run_sessions=run_sessions):
        yield


@bug("an error in a group's own task is logged, and nobody hears of it")
def group_error_swallowed() -> Iterator[None]:
    right = GroupRunner._run_group

    async def run_group(self: Any, group: Any, kept: Any) -> None:
        try:
            await right(self, group, kept)
        except Exception:
            return

    with replaced(GroupRunner, _run_group=run_group):
        yield


@bug("the first session that fails publishes its group as failed, while its siblings still run")
def status_before_siblings() -> Iterator[None]:
    right = Settling._write

    async def write(self: Any, group: Any, lease: Any, rows: Any) -> None:
        if isinstance(rows, SessionFailure) and not group.is_settled:
            group.is_settled = True
            await self._queue.settle_group(group.lease, partition_id=TRAIN, tag=last_tag(rows))
            return
        await right(self, group, lease, rows)

    with replaced(Settling, _write=write):
        yield


@bug("a group is finished one session too early")
def finished_one_early() -> Iterator[None]:
    right = Settling._write

    async def write(self: Any, group: Any, lease: Any, rows: Any) -> None:
        size, group.size = group.size, group.size - 1
        try:
            await right(self, group, lease, rows)
        finally:
            group.size = size

    with replaced(Settling, _write=write):
        yield


@bug("a session's rows, the end of its lease and the group's status are transactions of their own")
def settled_in_pieces() -> Iterator[None]:
    async def write(self: Any, group: Any, lease: Any, rows: Any) -> None:
        if isinstance(rows, SessionFailure):
            group.failures[lease.session_id] = rows
            rows = NO_ROWS
        if rows.keys:
            await self._queue.kv_batch_put(rows.keys, partition_id=TRAIN, lease=lease, fields=rows.fields, tags=rows.tags)
        await self._queue.close_lease(lease)
        group.num_settled += 1
        if group.num_settled == group.size:
            group.is_settled = True
            await self._queue.settle_group(group.lease, partition_id=TRAIN, tag=last_tag(group.failure))

    with replaced(Settling, _write=write):
        yield


@bug("a failed session has `finished` groups all the same: its rows are not there")
def failure_counts_as_finished() -> Iterator[None]:
    with replaced(settling, last_tag=lambda failure: {"status": GroupStatus.FINISHED}):
        yield


# --- places and deadlines


def _guests_run(limit_of: Any) -> Any:
    right = Guests.run

    async def run(self: Any, guest: Any, *, name: str, timeout_s: float, limit: str) -> Any:
        return await right(self, guest, name=name, timeout_s=limit_of(name, timeout_s), limit=limit)

    return run


@bug("tools have no deadline")
def tool_without_deadline() -> Iterator[None]:
    with replaced(Guests, run=_guests_run(lambda name, timeout_s: 1e6 if name.startswith("tool") else timeout_s)):
        yield


@bug("sessions have no deadline", changes=("sim.faults.await_hang=0.01",))
def session_without_deadline() -> Iterator[None]:
    with replaced(Guests, run=_guests_run(lambda name, timeout_s: 1e6 if name.startswith("session") else timeout_s)):
        yield


@bug("a guest whose caller has gone is not cancelled, and not counted as left behind")
def guest_forgotten() -> Iterator[None]:
    async def run(self: Any, guest: Any, *, name: str, timeout_s: float, limit: str) -> Any:
        task = asyncio.create_task(guest, name=f"guest: {name}")
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise DeadlineError(f"{name} took longer than {limit} = {timeout_s:g} s")
        return task.result()

    with replaced(Guests, run=run):
        yield


def _answer(release: Any) -> Any:
    async def answer(self: Any, call: Any, tools_kwargs: Any) -> ToolAnswer:
        tool, places = self.tools[call.name], self._places[call.name]
        await places.acquire()
        ended = False
        try:
            found: ToolAnswer = await self._call(tool, tool.check(call.arguments), tools_kwargs.get(call.name) or {})
            ended = True
            return found
        finally:
            for _ in range(release(ended)):
                places.release()

    return answer


@bug("a tool's place is given back only when the call ends well")
def tool_place_leaks() -> Iterator[None]:
    with replaced(ToolRunner, _answer=_answer(int)):
        yield


@bug("a tool's place is given back twice when the call does not end well")
def tool_place_freed_twice() -> Iterator[None]:
    with replaced(ToolRunner, _answer=_answer(lambda ended: 1 if ended else 2)):
        yield


@bug("tool calls do not wait for a place")
def tools_without_places() -> Iterator[None]:
    with replaced(ToolRunner, _answer=lambda self, call, given: self._call(self.tools[call.name], call.arguments, {})):
        yield


@bug("a session's place is given back only when the session succeeds")
def session_place_leaks() -> Iterator[None]:
    async def run_attempt(self: Any, group: Any, lease: Any, turns: Any) -> None:
        live = group.live[lease.session_id] = Live(lease.uid, lease.session_id, self._world.now)
        await self._places.acquire()
        try:
            rows = await self._run(group, lease, live, turns)
        except Exception as error:
            rows = session.failure_of(error)
        await self._settling.settle_session(group, lease, rows)
        if isinstance(rows, Rows):
            self._places.release()

    with replaced(GroupRunner, _run_attempt=run_attempt):
        yield


# --- tokens and rewards


@bug("a reward that fails is 0")
def reward_failure_is_zero() -> Iterator[None]:
    right = Scorer.score

    async def score(self: Any, request: Any) -> RewardResult:
        try:
            return await right(self, request)
        except (RewardError, DeadlineError):
            return RewardResult(score=0.0)

    with replaced(Scorer, score=score):
        yield


@bug("log-probs are shifted by one token")
def log_probs_shifted() -> Iterator[None]:
    right = TokenBuilder._grow

    def grow(self: Any, ids: Any, mask: int, log_probs: Any, versions: Any) -> None:
        right(self, ids, mask, [*log_probs[1:], 0.0], versions)

    with replaced(TokenBuilder, _grow=grow):
        yield


@bug("the mask is 1 on a tool's tokens, too")
def mask_on_tool_tokens() -> Iterator[None]:
    right = TokenBuilder._grow

    def grow(self: Any, ids: Any, mask: int, log_probs: Any, versions: Any) -> None:
        right(self, ids, 1, log_probs, versions)

    with replaced(TokenBuilder, _grow=grow):
        yield


@bug("the last sampled token is encoded again, and comes out as another")
def last_token_rewritten() -> Iterator[None]:
    right = TokenBuilder.add_environment

    def add_environment(self: Any, ids: Any) -> None:
        self._ids[-1] += 1
        right(self, ids)

    with replaced(TokenBuilder, add_environment=add_environment):
        yield


@bug("all tokens of a trajectory have the version of the dispatch")
def versions_of_the_dispatch() -> Iterator[None]:
    right = rows.rows_of

    def rows_of(prompt: Any, session_id: int, outputs: Any, *, version: int, baseline: Any) -> Rows:
        made = right(prompt, session_id, outputs, version=version, baseline=baseline)
        columns = made.fields["token_versions"]
        made.fields["token_versions"] = [[NO_VERSION if one == NO_VERSION else version + 1 for one in column] for column in columns]
        return made

    with replaced(runner, rows_of=rows_of):
        yield


@bug("the prompt's ids are rendered once for all groups")
def prompt_ids_of_another_group() -> Iterator[None]:
    first: list[tuple[int, ...]] = []
    right = session.run_session

    async def run_session(*arguments: Any, prompt_ids: tuple[int, ...], **named: Any) -> Any:
        first.append(prompt_ids)
        return await right(*arguments, prompt_ids=first[0], **named)

    with replaced(runner, run_session=run_session):
        yield
