"""Agents on the embedded engine: an untrained model babbles, and every invariant of the catalogue still holds on its rows."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from asyncrl.agents.runner import GroupRunner
from asyncrl.config import TrainRun
from asyncrl.keys import TRAIN
from asyncrl.ports import Prompt
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants import check_batch
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.tools import load_tools
from asyncrl.transfer_queue import TransferQueue

Rig = Any  # the fixture's class lives in conftest, which is no module


@pytest.fixture(scope="module")
def model(make_lm: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return make_lm("llama", vocab_size=len(tokenizer))


@pytest.mark.parametrize(
    "agent",
    [
        {"name": "tool_agent", "max_tokens_per_turn": 12},
        {"name": "tool_agent", "parallel_tool_calls": True},
        {"name": "single_turn"},
    ],
)
async def test_rows_of_a_babbling_model_keep_every_invariant(
    agent: dict[str, object], model: PreTrainedModel, rig: Rig, queue: TransferQueue, new_run: Callable[..., TrainRun]
) -> None:
    run = new_run(agent=agent, data={"max_response_length": 60}, rollout={"n": 6})
    async with (
        TorchEngine(model, max_num_seqs=4, context_len=200, version=3, decode=rig.template.decode) as engine,
        GroupRunner(queue, engine, rig.scorer, rig.template, load_tools(["calculator"]), run, rig.world) as runner,
    ):
        for uid in ("a1", "b2"):
            runner.start(Prompt(uid=uid, messages=[{"role": "user", "content": "1 + 2"}], data_source="test", global_steps=3))
        await runner.join()
    tags = (await queue.kv_list(TRAIN))[TRAIN]
    assert {tags[uid]["status"] for uid in ("a1", "b2")} == {"finished"}
    keys = tuple(key for key, tag in tags.items() if not tag.get("is_prompt"))
    assert len(keys) == 12
    names = [
        "prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "rollout_log_probs", "token_versions",
        "rm_scores", "reward_score", "session_id", "uid", "num_turns", "data_source", "extra_fields", "raw_prompt",
    ]  # fmt: skip
    columns = await queue.kv_batch_get(list(keys), partition_id=TRAIN, fields=names)
    check_batch(KVBatchMeta(partition_id=TRAIN, keys=keys, tags=tuple(tags[key] for key in keys)), columns)
