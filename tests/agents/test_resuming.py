"""A restart at any moment: sessions go on at their next turn, and come to what they would have come to."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncrl.agents.token_builder import TokenBuilder, as_sampled
from asyncrl.agents.tool_agent import ToolAgent
from asyncrl.config import TrainRun
from asyncrl.errors import EngineError, FieldError
from asyncrl.fields import CATALOGUE
from asyncrl.journal.model import JournalDisk, MemoryJournal
from asyncrl.keys import TRAIN
from asyncrl.ports import GenerateRequest, Prompt
from asyncrl.recovery import open_groups
from asyncrl.tools import FunctionTool, Tool
from asyncrl.transfer_queue import TransferQueue

NewRun = Callable[..., TrainRun]
Rig = Any  # the fixtures' classes live in conftest, which is no module
Virtual = Callable[..., Any]
COLUMNS = [name for name, entry in CATALOGUE.items() if entry.is_of_row]

# --- lives of one journal ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Lives:
    """Processes of one run, one after the other, over one journal's disk."""

    rig: Rig
    run: TrainRun
    prompt: Prompt
    script: Callable[[GenerateRequest], str]
    tools: dict[str, Tool] | None = None
    wrap: Callable[[Any], None] = lambda runner: None
    stats: dict[str, float] = field(default_factory=dict)

    async def live(self, disk: JournalDisk, until: "asyncio.Event | None" = None) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """One life, to the group's end or `until`: the tags and columns that it leaves. A settled group is left as it is."""
        journal = MemoryJournal(disk=disk)
        async with TransferQueue(journal, journal.load()) as queue:
            runner = self.rig.runner(queue, self.rig.engine(self.script), self.run, self.tools)
            self.wrap(runner)
            async with runner:
                for group in await open_groups(queue):
                    runner.resume(group.prompt, group.found)
                if not queue.groups_under_way(TRAIN):
                    runner.start(self.prompt)
                await (runner.join() if until is None else until.wait())
                self.stats = runner.stats()
            return await self._left(queue)

    async def _left(self, queue: TransferQueue) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        tags = (await queue.kv_list(TRAIN))[TRAIN]
        keys = sorted(key for key in tags if key != self.prompt.uid)
        if not keys:
            return tags, {}
        columns = await queue.kv_batch_get(keys, partition_id=TRAIN, fields=COLUMNS)
        rows = {name: columns.get(name) for name in COLUMNS}
        return tags, {name: [row.tolist() if hasattr(row, "tolist") else row for row in values] for name, values in rows.items()}


def asked(request: GenerateRequest) -> tuple[Any, ...]:
    return request.request_id, request.seed, tuple(request.prompt_ids), request.sampling


# --- exactness --------------------------------------------------------------------------------------------------------------------

TURNS = {
    "call": '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>',
    "two": '<tool_call>{"name": "calculator", "arguments": {"expression": "1 / 0"}}</tool_call>'
    '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
    "malformed": "<tool_call>nonsense</tool_call>",
    "split": '<tool_call>{"name": "calculator", "arguments": {"expression": "</tool_call>"}}</tool_call>',
    "answer": "3",
}


def script_of(turns: list[list[str]]) -> Callable[[GenerateRequest], str]:
    """What session s says in turn t, with the seed in its text: a wrong seed is another trajectory."""

    def say(request: GenerateRequest) -> str:
        _, session, turn, *position = map(str, request.request_id.split("_"))
        if position:
            return '"}}</tool_call>'
        kinds = turns[int(session) % len(turns)]
        kind = kinds[int(turn)] if int(turn) < len(kinds) else "answer"
        return f"{request.seed % 100_000} {TURNS[kind]}"

    return say


SESSIONS = st.lists(st.lists(st.sampled_from(sorted(TURNS)), min_size=1, max_size=5), min_size=1, max_size=2)


