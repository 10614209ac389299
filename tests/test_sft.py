"""The warm start: its ids are a rollout's ids, it learns what a policy would sample, and a batch's split changes nothing."""

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.agents.chat_template import ChatTemplate, load_chat_template
from asyncrl.agents.token_builder import TokenBuilder
from asyncrl.config import ModelConfig, SFTConfig, SFTRun
from asyncrl.errors import DataError, ModelError
from asyncrl.examples.calculator import demonstrations
from asyncrl.examples.demonstrator import MECHANICS
from asyncrl.ports import Generation, Json, Messages, StopReason, VersionSpan
from asyncrl.sft import WarmStart, encode_conversation, run_sft
from asyncrl.sft.conversations import load_stages
from asyncrl.sft.warm_start import batches_of, plan_stages
from asyncrl.stopping import Stop

TALK: Messages = [
    {"role": "user", "content": "what is 12+34?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "12+34"}}}],
    },
    {"role": "tool", "content": "46"},
    {"role": "assistant", "content": "46"},
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'


def write_rows(path: Path, rows: list[Json]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_run(model_folder: Path, files: str, runs: Path, **sft: Json) -> SFTRun:
    return SFTRun.model_validate(
        {
            "data": {"train_files": files},
            "model": {"path": str(model_folder)},
            "agent": {"tools": ["calculator"]},
            "sft": {"batch_size": 8, "total_steps": 4, "max_length": 128, "optim": {"lr": 3e-3}, **sft},
            "trainer": {"default_local_dir": str(runs), "experiment_name": "warm", "tensorboard": False},
        }
    )


# --- ids --------------------------------------------------------------------------------------------------------------------------


def sampled(template: ChatTemplate, text: str, *, end: bool) -> Generation:
    ids = template.encode_assistant(text, end=end)
    span = VersionSpan(start=0, end=len(ids), version=3)
    return Generation(token_ids=ids, log_probs=[-1.0] * len(ids), version_spans=[span], stop_reason=StopReason.STOP)


def test_ids_and_mask_are_those_of_a_rollout(template: ChatTemplate) -> None:
    builder = TokenBuilder(template.prompt_ids(TALK[:1]), end_token_id=template.end_token_id)
    builder.add_sampled(sampled(template, CALL, end=False))
    builder.add_environment(template.environment_ids([TALK[2]]))
    builder.add_sampled(sampled(template, "46", end=True))
    conversation = encode_conversation(TALK, template)
    assert conversation.input_ids.tolist() == builder.context_ids
    assert conversation.mask.tolist() == list(map(bool, builder.response_mask))


def test_what_is_learned_is_what_a_policy_samples(template: ChatTemplate) -> None:
    conversation = encode_conversation(TALK, template)
    response = conversation.input_ids[-len(conversation.mask) :]
    assert template.decode(response[conversation.mask].tolist()) == CALL + "46<|im_end|>"


def test_a_turn_with_two_calls_learns_its_end(template: ChatTemplate) -> None:
    twice: Messages = [TALK[0], {**TALK[1], "tool_calls": TALK[1]["tool_calls"] * 2}, TALK[2], TALK[2], TALK[3]]
    conversation = encode_conversation(twice, template)
    response = conversation.input_ids[-len(conversation.mask) :]
    assert template.decode(response[conversation.mask].tolist()) == f"{CALL}\n{CALL}<|im_end|>46<|im_end|>"


def test_arguments_as_json_text_are_the_same_call(template: ChatTemplate) -> None:
    call = {"function": {"name": "calculator", "arguments": '{"expression": "12+34"}'}}
    other = [TALK[0], {**TALK[1], "tool_calls": [call]}, *TALK[2:]]
    assert torch.equal(encode_conversation(other, template).input_ids, encode_conversation(TALK, template).input_ids)


# --- rows that cannot be learned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": TALK}, "no column 'messages'"),
        ({"messages": None}, "messages"),
        ({"messages": TALK[:3]}, "the last one must be the assistant's"),
        ({"messages": TALK[3:]}, "begins with an assistant message"),
        ({"messages": [*TALK, TALK[3]]}, "two assistant messages"),
        (
            {"messages": [TALK[0], {**TALK[1], "tool_calls": [{"function": {"name": "calculator"}}]}, *TALK[2:]]},
            "a tool call must be",
        ),
        ({"messages": [{"role": "user", "content": "1" * 200}, TALK[3]]}, "more than sft.max_length = 128"),
    ],
)
def test_a_bad_row_is_named(row: Json, message: str, model_folder: Path, template: ChatTemplate, tmp_path: Path) -> None:
    files = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}, row])
    with pytest.raises(DataError, match=message) as caught:
        load_stages(make_run(model_folder, files, tmp_path), template)
    assert "rows.jsonl" in str(caught.value)
    assert "2" in str(caught.value).partition("rows.jsonl")[2]
    assert "\n" not in str(caught.value)


