"""Async mode with a bound of 0 is the synchronous trainer: the same batches, the same order, the same weights, byte for byte.

Everything is real but the agent loop, which adds what a run cannot choose: how long tools take, who comes first, who fails.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from asyncrl.agents.loop import AgentLoopOutput, SessionContext, StopCause, output_of
from asyncrl.agents.tool_calls import ToolCall
from asyncrl.ports import Prompt
from asyncrl.stages.stage import Stage, StageOutput
from asyncrl.tools import FunctionTool
from asyncrl.trainer import Trainer
from asyncrl.training.actor import Actor
from asyncrl.wiring import Rollout

Opened = Callable[..., AbstractAsyncContextManager[Trainer]]

BATCH, SESSIONS, STEPS = 5, 2, 3
LONGEST_S = 0.02


@dataclass(slots=True)
class Chance:
    """What is different in each run: latencies and the order of arrival. Of ten sessions two fail once."""

    rng: random.Random
    has_failed: set[tuple[str, int]] = field(default_factory=set)
    arrived: list[str] = field(default_factory=list)

    async def latency(self) -> None:
        await asyncio.sleep(self.rng.random() * LONGEST_S)

    def fail_once(self, prompt: Prompt, session_id: int) -> None:
        session = (prompt.uid, session_id)
        if prompt.number % BATCH < 2 and session_id == prompt.number % 2 and session not in self.has_failed:
            self.has_failed.add(session)
            raise ConnectionResetError("the machine of this session is gone")


class Wanderer:
    """Two turns with a tool between them, whose answer is in the tokens. Its tries are lost before or after the tool."""

    chance: ClassVar[Chance]

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        chance, builder, said = Wanderer.chance, context.new_builder(), []
        await chance.latency()
        for turn in range(2):
            generation = await context.generate(
                prompt, builder, turn=turn, max_tokens=5, stop_token_ids=context.template.stop_token_ids
            )
            text = context.template.decode(generation.token_ids, skip_special=True)
            said.append({"role": "assistant", "content": text})
            await context.keep(turn, builder, messages=said[-1:])
            if turn == 0:
                answer = await context.call_tool(ToolCall(name="wait", arguments={"text": text}), {})
                builder.add_environment(context.template.environment_ids([{"role": "tool", "content": answer.text}]))
                chance.fail_once(prompt, context.session_id)
        chance.arrived.append(f"{prompt.uid}_{context.session_id}")
        return [output_of(builder, num_turns=2, stop=StopCause.ANSWER, messages=said)]


async def wait(text: str) -> str:
    """Wait, and say how long the text is.

    Args:
        text: Any.
    """
    await Wanderer.chance.latency()
    return str(len(text))


def with_tool(rollout: Rollout) -> Rollout:
    return replace(rollout, tools={"wait": FunctionTool(wait)})


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run trained on and what it came to."""

    batches: list[tuple[str, ...]]
    tokens: list[list[Any]]
    weights: list[bytes]
    arrived: tuple[str, ...]


async def trained(opened: Opened, config: Path, seed: int, *overrides: str) -> Trained:
    batches: list[tuple[str, ...]] = []
    tokens: list[list[Any]] = []

    def look(columns: Any, batch: Any, context: Any) -> StageOutput:
        batches.append(batch.keys)
        tokens.append([columns[name].values().tolist() for name in sorted(READS)])
        return StageOutput()

    Wanderer.chance = Chance(random.Random(seed))
    settings = (
        f"agent.name={__name__}:Wanderer",
        "agent.retry_backoff_s=0.001",
        f"data.train_batch_size={BATCH}",
        "data.max_response_length=60",
        "data.max_prompt_length=100",
        "rollout.deterministic=true",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.experiment_name=seed{seed}",
    )
    async with opened(config, *settings, *overrides, equip=with_tool) as trainer:
        trainer.stages = (Stage(name="look", reads=READS, writes=frozenset(), compute=look), *trainer.stages)
        await trainer.fit()
        assert isinstance(trainer.actor, Actor)
        weights = [tensor.numpy().tobytes() for _, tensor in sorted(trainer.actor.snapshot(0).tensors.items())]
    assert len(Wanderer.chance.has_failed) == 2 * STEPS
    assert trainer.admission.counters()["dropped"] == 0
    return Trained(batches, tokens, weights, tuple(Wanderer.chance.arrived))


READS = frozenset({"responses", "response_mask", "rollout_log_probs", "token_versions"})


async def test_async_with_a_bound_of_0_is_sync_byte_for_byte(opened: Opened, config: Path) -> None:
    sync = await trained(opened, config, 0, "trainer.mode=sync")
    others = [await trained(opened, config, seed, "trainer.mode=async", "trainer.max_staleness=0") for seed in (1, 2, 3)]
    for other in others:
        assert other.batches == sync.batches
        assert other.tokens == sync.tokens
        assert other.weights == sync.weights
    assert len({run.arrived for run in (sync, *others)}) == 4, "they arrived in the same order: the comparison proves nothing"
    assert len(set(sync.batches)) == STEPS


@pytest.mark.long
async def test_a_bound_of_1_is_not_sync(opened: Opened, config: Path) -> None:
    """The comparison can tell the two apart."""
    sync = await trained(opened, config, 0, "trainer.mode=sync")
    later = await trained(opened, config, 1, "trainer.mode=async", "trainer.max_staleness=1")
    assert later.batches == sync.batches
    assert later.tokens != sync.tokens
    assert later.weights != sync.weights
