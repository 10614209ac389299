"""VLLMEngine over a vLLM without a model: every end of a call, on the turn of the loop where it is hardest."""

import asyncio
import re
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.errors import DeadlineError, EngineError
from asyncrl.ports import GenerateRequest, SamplingParams, StopReason, VersionSpan
from asyncrl.rollout.vllm.answers import Call, Part
from asyncrl.rollout.vllm.engine import VLLMEngine
from asyncrl.rollout.vllm.processes import Process
from asyncrl.world import RealWorld

Child = subprocess.Popen[bytes]
Client = Any  # conftest.FakeClient: test folders are no packages, so its type cannot be imported here
MakeEngine = Callable[..., VLLMEngine]


def request(prompt: tuple[int, ...] = (1, 2, 3), *, seed: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_ids=prompt, sampling=SamplingParams(**sampling), seed=seed)


def answers(*ids: int, version: int = 0) -> Callable[[Call], list[Part]]:
    spans = [VersionSpan(start=0, end=len(ids), version=version)]
    return lambda call: [Part(token_ids=ids, log_probs=[-0.5] * len(ids), spans=spans, finish="length")]


async def waiting_calls(engine: VLLMEngine, number: int) -> "list[asyncio.Task[Any]]":
    tasks = [asyncio.create_task(engine.generate(request(seed=seed))) for seed in range(number)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.stats()["running"] + engine.stats()["waiting"] == number
    return tasks


# --- requests ---------------------------------------------------------------------------------------------------------------------


async def test_a_call_is_given_its_room_and_an_id_of_its_own(make_engine: MakeEngine, client: Client, world: RealWorld) -> None:
    client.answer = answers(4)
    async with make_engine(world, context_len=8) as engine:
        for _ in range(2):
            await engine.generate(request(seed=2**63 + 5, max_tokens=100, stop_token_ids=(4,)))
    assert [call.max_tokens for call in client.calls] == [5, 5]
    assert [call.seed for call in client.calls] == [5, 5]
    assert len({call.request_id for call in client.calls}) == 2


@pytest.mark.parametrize(
    ("ids", "budget", "reason"),
    [((4, 5), 2, StopReason.LENGTH), ((4, 5), 9, StopReason.CONTEXT), ((4, 9), 9, StopReason.STOP), ((4, 9), 2, StopReason.STOP)],
)
async def test_the_reason_is_ours(
    make_engine: MakeEngine, client: Client, world: RealWorld, ids: tuple[int, ...], budget: int, reason: StopReason
) -> None:
    client.answer = answers(*ids)
    async with make_engine(world, context_len=5) as engine:
        generation = await engine.generate(request(max_tokens=budget, stop_token_ids=(9,)))
    assert (generation.token_ids, generation.stop_reason) == (list(ids), reason)


async def test_a_stop_string_cuts_what_came_after_it_and_aborts(make_engine: MakeEngine, client: Client, world: RealWorld) -> None:
    """Tokens that came in one part, tokens of the parts until the abort has worked, and weights that changed after the cut."""
    spans = [VersionSpan(start=0, end=2, version=0), VersionSpan(start=2, end=5, version=1), VersionSpan(start=5, end=7, version=2)]
    client.answer = lambda call: [
        Part(token_ids=[0, 1], log_probs=[-0.1, -0.2]),
        Part(token_ids=[2, 3, 4], log_probs=[-0.3, -0.4, -0.5]),
        Part(token_ids=[5, 6], log_probs=[-0.6, -0.7]),
        Part(token_ids=[], log_probs=[], spans=spans, finish="abort"),
    ]
    async with make_engine(world) as engine:
        generation = await engine.generate(request(max_tokens=20, stop_strings=("cd", "never")))
    assert generation.token_ids == [0, 1, 2, 3]
    assert generation.log_probs == [-0.1, -0.2, -0.3, -0.4]
    assert generation.version_spans == [spans[0], VersionSpan(start=2, end=4, version=1)]
    assert generation.stop_reason is StopReason.STOP
    assert client.aborted == [client.calls[0].request_id]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            [Part(token_ids=[4], log_probs=[-1.0], spans=[VersionSpan(start=0, end=1, version=0)], finish="abort")],
            "ended it after 1",
        ),
        ([Part(token_ids=[4, 5], log_probs=[-1.0], finish="length")], "2 tokens and 1 log-probs"),
        ([Part(token_ids=[4, 5], log_probs=[-1.0, -1.0], finish="length")], "versions of others"),
        (
            [
                Part(
                    token_ids=[4, 5],
                    log_probs=[-1.0, float("nan")],
                    spans=[VersionSpan(start=0, end=2, version=3)],
                    finish="length",
                )
            ],
            "not finite at weight version 3",
        ),
    ],
)
async def test_an_answer_that_cannot_be_trusted_is_an_error(
    make_engine: MakeEngine, client: Client, world: RealWorld, parts: list[Part], words: str
) -> None:
    client.answer = lambda call: parts
    async with make_engine(world) as engine:
        with pytest.raises(EngineError, match=words):
            await engine.generate(request(max_tokens=2))
        assert engine.failure is None


