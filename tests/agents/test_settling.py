"""What of a group is kept, and when: turns as they end, a session and its group's status in one transaction."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.agents.runner import GroupRunner
from asyncrl.config import TrainRun
from asyncrl.errors import JournalWriteError
from asyncrl.journal.entries import Entry, PutRows, PutTurn, Saved
from asyncrl.journal.model import MemoryJournal
from asyncrl.keys import TRAIN
from asyncrl.ports import GenerateRequest, Prompt, RewardRequest, RewardResult
from asyncrl.protocol.ragged import rows_of
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.tools import load_tools
from asyncrl.transfer_queue import TransferQueue

NewRun = Callable[..., TrainRun]
Rig = Any  # the fixture's class lives in conftest, which is no module


class Noting(MemoryJournal):
    """Remembers its entries; fails from entry `fails_at` on."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self._fails_at = fails_at

    def append(self, entry: Entry, *, synced: bool = False) -> "asyncio.Future[None]":
        if len(self.entries) == self._fails_at:
            self.failure = JournalWriteError("journal.db: the disk is full")
        self.entries.append(entry)
        return super().append(entry, synced=synced)


def runner_of(rig: Rig, queue: TransferQueue, engine: ScriptedEngine, run: TrainRun) -> GroupRunner:
    return GroupRunner(queue, engine, rig.scorer, rig.template, load_tools(["calculator"]), run, rig.world)


def two_turns(rig: Rig) -> ScriptedEngine:
    """Call the calculator in the first turn, answer in the second."""
    engine: ScriptedEngine = rig.engine(lambda request: rig.call("1 + 2") if request.request_id.endswith("_0") else "3")
    return engine


def rows_in(entry: Entry) -> list[Any]:
    return [row for op in entry if isinstance(op, PutRows) for row in op.rows]


def is_trajectory(row: Any) -> bool:
    return row.session_id is not None


def prompts_in(entry: Entry) -> list[str]:
    return [str(row.tag["status"]) for row in rows_in(entry) if not is_trajectory(row)]