@settings(  # not shrunk: an example is dozens of lives, and its scripts are short
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    turns=SESSIONS,
    agent=st.fixed_dictionaries(
        {
            "parallel_tool_calls": st.booleans(),
            "max_turns": st.integers(1, 5),
            "max_tool_calls": st.integers(1, 3),
            "max_parse_errors": st.integers(1, 2),
            "max_tokens_per_turn": st.sampled_from([0, 40]),
        }
    ),
    room=st.integers(60, 500),
)
def test_a_session_that_was_cut_anywhere_comes_to_what_it_would_have(
    in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun, turns: list[list[str]], agent: dict[str, Any], room: int
) -> None:
    run = new_run(agent=agent, data={"max_response_length": room})
    whole = JournalDisk()

    async def first(rig: Rig) -> Any:
        return await Lives(rig=rig, run=run, prompt=prompt, script=script_of(turns)).live(whole), list(map(asked, rig.requests))

    expected, requests = in_virtual_time(first)
    assert expected[0]["a1"]["status"] == "finished"
    for cut in range(whole.num_entries + 1):
        disk = whole.copy()
        disk.keep(cut)
        for again in (cut * 7, None):  # a second crash, in the life after the first

            async def next_life(rig: Rig, disk: JournalDisk = disk) -> Any:
                num_turns = {f"a1_{number}": len(kept) for (_, number), kept in disk.saved.turns.items()}
                found = await Lives(rig=rig, run=run, prompt=prompt, script=script_of(turns)).live(disk)
                return found, list(map(asked, rig.requests)), num_turns

            found, asked_again, num_turns = in_virtual_time(next_life, seed=cut)
            assert found == expected
            assert set(asked_again) <= set(requests)
            for request_id, *_ in asked_again:  # what is kept is not generated again
                session, turn = request_id.split("_")[1:3]
                assert int(turn) >= num_turns.get(f"a1_{session}", 0)
            if again is not None:
                disk = disk.copy()
                disk.keep(again % (disk.num_entries + 1))


async def test_a_single_turn_that_is_kept_is_scored_and_not_sampled_again(rig: Rig, prompt: Prompt, new_run: NewRun) -> None:
    run = new_run(agent={"name": "single_turn"}, rollout={"n": 1})
    scoring = asyncio.Event()

    class Hanging:
        async def score(self, request: object) -> None:
            scoring.set()
            await asyncio.Event().wait()

    lives = Lives(rig=rig, run=run, prompt=prompt, script=lambda _: "3", tools={})
    scorer, rig.scorer = rig.scorer, Hanging()
    disk = JournalDisk()
    await lives.live(disk, until=scoring)
    assert len(rig.requests) == 1
    rig.scorer = scorer
    tags, columns = await lives.live(disk)
    assert tags["a1"]["status"] == "finished"
    assert len(rig.requests) == 1
    assert (columns["reward_score"], columns["num_turns"]) == ([1.0], [1])
    assert columns["extra_fields"][0]["stop_reason"] == "stop"


def test_a_builder_of_kept_columns_grows_on_as_the_one_they_came_from() -> None:
    END = 9

    def new() -> TokenBuilder:
        return TokenBuilder([1, 2], end_token_id=END)

    steps: list[tuple[str, list[int]]] = [("said", [5, END]), ("heard", [7]), ("said", [6]), ("heard", [7, 8]), ("said", [END])]
    for cut in range(len(steps) + 1):
        whole, before = new(), new()
        for kind, ids in steps:
            whole.add_sampled(as_sampled(ids)) if kind == "said" else whole.add_environment(ids)
        for kind, ids in steps[:cut]:
            before.add_sampled(as_sampled(ids)) if kind == "said" else before.add_environment(ids)
        kept = before.take_new()
        after = new()
        after.add_kept(*kept.values())  # type: ignore[arg-type]
        assert after.take_new()["responses"] == []
        for kind, ids in steps[cut:]:
            after.add_sampled(as_sampled(ids)) if kind == "said" else after.add_environment(ids)
        assert (after.response_ids, after.response_mask) == (whole.response_ids, whole.response_mask)
        assert (after.log_probs, after.versions) == (whole.log_probs, whole.versions)
        assert after.take_new()["responses"] == list(whole.response_ids[len(kept["responses"]) :])