# --- order ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "shares", "steps"),
    [(0, [], [10]), (3, [], [3, 4, 3]), (2, [0.75, 0.25], [8, 2]), (2, [1.0, 0.0], [10, 0]), (3, [0.34, 0.33, 0.33], [3, 4, 3])],
)
def test_stages_share_the_steps(stages: int, shares: list[float], steps: list[int]) -> None:
    config = SFTConfig(total_steps=10, stages=[[f"{stage}.jsonl"] for stage in range(stages)], stage_shares=shares)
    assert plan_stages(config) == steps


def test_each_epoch_has_every_row_once_in_a_new_order() -> None:
    rows = [row for batch in itertools.islice(batches_of(10, 4, seed=1), 5) for row in batch]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    assert rows == [row for batch in itertools.islice(batches_of(10, 4, seed=1), 5) for row in batch]


# --- learning ---------------------------------------------------------------------------------------------------------------------


def train(run: SFTRun) -> tuple[list[dict[str, float]], WarmStart]:
    warm_start = WarmStart(run)
    return [warm_start.step() for _ in range(run.sft.total_steps)], warm_start


@pytest.fixture
def demonstration_file(tmp_path: Path) -> str:
    talks = demonstrations(MECHANICS, 40, seed=2, name="mechanics")
    return write_rows(tmp_path / "rows.jsonl", [{"messages": talk} for talk in talks])


def test_the_loss_falls(model_folder: Path, demonstration_file: str, tmp_path: Path) -> None:
    steps, _ = train(make_run(model_folder, demonstration_file, tmp_path, total_steps=12))
    assert steps[-1]["sft/loss"] < steps[0]["sft/loss"] - 1


def test_the_split_into_micro_batches_changes_nothing(model_folder: Path, demonstration_file: str, tmp_path: Path) -> None:
    whole, _ = train(make_run(model_folder, demonstration_file, tmp_path))
    split, _ = train(make_run(model_folder, demonstration_file, tmp_path, max_token_len_per_gpu=100))
    for one, other in zip(whole, split, strict=True):
        assert one["sft/loss"] == pytest.approx(other["sft/loss"], abs=1e-4)
        assert one["sft/grad_norm"] == pytest.approx(other["sft/grad_norm"], rel=1e-3)


def test_the_first_loss_is_the_mean_over_learned_tokens(model_folder: Path, template: ChatTemplate, tmp_path: Path) -> None:
    files = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}])
    (step,), _ = train(make_run(model_folder, files, tmp_path, total_steps=1, batch_size=1))
    conversation = encode_conversation(TALK, template)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model_folder)(conversation.input_ids[None]).logits[0]
    log_probs = torch.log_softmax(logits[:-1], -1).gather(-1, conversation.input_ids[1:, None])[:, 0]
    assert step["sft/loss"] == pytest.approx(-float(log_probs[-len(conversation.mask) :][conversation.mask].mean()), abs=1e-4)
    assert step["sft/num_learned_tokens"] == int(conversation.mask.sum())


# --- the run ----------------------------------------------------------------------------------------------------------------------


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


async def test_a_run_leaves_a_model_that_has_learned(model_folder: Path, demonstration_file: str, tmp_path: Path) -> None:
    folder = await run_sft(make_run(model_folder, demonstration_file, tmp_path / "runs", total_steps=12))
    assert folder == tmp_path / "runs" / "warm"
    steps = metrics_of(folder)
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert not any(key.startswith("eval/") for step in steps for key in step)
    again, _ = train(make_run(folder / "hf", demonstration_file, tmp_path / "runs", total_steps=1))
    assert again[0]["sft/loss"] < steps[0]["sft/loss"] - 1


async def test_a_second_run_of_the_name_overwrites_nothing(model_folder: Path, demonstration_file: str, tmp_path: Path) -> None:
    run = make_run(model_folder, demonstration_file, tmp_path / "runs", total_steps=1)
    assert [(await run_sft(run)).name for _ in range(2)] == ["warm", "warm-2"]


async def test_a_stop_ends_the_run_with_a_model(model_folder: Path, demonstration_file: str, tmp_path: Path) -> None:
    stop = Stop()
    stop.request()
    folder = await run_sft(make_run(model_folder, demonstration_file, tmp_path / "runs"), stop=stop)
    assert metrics_of(folder) == []
    load_chat_template(ModelConfig(path=str(folder / "hf")))


class StopAtFirstStep(Stop):
    """Sends itself Ctrl-C when asked for the second time whether to stop."""

    asked = 0

    @property
    def is_requested(self) -> bool:
        self.asked += 1
        if self.asked == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().is_requested


async def test_ctrl_c_ends_after_the_step_in_flight(model_folder: Path, demonstration_file: str, tmp_path: Path) -> None:
    folder = await run_sft(make_run(model_folder, demonstration_file, tmp_path / "runs", total_steps=50), stop=StopAtFirstStep())
    assert 1 <= len(metrics_of(folder)) < 50
    assert (folder / "hf" / "model.safetensors").is_file()


async def test_nothing_is_left_behind_by_a_run_that_cannot_start(
    model_folder: Path, demonstration_file: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError):
        await run_sft(make_run(tmp_path / "nowhere", demonstration_file, tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
