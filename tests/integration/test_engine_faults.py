"""Faults of the engine, of a stage or between steps: the run ends with its reason, and with a checkpoint of whole weights only."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from asyncrl.agents.loop import AgentLoopOutput, SessionContext
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.errors import DeadlineError, EngineError, EngineLostError, TooManyFailuresError
from asyncrl.ports import Prompt
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.stages.stage import Stage, StageOutput
from asyncrl.trainer import Trainer

Opened = Callable[..., AbstractAsyncContextManager[Trainer]]
Check = Callable[..., None]


def engine_of(trainer: Trainer) -> TorchEngine:
    assert isinstance(trainer.engine, TorchEngine)
    return trainer.engine


def after_step(trainer: Trainer, step: int, deed: Callable[[], object]) -> None:
    """Do `deed` in a stage of the step after `step`, so that the run is under way."""

    def compute(columns: Any, batch: Any, context: Any) -> StageOutput:
        if context.step == step:
            deed()
        return StageOutput()

    trainer.stages = (*trainer.stages, Stage(name="deed", reads=frozenset({"response_mask"}), writes=frozenset(), compute=compute))


def die() -> None:
    raise RuntimeError("out of luck")


async def test_an_engine_that_dies_ends_the_run_with_its_reason_and_a_checkpoint(opened: Opened, config: Path) -> None:
    async with opened(config) as trainer:
        after_step(trainer, 2, lambda: engine_of(trainer)._commands.put(die))
        with pytest.raises(EngineError, match="the engine's thread died: RuntimeError: out of luck"):
            await trainer.fit()
    assert [path.name for path in checkpoints_of(config)] == ["global_step_2"]


class Killer:
    """An agent loop that takes the engine along on the faulty row."""

    async def run(self, prompt: Prompt, context: SessionContext) -> list[AgentLoopOutput]:
        if prompt.ground_truth == "3":
            assert isinstance(context.engine, TorchEngine)
            context.engine._commands.put(die)
        return await SingleTurn().run(prompt, context)


async def test_an_engine_that_dies_under_its_sessions_ends_the_run_with_its_reason_and_a_checkpoint(
    opened: Opened, config: Path
) -> None:
    with pytest.raises(EngineLostError, match="the engine's thread died: RuntimeError: out of luck; go on with --resume"):
        async with opened(config, f"agent.name={__name__}:Killer") as trainer:
            await trainer.fit()
    assert trainer.agents.stats().get("groups_failure", 0) == 0
    step = trainer.step
    assert [path.name for path in checkpoints_of(config)] == ([f"global_step_{step}"] if step else [])


def checkpoints_of(config: Path) -> list[Path]:
    return sorted((config.parent / "runs" / "small" / "checkpoints").glob("global_step_*"))


async def test_an_engine_that_hangs_ends_the_run_with_its_reason(opened: Opened, config: Path) -> None:
    let_go = threading.Event()
    overrides = ("rollout.publish_timeout_s=0.2", "replay.max_failed_groups_in_a_row=2")
    async with opened(config, *overrides) as trainer:
        engine = engine_of(trainer)
        engine._close_timeout_s = 0.01
        after_step(trainer, 2, lambda: engine._commands.put(lambda: [*iter(let_go.wait, True)].clear()))
        with pytest.raises(DeadlineError, match=r"did not take version 2 within rollout\.publish_timeout_s = 0\.2 s"):
            await trainer.fit()
    let_go.set()
    assert [path.name for path in checkpoints_of(config)] == ["global_step_2"]


async def test_generation_that_hangs_ends_the_run_with_its_reason(opened: Opened, config: Path) -> None:
    overrides = ("rollout.request_timeout_s=0.1", "replay.max_failed_groups_in_a_row=2", "agent.name=single_turn")
    async with opened(config, *overrides) as trainer:
        await trainer.engine.pause()
        with pytest.raises(
            TooManyFailuresError, match=r"call \w+_\d_0: the engine has made no step for rollout\.request_timeout_s"
        ):
            await trainer.fit()
    assert checkpoints_of(config) == []


async def test_sessions_that_never_end_are_named_at_the_deadline_of_the_sample(opened: Opened, config: Path) -> None:
    async with opened(config, "replay.sample_timeout_s=0.2") as trainer:
        await trainer.engine.pause()
        with pytest.raises(DeadlineError, match=r"step 1 waited .* for 2 of its 2 groups: [0-9a-f]{16} running, 0 of 2 sessions"):
            await trainer.fit()


async def test_a_failed_step_gives_its_groups_back_as_their_sessions_left_them(opened: Opened, config: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("in a stage")

    async with opened(config) as trainer:
        trainer.stages = trainer.stages[:1]  # what the step wrote before it failed: advantages
        after_step(trainer, 2, fail)
        trainer._open_generation()
        following = asyncio.create_task(trainer.replay.run())
        admitting = asyncio.create_task(trainer.admit())
        await trainer.train_step(1)
        await trainer.publish(1)
        with pytest.raises(ZeroDivisionError):
            await trainer.train_step(2)
        again = await trainer.replay.sample(2, 2)
        assert len(again) == 4
        listed = (await trainer.queue.kv_list("train"))["train"]
        assert set(again.keys) < set(listed)
        for name in trainer.stages[0].writes:
            with pytest.raises(KeyError, match=name):
                await trainer.queue.kv_batch_get(again.keys, partition_id="train", fields=[name])
        assert trainer.queue.stats()["open_leases"] == 0
        for task in (following, admitting):
            task.cancel()
        await asyncio.wait([following, admitting])


async def test_an_error_between_steps_leaves_a_checkpoint_and_in_a_step_none(opened: Opened, config: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("in a stage")

    async with opened(config) as trainer:
        after_step(trainer, 3, fail)
        with pytest.raises(ZeroDivisionError, match="in a stage"):
            await trainer.fit()
    assert trainer.step == 2
    assert checkpoints_of(config) == []  # the weights may be those of half a step


async def test_nothing_blocks_the_loop_in_a_whole_run(opened: Opened, check_whole_run: Check, config: Path, rows: Path) -> None:
    async with opened(config, f"data.val_files={str(rows)!r}", "trainer.test_freq=3", "trainer.save_freq=3") as trainer:
        with blockbuster_ctx("asyncrl"):
            await trainer.fit()
    check_whole_run(trainer, num_failed=0)