def test_kept_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(FieldError, match="2 ids, 1 of the mask"):
        TokenBuilder([1], end_token_id=9).add_kept([1, 2], [1], [0.0, 0.0], [0, 0])


# --- attempts over lives ----------------------------------------------------------------------------------------------------------


def crash_in_back_off(lives: Lives, num_failures: int) -> "asyncio.Event":
    """An event that is set when the session has failed so often."""
    reached, right = asyncio.Event(), lives.script
    left = [num_failures]

    def script(request: GenerateRequest) -> str:
        if left[0] > 0:
            left[0] -= 1
            if not left[0]:
                asyncio.get_running_loop().call_later(0.1, reached.set)
            raise EngineError("gone")
        return right(request)

    lives.script = script
    return reached


@pytest.mark.parametrize("num_failures_later", [0, 1, 2])
def test_attempts_count_through_restarts(
    num_failures_later: int, in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun
) -> None:
    """Two fail before the crash: one attempt is left of three."""
    run = new_run(agent={"max_attempts": 3, "retry_backoff_s": 1.0}, rollout={"n": 1})

    async def main(rig: Rig) -> Any:
        disk = JournalDisk()
        lives = Lives(rig=rig, run=run, prompt=prompt, script=lambda _: "3")
        await lives.live(disk, until=crash_in_back_off(lives, 2))
        journal = MemoryJournal(disk=disk.copy())
        (found,) = TransferQueue(journal, journal.load()).groups_under_way(TRAIN)
        rig.incidents.clear()
        lives.script = lambda _: "3"
        crash_in_back_off(lives, num_failures_later)
        tags, _ = await lives.live(disk)
        return found.sessions, tags, rig

    sessions, tags, rig = in_virtual_time(main)
    assert [(session.attempt, session.is_open, session.num_turns) for session in sessions] == [(2, True, 0)]
    assert tags["a1"]["status"] == ("failure" if num_failures_later else "finished")
    assert rig.told() == ([("failure", "session")] if num_failures_later else [])
    assert [incident.attempt for incident in rig.incidents] == ([2] if num_failures_later else [])