async def test_the_last_session_and_the_groups_end_are_one_entry(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    journal = Noting()
    queue = TransferQueue(journal)
    async with runner_of(rig, queue, two_turns(rig), new_run()) as runner:
        runner.start(prompt)
        await runner.join()
    settling = [entry for entry in journal.entries if any(is_trajectory(row) for row in rows_in(entry))]
    assert [prompts_in(entry) for entry in settling] == [[], ["finished"]]
    saved = journal.load()
    assert sorted(saved_keys(saved)) == ["a1", "a1_0_0", "a1_1_0"]
    assert (saved.leases, saved.turns) == ({}, {})
    assert (saved.counters["cursor"], saved.counters["admitted"]) == (1, 1)


def saved_keys(saved: Saved) -> list[str]:
    return [held.row.key for held in saved.rows.values()]


async def test_no_moment_of_the_journal_shows_a_settled_session_without_its_rows(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    journal = Noting()
    async with runner_of(rig, TransferQueue(journal), two_turns(rig), new_run()) as runner:
        for uid in ("a1", "b2"):
            runner.start(replace(prompt, uid=uid))
        await runner.join()
    state = Saved()
    for entry in journal.entries:
        state.apply(entry)
        keys = saved_keys(state)
        for (uid, session_id), lease in state.leases.items():
            if session_id is not None:
                assert lease.is_open != (f"{uid}_{session_id}_0" in keys)
        for held in state.rows.values():
            if held.row.tag.get("status") == "finished" and held.row.session_id is None:
                assert {f"{held.row.uid}_0_0", f"{held.row.uid}_1_0"} <= set(keys)


async def test_turns_are_kept_as_they_end_and_make_up_the_trajectory(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    queue = TransferQueue()
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: GenerateRequest) -> list[int]:
        if request.request_id.endswith("_0"):
            ids: list[int] = rig.template.encode_assistant(rig.call("1 + 2"))
            return ids
        reached.set()
        await go_on.wait()
        said: list[int] = rig.template.encode_assistant("3")
        return said

    engine = ScriptedEngine(answer, version=2)
    async with runner_of(rig, queue, engine, new_run(rollout={"n": 1})) as runner:
        runner.start(prompt)
        await reached.wait()
        (first,) = await queue.kv_turns("a1", 0)
        go_on.set()
        await runner.join()
    assert await queue.kv_turns("a1", 0) == []
    names = ["responses", "response_mask", "rollout_log_probs", "token_versions"]
    whole = await queue.kv_batch_get(["a1_0_0"], partition_id=TRAIN, fields=names)
    for name in names:
        kept, final = rows_of(first[name])[0], rows_of(whole[name])[0]
        assert kept.dtype == final.dtype
        assert 0 < len(kept) < len(final)
        assert kept.equal(final[: len(kept)])
    state = first.get("extra_fields").tolist()[0]
    assert [message["role"] for message in state["messages"]] == ["assistant", "tool"]
    assert (state["num_tool_calls"], state["tool_outcomes"], state["stop_reason"]) == (1, {"ok": 1}, "")


async def test_every_turn_is_one_entry_and_goes_with_its_session(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    journal = Noting()
    async with runner_of(rig, TransferQueue(journal), two_turns(rig), new_run()) as runner:
        runner.start(prompt)
        await runner.join()
    turns = [op for entry in journal.entries for op in entry if isinstance(op, PutTurn)]
    assert sorted((turn.session_id, turn.turn) for turn in turns) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("fails_at", range(8))
async def test_a_journal_that_fails_ends_the_runner_with_its_reason(
    fails_at: int, rig: Rig, prompt: Prompt, new_run: NewRun
) -> None:
    journal = Noting(fails_at=fails_at)

    async def run() -> None:
        async with TransferQueue(journal) as queue, runner_of(rig, queue, two_turns(rig), new_run()) as runner:
            runner.start(prompt)
            await runner.join()
            await asyncio.Event().wait()

    with pytest.raises(JournalWriteError, match="the disk is full"):
        await run()


async def test_a_group_of_a_restarted_run_carries_its_incarnation(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    journal = MemoryJournal(saved=Saved(incarnation=3))
    async with runner_of(rig, TransferQueue(journal, journal.load()), two_turns(rig), new_run()) as runner:
        runner.start(prompt)
        await runner.join()
    assert {held.row.incarnation for held in journal.load().rows.values()} == {3}


class OddScorer:
    """Returns beside the score what cannot be stored, for the first session of a group."""

    async def score(self, request: RewardRequest) -> RewardResult:
        is_first = request.extra_info["messages"][-1]["content"] == "bad"
        return RewardResult(score=1.0, extra={"seen": {1, 2} if is_first else 3})


async def test_what_the_store_refuses_of_a_session_fails_it_and_the_group_still_ends(
    rig: Rig, prompt: Prompt, new_run: NewRun
) -> None:
    journal = Noting()
    queue = TransferQueue(journal)
    engine = rig.engine(lambda request: "bad" if request.request_id.startswith("a1_0") else "3")
    runner = GroupRunner(queue, engine, OddScorer(), rig.template, load_tools(["calculator"]), new_run(), rig.world)
    async with runner:
        runner.start(prompt)
        await runner.join()
        stats = runner.stats()
    tags = (await queue.kv_list(TRAIN))[TRAIN]
    assert tags["a1"]["status"] == "failure"
    assert str(tags["a1"]["failure"]).startswith("FieldError (infra): field 'extra_fields' of key 'a1_0_0' cannot be stored")
    assert sorted(tags) == ["a1", "a1_1_0"]
    assert (stats["sessions_failed"], stats["sessions_finished"], stats["groups_failure"]) == (1.0, 1.0, 1.0)
    assert journal.load().leases == {}