async def test_a_temperature_that_vllm_would_raise_is_refused(make_engine: MakeEngine, client: Client, world: RealWorld) -> None:
    async with make_engine(world) as engine:
        with pytest.raises(EngineError, match=r"'r': temperature 0\.001 is too low"):
            await engine.generate(request(temperature=0.001))
    assert client.calls == []


async def test_a_cancelled_call_is_aborted_and_counted(make_engine: MakeEngine, client: Client, world: RealWorld) -> None:
    async with make_engine(world, max_num_seqs=2) as engine:
        tasks = await waiting_calls(engine, 3)
        assert (engine.stats()["running"], engine.stats()["waiting"], engine.stats()["free_slots"]) == (2, 1, 0)
        tasks[1].cancel()
        await asyncio.wait({tasks[1]})
        assert tasks[1].cancelled()
        assert client.left == [client.calls[1].request_id]
        assert (engine.stats()["running"], engine.stats()["waiting"], engine.stats()["cancelled"]) == (2, 0, 1)
    await asyncio.gather(*tasks, return_exceptions=True)


# --- the end ----------------------------------------------------------------------------------------------------------------------


async def test_a_process_that_dies_ends_every_wait_and_is_named(
    make_engine: MakeEngine, client: Client, world: RealWorld, child: Child
) -> None:
    client.control.held = "pause"
    async with make_engine(world) as engine:
        tasks = await waiting_calls(engine, 3)
        tasks.append(asyncio.create_task(engine.pause()))
        await client.control.is_reached.wait()
        tasks.append(asyncio.create_task(engine.resume()))  # waits for its turn
        await asyncio.sleep(0)
        child.kill()
        words = re.escape(f"the worker (pid {child.pid}) was killed by SIGKILL")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert re.search(words, str(result))
        assert re.search(words, str(engine.failure))
        with pytest.raises(EngineError, match=words):
            await engine.generate(request())
    assert client.is_closed
    assert len(client.left) == 3


async def test_who_has_died_is_told_even_where_vllm_is_first_to_notice(
    make_engine: MakeEngine, client: Client, world: RealWorld, child: Child
) -> None:
    words = re.escape(f"the worker (pid {child.pid}) was killed by SIGKILL")

    def fail(call: Call) -> list[Part]:
        child.kill()  # nobody can have seen it when the error comes
        client.is_dead = True
        raise EngineError("dead")

    async with make_engine(world) as engine:
        client.answer = fail
        for result in await asyncio.gather(*(engine.generate(request()) for _ in range(2)), return_exceptions=True):
            assert isinstance(result, EngineError)
            assert re.search(words, str(result))
        assert re.search(words, str(engine.failure))


