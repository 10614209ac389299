"""VLLMEngine over a vLLM without a model: publications whole, refused, broken off, and in turn with other control calls."""

import asyncio
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, SamplingParams
from asyncrl.rollout.vllm.engine import VLLMEngine
from asyncrl.world import RealWorld

Child = subprocess.Popen[bytes]
Client = Any  # conftest.FakeClient: test folders are no packages, so its type cannot be imported here
MakeEngine = Callable[..., VLLMEngine]

REQUEST = GenerateRequest(request_id="r", prompt_ids=(1, 2, 3), sampling=SamplingParams(), seed=0)


class Snapshot:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors


async def test_publication_while_paused_leaves_it_paused(
    make_engine: MakeEngine, client: Client, world: RealWorld, weights: dict[str, torch.Tensor]
) -> None:
    async with make_engine(world, version=3) as engine:
        await engine.pause()
        del client.control.told[:]
        await engine.publish(4, Snapshot(weights))
        assert "resume" not in client.control.told
        await engine.resume()
        await engine.publish(5, Snapshot(weights))
        assert client.control.told.count("resume") == 2
        assert (engine.version, engine.stats()["publications"]) == (5, 2)


async def test_an_older_version_is_refused_and_nothing_is_changed(
    make_engine: MakeEngine, client: Client, world: RealWorld, weights: dict[str, torch.Tensor]
) -> None:
    async with make_engine(world, version=3) as engine:
        told = len(client.control.told)
        with pytest.raises(EngineError, match="version 2 cannot be published: the engine has version 3"):
            await engine.publish(2, Snapshot(weights))
        with pytest.raises(EngineError, match="lacks parameters"):
            await engine.publish(4, Snapshot({"layer.weight": weights["layer.weight"]}))
        assert (len(client.control.told), engine.version, engine.failure) == (told, 3, None)


@pytest.mark.parametrize("step", ["update", "reset", "resume"])
async def test_a_publication_that_fails_half_way_is_the_end(
    make_engine: MakeEngine, client: Client, world: RealWorld, weights: dict[str, torch.Tensor], step: str
) -> None:
    async with make_engine(world) as engine:
        other = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0)
        client.control.broken = step
        with pytest.raises(EngineError, match=f"{step} is broken"):
            await engine.publish(1, Snapshot(weights))
        with pytest.raises(EngineError, match="not whole"):
            await other
        assert "not whole" in str(engine.failure)


async def test_a_publication_that_fails_since_a_process_has_died_names_it(
    make_engine: MakeEngine, client: Client, world: RealWorld, weights: dict[str, torch.Tensor], child: Child
) -> None:
    client.control.held = client.control.broken = "update"
    async with make_engine(world) as engine:
        task = asyncio.create_task(engine.publish(1, Snapshot(weights)))
        await client.control.is_reached.wait()
        child.kill()
        client.is_dead = True
        client.control.released.set()
        with pytest.raises(EngineError, match=rf"the worker \(pid {child.pid}\) was killed by SIGKILL"):
            await task


async def test_a_publication_that_is_cancelled_half_way_is_the_end(
    make_engine: MakeEngine, client: Client, world: RealWorld, weights: dict[str, torch.Tensor]
) -> None:
    client.control.held = "update"
    async with make_engine(world) as engine:
        task = asyncio.create_task(engine.publish(1, Snapshot(weights)))
        await client.control.is_reached.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert "did not come to its end" in str(engine.failure)


async def test_control_calls_take_turns(
    make_engine: MakeEngine, client: Client, world: RealWorld, weights: dict[str, torch.Tensor]
) -> None:
    """A publication asks whether the engine is paused: not in the middle of a pause."""
    client.control.held = "pause"
    async with make_engine(world) as engine:
        pausing = asyncio.create_task(engine.pause())
        await client.control.is_reached.wait()
        publishing = asyncio.create_task(engine.publish(1, Snapshot(weights)))
        await asyncio.wait({publishing}, timeout=0.1)
        client.control.released.set()
        await asyncio.gather(pausing, publishing)
        assert (client.control.told.count("pause"), client.control.told.count("resume")) == (1, 0)


async def test_a_publication_cancelled_while_it_waits_for_its_turn_harms_nobody(
    make_engine: MakeEngine, client: Client, world: RealWorld, weights: dict[str, torch.Tensor]
) -> None:
    client.control.held = "pause"
    async with make_engine(world) as engine:
        pausing = asyncio.create_task(engine.pause())
        await client.control.is_reached.wait()
        task = asyncio.create_task(engine.publish(1, Snapshot(weights)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert engine.failure is None
        pausing.cancel()
        await asyncio.wait({pausing})
