"""The trace of a whole run: every field of a trajectory in the order of the way, with what the store really held."""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from asyncrl.agents.chat_template import ChatTemplate
from asyncrl.assembly import run_training
from asyncrl.config import TrainRun, load_run
from asyncrl.errors import TooManyFailuresError
from asyncrl.fields import CATALOGUE, Axis
from asyncrl.observe.run_folder import RunFolder
from asyncrl.observe.trace_command import TraceFormat, render_trace
from asyncrl.observe.trace_file import TraceFile
from asyncrl.ports import GenerateRequest, Json, StepContext
from asyncrl.preflight import check_train
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import lengths_of, rows_of
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.stages.stage import Stage, StageOutput
from asyncrl.trainer import Trainer
from asyncrl.wiring import Rollout

Opened = Callable[..., AbstractAsyncContextManager[Trainer]]

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+0"}}\n</tool_call>'

TOOL_AGENT = (
    "agent.name=tool_agent",
    "agent.tools=['calculator']",
    "data.max_response_length=120",
    "data.max_prompt_length=120",
    "algorithm.old_log_probs=recompute",
)

OF_SESSIONS = [
    *("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "rollout_log_probs", "token_versions"),
    *("rm_scores", "session_id", "num_turns", "uid", "data_source", "raw_prompt", "extra_fields", "reward_score"),
]
OF_STAGES = ["old_log_probs", "entropy", "token_level_scores", "token_level_rewards", "advantages", "returns"]


def calling_tools(rollout: Rollout) -> Rollout:
    """In the first session of a group a call, then an answer; in the others an answer of a length of their own."""
    template = rollout.template
    assert isinstance(template, ChatTemplate)

    async def answer(request: GenerateRequest) -> Sequence[int]:
        _, session_id, turn = request.request_id.rsplit("_", 2)
        calls = (session_id, turn) == ("0", "0")
        return template.encode_assistant(CALL if calls else f"it is{' so' * (request.seed % 5)} {request.seed % 7}")

    return replace(rollout, engine=ScriptedEngine(answer, context_len=400, decode=template.decode))


class Spy:
    """A last stage that keeps the columns it is given, by step and key."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[KVBatchMeta, TensorDict]] = {}

    def stage(self) -> Stage:
        def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
            self.seen[context.step] = (batch, columns)
            return StageOutput()

        return Stage(name="spy", reads=frozenset(OF_SESSIONS + OF_STAGES), writes=frozenset(), compute=compute)


def read(folder: Path, **asked: Any) -> list[dict[str, Json]]:
    text = render_trace(folder, group=asked.get("group"), step=asked.get("step"), form=TraceFormat.JSONL)
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
async def traced(opened: Opened, config: Path, tmp_path: Path) -> tuple[Path, Spy, Trainer]:
    """A run of six steps of two groups of two sessions, one group traced, with a spy as its last stage."""
    spy = Spy()
    async with opened(config, *TOOL_AGENT, equip=calling_tools) as trainer:
        trainer.stages = (*trainer.stages, spy.stage())
        await trainer.fit()
    return tmp_path / "runs" / "small", spy, trainer


async def test_every_field_is_there_in_order_as_the_store_held_it(traced: tuple[Path, Spy, Trainer]) -> None:
    folder, spy, _ = traced
    heads = TraceFile(RunFolder(path=folder).trace).heads
    assert [(head.step, head.version, len(head.groups)) for head in heads] == [(step, step - 1, 1) for step in range(1, 7)]
    for head in heads:
        fields = [line for line in read(folder, step=head.step) if line["kind"] == "field"]
        check_order(fields)
        batch, columns = spy.seen[head.step]
        for line in fields:
            if line["stage"] not in ("dataset", "feed"):
                check_line(line, batch, columns)


def check_order(fields: list[dict[str, Json]]) -> None:
    by_stage = {stage: list(lines) for stage, lines in itertools.groupby(fields, key=lambda line: line["stage"])}
    stages = ["dataset", "feed", "agents", "rewards", "sample"]
    stages += ["old_log_prob", "correction", "advantage", "update_actor", "batch_metrics", "spy", "retire"]
    assert list(by_stage) == stages, "each stage once, and in the order of the way"
    names = {stage: [line["field"] for line in lines] for stage, lines in by_stage.items()}
    assert set(names["dataset"]) == {name for name, entry in CATALOGUE.items() if entry.producer == "dataset"} - {"dummy_tensor"}
    assert names["feed"] == ["uid"]
    assert sorted(names["agents"] + names["rewards"]) == sorted(OF_SESSIONS) == sorted(names["sample"])
    assert names["rewards"] == ["reward_score"]
    assert sorted(names["spy"]) == sorted(names["retire"]) == sorted(OF_SESSIONS + OF_STAGES)
    written = {(line["stage"], line["field"]) for line in fields if line["access"] == "write"}
    assert {("old_log_prob", "old_log_probs"), ("old_log_prob", "entropy"), ("advantage", "returns")} <= written
    for line in fields:
        entry = CATALOGUE[line["field"]]
        assert (line["producer"], line["consumers"]) == (entry.producer, list(entry.consumers))
        if line["stage"] not in ("dataset", "feed"):
            assert (line["dtype"], line["layout"] == "ragged") == (entry.dtype, entry.axis is not Axis.NONE)


def check_line(line: dict[str, Json], batch: KVBatchMeta, columns: TensorDict) -> None:
    """Keys, lengths, mask sums and versions of a line against the columns and tags that a stage was given."""
    rows = [batch.keys.index(key) for key in line["keys"]]
    assert [batch.uids[row] for row in rows] == [line["uid"]] * 2
    masks = rows_of(columns["response_mask"])
    assert line["mask_sums"] == [int(masks[row].sum()) for row in rows]
    assert line["mask_sums"] == [batch.tags[row]["policy_len"] for row in rows]
    assert any(int(masks[row].sum()) < len(masks[row]) for row in rows), "one of the sessions has an observation in the middle"
    column = columns.get(line["field"])
    lengths = lengths_of(column).tolist() if line["layout"] == "ragged" else [1] * len(batch)
    assert line["lengths"] == line["valid_lengths"] == [lengths[row] for row in rows]
    for name in ("global_steps", "min_global_steps", "max_global_steps", "is_padding"):
        assert line[name] == [batch.tags[row][name] for row in rows]
    versions = [rows_of(columns["token_versions"])[row][masks[row]] for row in rows]
    assert line["min_global_steps"] == [int(sampled.min()) for sampled in versions] == [line["version"]] * 2
    assert line["topology"]["actor"] == dict.fromkeys(("world", "dp", "sp", "tp", "pp", "cp", "replicas"), 1) | {
        "dynamic_cp": False,
        "backend": "fsdp",
    }


async def test_turns_and_tools_are_inside_their_session_and_the_stages_inside_the_step(traced: tuple[Path, Spy, Trainer]) -> None:
    folder, _, _ = traced
    spans = [line for line in read(folder, step=4) if line["kind"] == "span"]
    for number, inside in ((0, ["turn", "tool", "turn", "reward"]), (1, ["turn", "reward"])):
        of_session = [span for span in spans if span["session_id"] == number]
        wait, session, *inner = of_session
        assert (wait["span"], session["span"], [span["span"] for span in inner]) == ("wait", "session", inside)
        assert wait["end_s"] == session["start_s"]
        assert all(session["start_s"] <= span["start_s"] <= span["end_s"] <= session["end_s"] for span in inner)
        assert all(before["end_s"] <= after["start_s"] for before, after in itertools.pairwise(inner))
        assert {span["facts"]["versions"][0] for span in inner if span["span"] == "turn"} == {3}
        assert {span["outcome"] for span in of_session} == {"ok"}
    of_trainer = [span for span in spans if span["uid"] is None]
    sampled_s = next(span["end_s"] for span in of_trainer if span["name"] == "gen")
    assert all(span["end_s"] <= sampled_s for span in spans if span["session_id"] is not None), "one clock for sessions and stages"
    assert sampled_s - next(span["end_s"] for span in spans if span["span"] == "session") < 60
    assert [span["name"] for span in of_trainer if span["name"] != "balance"] == [
        *("gen", "old_log_prob", "correction", "advantage", "update_actor", "batch_metrics", "spy", "publish")
    ]
    assert all(before["end_s"] <= after["start_s"] for before, after in itertools.pairwise(of_trainer))


async def test_a_run_without_a_trace_reports_nothing_and_writes_no_file(opened: Opened, config: Path, tmp_path: Path) -> None:
    spy = Spy()
    async with opened(config, *TOOL_AGENT, "trainer.trace_groups=0", equip=calling_tools) as trainer:
        trainer.stages = (*trainer.stages, spy.stage())
        await trainer.fit()
    assert len(spy.seen) == 6
    assert not RunFolder(path=tmp_path / "runs" / "small").trace.exists()


async def test_groups_that_failed_are_in_the_trace_though_the_run_ended_with_them(
    opened: Opened, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "odd_reward.py").write_text("def score(**_):\n    raise ValueError('cannot grade')\n", encoding="utf-8")
    with pytest.raises(TooManyFailuresError):
        async with opened(config, "reward.function=odd_reward:score", "replay.max_failed_groups_in_a_row=4") as trainer:
            await trainer.fit()
    (head,) = TraceFile(RunFolder(path=tmp_path / "runs" / "small").trace).heads
    assert head.step == 1
    assert {group.status for group in head.groups} == {"dropped"}
    spans = [line for line in read(tmp_path / "runs" / "small", step=1) if line["kind"] == "span"]
    rewards = [span for span in spans if span["span"] == "reward"]
    assert rewards
    assert {span["outcome"] for span in rewards} == {"RewardError"}
    assert {span["outcome"] for span in spans if span["span"] == "session"} == {"RewardError"}


async def test_a_resumed_run_goes_on_in_the_same_file(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "small"
    for steps, resume in ((2, False), (4, True)):
        run = load_run(TrainRun, config, [f"trainer.total_training_steps={steps}"])
        assert await run_training(run, await asyncio.to_thread(check_train, run), resume=resume) == folder
        with (folder / "trace.jsonl").open("ab") as file:
            file.write(b'{"kind":"field","st')  # what a kill leaves
    heads = TraceFile(RunFolder(path=folder).trace).heads
    assert [(head.step, head.groups[0].number) for head in heads] == [(1, 0), (2, 2), (3, 4), (4, 6)]
    assert heads[0].incarnation <= heads[-1].incarnation