async def test_what_vllm_alone_knows_is_the_end_too(
    make_engine: MakeEngine, client: Client, world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM fails a request, and no process ends."""
    monkeypatch.setattr("asyncrl.rollout.vllm.engine.DEATH_NEWS_S", 0.01)

    def fail(call: Call) -> list[Part]:
        client.is_dead = True
        raise EngineError("dead")

    async with make_engine(world) as engine:
        others = await waiting_calls(engine, 2)
        client.answer = fail
        with pytest.raises(EngineError, match="EngineCore has failed"):
            await engine.generate(request())
        for result in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "EngineCore has failed" in str(result)
        assert "EngineCore has failed" in str(engine.failure)


async def test_a_request_that_fails_alone_harms_nobody(make_engine: MakeEngine, client: Client, world: RealWorld) -> None:
    def fail(call: Call) -> list[Part]:
        raise EngineError("vLLM refuses it")

    async with make_engine(world) as engine:
        client.answer = fail
        with pytest.raises(EngineError, match="refuses"):
            await engine.generate(request())
        client.answer = answers(4)
        assert (await engine.generate(request(max_tokens=1))).token_ids == [4]


async def test_a_call_cancelled_on_the_turn_of_the_death_is_cancelled(
    make_engine: MakeEngine, client: Client, world: RealWorld
) -> None:
    """Who asked it to end waits for that; an EngineError in its place would be taken for news."""
    async with make_engine(world) as engine:
        before, after = await waiting_calls(engine, 2)
        before.cancel()
        engine._waiters.fail("gone")
        after.cancel()
        await asyncio.wait({before, after})
        assert before.cancelled()
        assert after.cancelled()


async def test_a_deadline_around_a_call_outlives_its_death(make_engine: MakeEngine, client: Client, world: RealWorld) -> None:
    """The engine takes back the cancellation that it has made: a timeout or a group around the call counts them."""

    async def call(engine: VLLMEngine) -> int:
        with pytest.raises(EngineError, match="gone"):
            async with asyncio.timeout(60):
                await engine.generate(request())
        task = asyncio.current_task()
        assert task is not None
        await asyncio.sleep(0)
        return task.cancelling()

    async with make_engine(world) as engine:
        task = asyncio.create_task(call(engine))
        for _ in range(5):
            await asyncio.sleep(0)
        assert client.calls
        engine._waiters.fail("gone")
        assert await task == 0


async def test_closing_ends_every_wait_before_the_processes(make_engine: MakeEngine, client: Client, world: RealWorld) -> None:
    async with make_engine(world) as engine:
        tasks = await waiting_calls(engine, 2)
        client.close = lambda: check(tasks)
    assert engine.failure == "the engine was closed"
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError)


async def check(tasks: "list[asyncio.Task[Any]]") -> None:
    await asyncio.wait(tasks, timeout=60)
    assert all(task.done() for task in tasks)


async def test_processes_that_do_not_end_in_time_are_killed(
    make_engine: MakeEngine, client: Client, world: RealWorld, child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang() -> None:
        raise DeadlineError("shutdown took longer than 30 s")

    async with make_engine(world):
        client.close = hang
    assert child.wait(60) == -signal.SIGKILL
    assert "longer than 30 s" in caplog.text


async def test_an_engine_that_cannot_be_opened_is_closed(make_engine: MakeEngine, client: Client, world: RealWorld) -> None:
    client.control.broken = "asyncrl_version"
    with pytest.raises(EngineError, match="asyncrl_version is broken"):
        await make_engine(world).__aenter__()
    assert client.is_closed


async def test_a_process_that_is_gone_when_the_engine_opens_is_its_death(
    make_engine: MakeEngine, client: Client, world: RealWorld, child: Child
) -> None:
    child.kill()
    child.wait()
    client.processes = [Process(name="the worker", pid=child.pid, exit_code=lambda: -9)]
    client.control.held = "asyncrl_version"
    with pytest.raises(EngineError, match="SIGKILL"):
        await make_engine(world).__aenter__()
    assert client.is_closed


async def test_a_process_that_dies_while_the_engine_opens_is_named(
    make_engine: MakeEngine, client: Client, world: RealWorld, child: Child
) -> None:
    client.control.held = client.control.broken = "asyncrl_version"
    opening = asyncio.create_task(make_engine(world).__aenter__())
    await client.control.is_reached.wait()
    child.kill()
    client.is_dead = True
    client.control.released.set()
    with pytest.raises(EngineError, match="SIGKILL"):
        await opening
    assert client.is_closed
