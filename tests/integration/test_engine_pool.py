"""Whole runs over several engines, some of which die: what that costs, and that nothing else changes."""

import functools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import EngineLostError
from asyncrl.observe.metrics import read_metrics
from asyncrl.rollout.opened_later import OpenedLater
from asyncrl.rollout.pool import EnginePool
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.stages.stage import Stage, StageOutput
from asyncrl.trainer import Trainer

Opened = Callable[..., AbstractAsyncContextManager[Trainer]]
Check = Callable[..., None]
POOL = ("rollout.num_engines=2", "rollout.request_timeout_s=60", "rollout.slow_after_s=20")


def pool_of(trainer: Trainer) -> EnginePool:
    assert isinstance(trainer.engine, EnginePool)
    return trainer.engine


def kill(pool: EnginePool, number: int) -> None:
    """End the thread of the engine that serves there now."""
    life = pool._members[number].life
    assert life is not None
    assert isinstance(life.engine, OpenedLater)
    assert isinstance(life.engine._engine, TorchEngine)

    def die() -> None:
        raise RuntimeError("out of luck")

    life.engine._engine._commands.put(die)


def in_step(trainer: Trainer, step: int, deed: Callable[[], object]) -> None:
    def compute(columns: Any, batch: Any, context: Any) -> StageOutput:
        if context.step == step:
            deed()
        return StageOutput()

    trainer.stages = (*trainer.stages, Stage(name="deed", reads=frozenset({"response_mask"}), writes=frozenset(), compute=compute))


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_run_over_two_engines_uses_both(opened: Opened, check_whole_run: Check, config: Path, mode: str) -> None:
    async with opened(config, *POOL, f"trainer.mode={mode}") as trainer:
        await trainer.fit()
        states = pool_of(trainer).describe()
        assert [state.version for state in states] == [6, 6]
        assert all(member.stats()["generated_tokens"] > 0 for member in pool_of(trainer)._members)
    check_whole_run(trainer, num_failed=0)


async def test_an_engine_that_dies_in_a_run_comes_back_and_costs_no_group(
    opened: Opened, check_whole_run: Check, config: Path
) -> None:
    async with opened(config, *POOL, "trainer.mode=async") as trainer:
        pool = pool_of(trainer)
        in_step(trainer, 2, lambda: kill(pool, 0))
        in_step(trainer, 3, lambda: kill(pool, 1))
        await trainer.fit()
        assert pool.stats()["restarts"] == 2
        assert [state.version for state in pool.describe() if state.version is not None] in ([6, 6], [6])
    check_whole_run(trainer, num_failed=0)
    incidents = (config.parent / "runs" / "small" / "incidents.jsonl").read_text(encoding="utf-8")
    assert "out of luck" in incidents


async def test_engines_that_die_again_and_again_end_the_run_with_their_reason(opened: Opened, config: Path) -> None:
    trainers: list[Trainer] = []

    async def run() -> None:
        async with opened(config, *POOL, "rollout.max_restarts=0") as trainer:
            trainers.append(trainer)
            for number in (0, 1):
                in_step(trainer, 2, functools.partial(kill, pool_of(trainer), number))
            await trainer.fit()

    with pytest.raises(EngineLostError, match=r"no engine is left, all are given up .*out of luck"):
        await run()
    assert trainers[0].agents.stats().get("groups_failure", 0) == 0


async def test_figures_of_the_pool_are_metrics(opened: Opened, config: Path) -> None:
    async with opened(config, *POOL) as trainer:
        await trainer.fit()
    rows = read_metrics(config.parent / "runs" / "small" / "metrics.jsonl")
    assert {rows[-1][f"engine/{name}"] for name in ("engines_slow", "engines_down", "restarts")} == {0}
    assert rows[-1]["engine/engines"] == 2