def test_a_restart_forgets_no_failure(in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    """One session fails for good, the process ends, the other one finishes: the group is a failure, with the first one's reason."""
    run = new_run(agent={"name": "single_turn"}, rollout={"n": 2})

    async def main(rig: Rig) -> Any:
        def script(request: GenerateRequest) -> str:
            if request.request_id.startswith("a1_0"):
                raise EngineError("gone")
            return "3"

        disk = JournalDisk()
        lives = Lives(rig=rig, run=run, prompt=prompt, script=script, tools={})
        rig.scorer.delay_s = 10.0
        until = asyncio.Event()
        asyncio.get_running_loop().call_later(5.0, until.set)
        before, _ = await lives.live(disk, until=until)
        lives.script = lambda _: "3"
        after, _ = await lives.live(disk)
        return before, after, lives.stats

    before, after, stats = in_virtual_time(main)
    assert before["a1"]["status"] == "running"
    assert (after["a1"]["status"], sorted(after)) == ("failure", ["a1", "a1_1_0"])
    assert str(after["a1"]["failure"]) == str(before["a1"]["failure"])
    assert str(before["a1"]["failure"]).startswith("EngineError (infra): gone")
    assert (stats["groups_failure"], stats["sessions_finished"]) == (1.0, 1.0)


# --- what cannot go on ------------------------------------------------------------------------------------------------------------


class _Plain:
    """A loop that says nothing of resuming."""

    async def run(self, prompt: Prompt, context: Any) -> Any:
        return await ToolAgent().run(prompt, context)


async def remembers() -> str:
    """Be slow."""
    await asyncio.sleep(10.0)
    return "ok"


REMEMBERS = '<tool_call>{"name": "remembers", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("why", ["loop", "tool", "nothing"])
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_what_cannot_go_on_begins_again_under_a_higher_attempt(
    why: str, max_attempts: int, in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun
) -> None:
    """Two turns with a call, then the answer; the process ends in the second."""
    run = new_run(agent={"max_attempts": max_attempts}, rollout={"n": 1})
    tool = FunctionTool(remembers)
    tool.is_stateful = why == "tool"

    def wrap(runner: Any) -> None:
        if why == "loop":
            runner._parts = replace(runner._parts, loop=_Plain())

    async def main(rig: Rig) -> Any:
        disk, until = JournalDisk(), asyncio.Event()

        def script(request: GenerateRequest) -> str:
            return "3" if request.request_id.endswith("_2") else REMEMBERS

        lives = Lives(rig=rig, run=run, prompt=prompt, script=script, tools={"remembers": tool}, wrap=wrap)
        asyncio.get_running_loop().call_later(15.0, until.set)
        await lives.live(disk, until=until)
        return await lives.live(disk), rig

    (tags, columns), rig = in_virtual_time(main)
    assert (tags["a1"]["status"], columns["num_turns"]) == ("finished", [3])
    turns = [request.request_id for request in rig.requests]
    if why == "nothing":
        assert turns == ["a1_0_0", "a1_0_1", "a1_0_1", "a1_0_2"]
        assert rig.told() == []
    else:
        assert turns == ["a1_0_0", "a1_0_1", "a1_0_0", "a1_0_1", "a1_0_2"]
        assert (rig.told(), rig.incidents[0].attempt) == ([("retry", "session")], 0)
    assert columns["extra_fields"][0]["num_tool_calls"] == 2


def test_what_had_ended_is_scored_whatever_its_tools_remember(in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    tool = FunctionTool(remembers)
    tool.is_stateful = True

    async def main(rig: Rig) -> Any:
        disk, until = JournalDisk(), asyncio.Event()
        run = new_run(rollout={"n": 1})
        lives = Lives(rig=rig, run=run, prompt=prompt, script=lambda _: "3", tools={"remembers": tool})
        rig.scorer.delay_s = 10.0
        asyncio.get_running_loop().call_later(5.0, until.set)
        await lives.live(disk, until=until)
        tags, _ = await lives.live(disk)
        return tags, rig

    tags, rig = in_virtual_time(main)
    assert (tags["a1"]["status"], len(rig.requests), rig.told()) == ("finished", 1, [])


def test_a_tool_of_a_function_says_what_its_function_says() -> None:
    def plain() -> str:
        """Ok."""
        return "ok"

    assert not FunctionTool(plain).is_stateful
    plain.is_stateful = True  # type: ignore[attr-defined]
    assert FunctionTool(plain).is_stateful


def test_the_greedy_session_of_a_resumed_group_runs_again(in_virtual_time: Virtual, prompt: Prompt, new_run: NewRun) -> None:
    run = new_run(agent={"name": "single_turn"}, rollout={"n": 2}, algorithm={"adv_estimator": "remax"})

    async def main(rig: Rig) -> Any:
        disk, until = JournalDisk(), asyncio.Event()
        lives = Lives(rig=rig, run=run, prompt=prompt, script=lambda _: "3", tools={})
        rig.scorer.delay_s = 10.0
        asyncio.get_running_loop().call_later(5.0, until.set)
        await lives.live(disk, until=until)
        num_before = len(rig.requests)
        tags, _ = await lives.live(disk)
        return tags, rig.requests[num_before:], num_before

    tags, requests, num_before = in_virtual_time(main)
    assert (tags["a1"]["status"], num_before) == ("finished", 3)
    assert [request.sampling.temperature for request in requests] == [0.0]  # the others had their turn
